"""torch's ring attention as one operator of its own.

torch shares causal attention between ranks in ``_templated_ring_attention``: keys and values go round and
partial results are merged by their log-sum-exps (arXiv:2310.01889). What torch builds around it replaces
scaled_dot_product_attention for the whole process, and knows CUDA's kernels only. So here it is called
directly, with the kernel of the device, as one operator: compile and recomputation need not look inside. Keys
and values travel without being repeated for grouped queries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

# B: batch, H: query heads, K: key and value heads, T: sequence of this rank, D: head width

aten = torch.ops.aten

ROTATIONS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}
SEQUENCE_DIM = 2


@torch.library.custom_op("harness::ring_attention", mutates_args=())
def ring_attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, group: str, balanced: bool, rotation: str
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries to the keys and values of all ranks of a group.

    Args:
        q_BHTD: queries of this rank's positions.
        k_BKTD: its keys.
        v_BKTD: its values.
        group: name of the process group.
        balanced: whether each rank has one chunk of the sequence's head and one of its tail; else the r-th
            rank has the r-th chunk.
        rotation: how keys and values go round, by the names of parallelism.cp_rotate_method.

    Returns:
        The output [B, H, T, D], and the log-sum-exp of every row, [B, H, T] in float32.
    """
    kernel = _kernel(q_BHTD).forward

    def step(query: Tensor, key: Tensor, value: Tensor, **said: Any) -> tuple[Tensor, ...]:
        return kernel(query, key, value, said["is_causal"])

    with _options(balanced, rotation):
        out, lse = _templated_ring_attention(
            _resolve_process_group(GroupName(group)),
            SEQUENCE_DIM,
            step,
            q_BHTD,
            k_BKTD,
            v_BKTD,
            is_causal=True,
        )
    return out.contiguous(), lse.contiguous()


@ring_attention.register_fake
def _(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, group: str, balanced: bool, rotation: str
) -> tuple[Tensor, Tensor]:
    return q_BHTD.new_empty(q_BHTD.shape), q_BHTD.new_empty(q_BHTD.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("harness::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad_out: Tensor,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    balanced: bool,
    rotation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values."""
    kernel = _kernel(q_BHTD).backward

    def step(query: Tensor, key: Tensor, value: Tensor, **said: Any) -> tuple[Tensor, ...]:
        rest = said["out"], said["logsumexp"], said["is_causal"]
        return kernel(said["grad_out"], query, key, value, *rest)

    with _options(balanced, rotation):
        grads = _templated_ring_attention_backward(
            _resolve_process_group(GroupName(group)),
            SEQUENCE_DIM,
            step,
            grad_out.contiguous(),
            "grad_out",
            q_BHTD,
            k_BKTD,
            v_BKTD,
            out,
            lse,
            is_causal=True,
        )
    grad_q, grad_k, grad_v = grads
    # These two came in one buffer, and what an operator returns must not overlap.
    return grad_q.contiguous(), grad_k.clone(), grad_v.clone()


@ring_attention_backward.register_fake
def _(
    grad_out: Tensor,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    balanced: bool,
    rotation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    return q_BHTD.new_empty(q_BHTD.shape), k_BKTD.new_empty(k_BKTD.shape), v_BKTD.new_empty(v_BKTD.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.how = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*ring_attention_backward(grad_out, *ctx.saved_tensors, *ctx.how), None, None, None)


ring_attention.register_autograd(_differentiate, setup_context=_save)


@contextmanager
def _options(balanced: bool, rotation: str) -> Iterator[None]:
    """torch's options of ring attention, which are global to the process, for one call."""
    before = _cp_options.enable_load_balance, _cp_options.rotate_method
    _cp_options.enable_load_balance, _cp_options.rotate_method = balanced, ROTATIONS[rotation]
    try:
        yield
    finally:
        _cp_options.enable_load_balance, _cp_options.rotate_method = before


class _Kernel(NamedTuple):
    """Attention of one device and format to the keys of one step of the ring.

    Backward takes output and log-sum-exps from outside: they are those of all steps together.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]]
    """From queries, keys, values and whether they are causal to the output and its log-sum-exps."""
    backward: Callable[..., tuple[Tensor, ...]]
    """From the output's gradient, queries, keys, values, output, log-sum-exps and causality to gradients."""


def _kernel(query: Tensor) -> _Kernel:
    if query.device.type == "cpu":
        return _Kernel(_cpu_forward, _cpu_backward)
    if query.dtype in (torch.float16, torch.bfloat16):
        return _Kernel(_flash_forward, _flash_backward)
    return _Kernel(_efficient_forward, _efficient_backward)


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)


def _cpu_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, q, k, v, out, lse, 0.0, is_causal
    )


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]


def _flash_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    # Random states are read for dropout only, places of documents where there are some.
    unread = torch.empty(0, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, unread, unread)
    )


LSE_ROWS = 32
"""The memory-efficient kernel pads its log-sum-exps to a multiple of so many rows."""


def _efficient_forward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, ...]:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[:2]
    return out, lse[:, :, : q.shape[2]]


def _efficient_backward(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool
) -> tuple[Tensor, ...]:
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(shared, dim=1), v.repeat_interleave(shared, dim=1)
    lse = F.pad(lse, (0, -lse.shape[2] % LSE_ROWS), value=float("inf"))
    unread = torch.empty((), dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(grad_out, q, k, v, None, out, lse, unread, unread, 0.0, [True, True, True, False], is_causal)
    )
    return grad_q, *(grad.unflatten(1, (-1, shared)).sum(2) for grad in (grad_k, grad_v))
