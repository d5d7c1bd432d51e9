"""torch's ring attention as one custom operator.

torch implements causal ring attention in ``_templated_ring_attention``: keys and values rotate over the ranks
and partial results are merged by their log-sum-exps (arXiv:2310.01889). torch's public interface replaces
scaled_dot_product_attention for the entire process, and supports CUDA kernels only. So the function is called
directly here, with the kernel of the device, as one operator that is opaque to compile and recomputation.
Keys and values are sent without being repeated for grouped queries.
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
        k_BKTD: keys of this rank's positions.
        v_BKTD: values of this rank's positions.
        group: name of the process group.
        balanced: whether each rank has one chunk of the sequence's head and one of its tail; else rank r has
            the r-th chunk.
        rotation: a value of parallelism.cp_rotate_method.

    Returns:
        The output [B, H, T, D], and the log-sum-exp of every row, [B, H, T] in float32.
    """
    kernel = _kernel(q_BHTD).forward

    def step(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        return kernel(query, key, value, kwargs["is_causal"])

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

    def step(query: Tensor, key: Tensor, value: Tensor, **kwargs: Any) -> tuple[Tensor, ...]:
        rest = kwargs["out"], kwargs["logsumexp"], kwargs["is_causal"]
        return kernel(kwargs["grad_out"], query, key, value, *rest)

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
    # These two share one buffer, and an operator's outputs must not overlap.
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
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*ring_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None)


ring_attention.register_autograd(_differentiate, setup_context=_save)


@contextmanager
def _options(balanced: bool, rotation: str) -> Iterator[None]:
    """Set torch's process-wide options of ring attention for one call."""
    before = _cp_options.enable_load_balance, _cp_options.rotate_method
    _cp_options.enable_load_balance, _cp_options.rotate_method = balanced, ROTATIONS[rotation]
    try:
        yield
    finally:
        _cp_options.enable_load_balance, _cp_options.rotate_method = before


class _Kernel(NamedTuple):
    """Attention kernel of a device and dtype for one step of the ring.

    Backward takes the output and log-sum-exps of all steps combined, so they are arguments.
    """

    forward: Callable[[Tensor, Tensor, Tensor, bool], tuple[Tensor, ...]]
    """Map (queries, keys, values, is_causal) to (output, log-sum-exps)."""
    backward: Callable[..., tuple[Tensor, ...]]
    """Map (grad_out, queries, keys, values, output, log-sum-exps, is_causal) to the three gradients."""


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
    # The None arguments are sequence boundaries (varlen only); random states are read for dropout only.
    unused = torch.empty(0, dtype=torch.uint64, device=q.device)
    return aten._scaled_dot_product_flash_attention_backward(
        *(grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, unused, unused)
    )


LSE_ROWS = 32
"""The memory-efficient kernel pads its log-sum-exps to a multiple of this many rows."""


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
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    grad_q, grad_k, grad_v, _ = aten._scaled_dot_product_efficient_attention_backward(
        *(grad_out, q, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False], is_causal)
    )
    return grad_q, *(grad.unflatten(1, (-1, shared)).sum(2) for grad in (grad_k, grad_v))
