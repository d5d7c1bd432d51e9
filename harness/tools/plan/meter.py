"""Count live bytes, FLOPs and sent bytes of operations on fake tensors.

torch's own counters are not sufficient. ``FlopCounterMode`` counts a DTensor operation as if one rank did all
of it and does not know CPU attention, ``CommDebugMode`` counts collectives but not bytes, and ``MemTracker``
expects one forward pass of a module before its backward. The meter counts operations on local tensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.distributed_c10d import GroupName, ProcessGroup, _resolve_process_group
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from harness.parallelism.mesh import EXPERT, EXPERT_SHARD, EXPERT_TENSOR, SHARD, Mesh

WORLD = "world"
"""Axis name for collectives over all ranks: norm, loss, expert loads."""
_AXES = {
    "pp": "pp",
    "dp_replicate": "dp",
    SHARD: "dp",
    "tp": "tp",
    EXPERT_SHARD: "dp",
    EXPERT: "ep",
    EXPERT_TENSOR: "tp",
}


class Meter(TorchDispatchMode):
    """Context manager that counts operations, inside of ``fake_tensors``.

    Args:
        mesh: names the axis of each process group.

    Attributes:
        live: bytes of live tensors created inside the context, without the allocator's rounding and
            fragmentation and without workspaces of kernels.
        peaks: maximum of ``live`` in each phase.
        flops: of matrix products and attention, counted as in ``harness/model/accounting.py``: attention in
            full, not its causal half, and its backward pass as four products, without the scores that kernels
            recompute. Recomputation by activation checkpointing counts.
        sent: bytes that this rank sends by axis (``dp``, ``tp``, ``cp``, ``ep``, ``pp``, ``optimizer``,
            ``world``), by the algorithms of ``sent_by``.
        times: how many times each operation counts in ``flops`` and ``sent``.
    """

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self.live = 0
        self.peaks: dict[str, int] = {}
        self.flops = 0.0
        self.sent: dict[str, float] = defaultdict(float)
        self.times = 1
        self._phase = ""
        self._axis_of_group = axes_of_groups(mesh)
        self._experts = {mesh.experts.get_group(EXPERT).group_name} if mesh.experts is not None else set()
        self._known: dict[int, tuple[weakref.ref, list[int]]] = {}
        self._counts = True
        self._undo = ExitStack()

    def begin(self, phase: str) -> None:
        """Start or continue a phase."""
        self._phase = phase
        self._note()

    def reset(self) -> None:
        """Reset all counters except for live bytes."""
        self.peaks, self.flops, self.sent, self.times = {}, 0.0, defaultdict(float), 1

    def __enter__(self) -> Any:
        resize, propagate = torch.UntypedStorage.resize_, ShardingPropagator._propagate_tensor_meta_non_cached

        # FSDP frees and allocates gathered parameters by resizing, which dispatch does not show.
        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            self._resized(storage)
            return result

        # DTensor runs operations at global shape to infer metadata; ranks do not run these.
        def propagate_(*args: Any) -> Any:
            self._counts = False
            try:
                return propagate(*args)
            finally:
                self._counts = True

        self._undo = ExitStack()
        self._undo.enter_context(patch.object(torch.UntypedStorage, "resize_", resize_))
        name = "_propagate_tensor_meta_non_cached"
        self._undo.enter_context(patch.object(ShardingPropagator, name, propagate_))
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        self._undo.close()
        super().__exit__(*exception)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in _LOCAL for kind in types):
            return NotImplemented
        if not self._counts:
            return func(*args, **(kwargs or {}))
        if func is _DEVICE:
            return args[0].device  # half of the dispatches
        name = _name(func)
        if name == "_c10d_functional.wait_tensor":
            return args[0]  # as with real tensors; on fake tensors it would create another one
        result = func(*args, **(kwargs or {}))
        self.flops += self.times * _FLOPS.get(name, _nothing)(*args)
        if name == "c10d.alltoall_base_":
            self._send_pieces(*args[1:5])
        elif name in _SENT:
            group, size = _SENT[name](*args)
            self._send(group.group_name, size, exchange="all_to_all" in name)
        elif name.startswith(("c10d", "_c10d")):
            raise NotImplementedError(f"nobody has said what {name} sends")
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor) and leaf.device.type != "meta":
                self._book(leaf.untyped_storage())
        return result

    def _send(self, group: str, size: float, *, exchange: bool) -> None:
        # Axes that have the whole world can be one group: rows that go to experts are exchanged.
        axis = "ep" if exchange and group in self._experts else self._axis_of_group[group]
        if size:
            self.sent[axis] += self.times * size

    def _send_pieces(self, sent: Tensor, group: Any, _: Any, sizes: list[int]) -> None:
        """Count an all-to-all of the optimizer: pieces of different sizes, without the rank's own."""
        own = sizes[ProcessGroup.unbox(group).rank()]
        self.sent["optimizer"] += self.times * (sent.numel() - own) * sent.element_size()

    def _book(self, storage: torch.UntypedStorage) -> None:
        key = id(storage)
        if key in self._known:
            return
        size = [storage.nbytes()]

        def strike(_: Any) -> None:
            self.live -= size[0]
            del self._known[key]

        self._known[key] = weakref.ref(storage, strike), size
        self.live += size[0]
        self._note()

    def _resized(self, storage: torch.UntypedStorage) -> None:
        _, size = self._known.get(id(storage), (None, None))
        if size is not None:
            self.live += storage.nbytes() - size[0]
            size[0] = storage.nbytes()
            self._note()

    def _note(self) -> None:
        self.peaks[self._phase] = max(self.peaks.get(self._phase, 0), self.live)


_LOCAL = (Tensor, torch.nn.Parameter, FakeTensor)
_DEVICE = torch.ops.prim.device.default


@cache
def _name(func: Any) -> str:
    return str(func._overloadpacket)


def axes_of_groups(mesh: Mesh) -> dict[str, str]:
    """The axis of every process group, by its name. An axis of all ranks may use the world's group."""
    axes = {dist.group.WORLD.group_name: WORLD}  # type: ignore[union-attr]
    if mesh.context is not None:
        axes[mesh.context.group_name] = "cp"
    for device_mesh in filter(None, (mesh.experts, mesh.device_mesh)):
        for name in device_mesh.mesh_dim_names or ():
            axes[device_mesh.get_group(name).group_name] = _AXES[name]
    return axes


def _nothing(*_: Any) -> float:
    return 0.0


# R: rows, I: input width, O: output width, B: batch, H: heads, T: positions, D: head width, E: that of values


def _product(a: Tensor, b: Tensor, *_: Any) -> float:
    """FLOPs of [.., R, I] times [I, O] or [.., I, O]."""
    return 2.0 * a.numel() * b.shape[-1]


def _added_product(_sum: Tensor, a: Tensor, b: Tensor, *_: Any) -> float:
    return _product(a, b)


def _grouped(x_RI: Tensor, weight_EOI: Tensor, *_: Any) -> float:
    return 2.0 * x_RI.numel() * weight_EOI.shape[1]


def _grouped_outer(grad_RO: Tensor, x_RI: Tensor, *_: Any) -> float:
    return 2.0 * x_RI.numel() * grad_RO.shape[1]


def _attention(q_BHTD: Tensor, k_BKTD: Tensor, v_BKTE: Tensor, *_: Any) -> float:
    queries = q_BHTD.numel() // q_BHTD.shape[-1]
    return 2.0 * queries * k_BKTD.shape[2] * (q_BHTD.shape[-1] + v_BKTE.shape[-1])


def _attention_backward(_grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> float:
    return 2 * _attention(q, k, v)


def _ring(q: Tensor, k: Tensor, v: Tensor, group: str, *_: Any) -> float:
    # The queries of a rank attend to the keys of all ranks.
    return _attention(q, k, v) * _resolve_process_group(GroupName(group)).size()


def _ring_backward(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _o: Any, _l: Any, group: str, *_: Any
) -> float:
    return 2 * _ring(q, k, v, group)


_FLOPS: dict[str, Callable[..., float]] = {
    "aten.mm": _product,
    "aten.bmm": _product,
    "aten._scaled_mm": _product,
    "aten.addmm": _added_product,
    "aten.addmm_": _added_product,
    "aten.baddbmm": _added_product,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_efficient_attention": _attention,
    "aten._scaled_dot_product_efficient_attention_backward": _attention_backward,
    "harness.grouped_product": _grouped,
    "harness.grouped_outer": _grouped_outer,
    "harness.ring_attention": _ring,
    "harness.ring_attention_backward": _ring_backward,
}


def sent_by(collective: str, ranks: int) -> float:
    """Return the bytes that a rank sends per input byte, in a ring of so many ranks.

    In all-gather and reduce-scatter a rank sends one part per other rank (Thakur, Rabenseifner, Gropp:
    Optimization of Collective Communication Operations in MPICH, 2005, section 4); an all-reduce is a
    reduce-scatter, then an all-gather.
    """
    return {
        "all_gather": ranks - 1.0,
        "reduce_scatter": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
        "all_to_all": (ranks - 1) / ranks,
        "send": 1.0,
    }[collective]


def _functional(collective: str) -> Callable[..., tuple[ProcessGroup, float]]:
    """Rule for torch's functional collectives: the input is the first argument, the group the last."""
    return lambda *args: _put_in(collective, args[0], args[-1])


def _of_c10d(collective: str, tensor: int, group: int) -> Callable[..., tuple[ProcessGroup, float]]:
    """Rule for in-place collectives: positions of the input and of the group among the arguments."""
    return lambda *args: _put_in(collective, args[tensor], args[group])


def _put_in(collective: str, tensors: Any, group: Any) -> tuple[ProcessGroup, float]:
    found = _resolve_process_group(GroupName(group)) if isinstance(group, str) else ProcessGroup.unbox(group)
    return found, sum(map(_bytes, tree_leaves(tensors))) * sent_by(collective, found.size())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _ring_sends(_q: Tensor, k: Tensor, v: Tensor, group: str, *_: Any) -> tuple[ProcessGroup, float]:
    """Keys and values pass around the ring, or are gathered: both send the same number of bytes."""
    found = _resolve_process_group(GroupName(group))
    return found, (found.size() - 1) * (_bytes(k) + _bytes(v))


def _ring_backward_sends(
    _grad: Tensor, q: Tensor, k: Tensor, v: Tensor, _o: Any, _l: Any, group: str, *_: Any
) -> tuple[ProcessGroup, float]:
    """As in forward, and the gradients of keys and values in float32, with one more step back to their rank
    (``_templated_ring_attention_backward`` of torch's ``_context_parallel/_attention.py``)."""
    found, size = _ring_sends(q, k, v, group)
    return found, size + found.size() * 4 * (k.numel() + v.numel())


_SENT: dict[str, Callable[..., tuple[ProcessGroup, float]]] = {
    "_c10d_functional.all_gather_into_tensor": _functional("all_gather"),
    "_c10d_functional.reduce_scatter_tensor": _functional("reduce_scatter"),
    "_c10d_functional.all_reduce": _functional("all_reduce"),
    "_c10d_functional.all_to_all_single": _functional("all_to_all"),
    "c10d._allgather_base_": _of_c10d("all_gather", 1, 2),
    "c10d._reduce_scatter_base_": _of_c10d("reduce_scatter", 1, 2),
    "c10d.allreduce_": _of_c10d("all_reduce", 0, 1),
    "harness.ring_attention": _ring_sends,
    "harness.ring_attention_backward": _ring_backward_sends,
}
