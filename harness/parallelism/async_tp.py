"""Asynchronous tensor parallel: products that the compiler overlaps with collectives."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh

from harness.util.errors import ConfigError

# Functions of torch that run what the compiler has fused, by kind.
_FUSED = {
    "all-gathers": (
        "_fused_all_gather_matmul_impl",
        "_fused_all_gather_matmul_native",
        "_multimem_all_gather_matmul",
    ),
    "reduce-scatters": (
        "_fused_matmul_reduce_scatter_impl",
        "_fused_scaled_matmul_reduce_scatter_impl",
    ),
}
fused: Counter[str] = Counter()
"""How often this process has run what the compiler has fused, by kind."""


def enable_async(mesh: DeviceMesh, device: torch.device) -> None:
    """Enable symmetric memory on the tp axis, with which the compiler overlaps products and collectives.

    Without it the compiler's pass would silently do nothing. What it fuses is counted in ``fused``.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    count = torch.cuda.device_count() if device.type == "cuda" else 0
    others = [i for i in range(count) if i != device.index]
    if count < mesh.size() or not all(
        torch.cuda.can_device_access_peer(device.index, i) for i in others
    ):
        rule = "needs GPUs that have access to each other's memory"
        raise ConfigError("parallelism.async_tp", True, rule, "parallelism.async_tp=false")
    symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
    for kind, names in _FUSED.items():
        for name in names:
            function = getattr(symmetric_memory, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(symmetric_memory, name, _counting(kind, function))


def _counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        fused[kind] += 1
        return function(*args, **options)

    return call


def describe_fused(counts: Mapping[str, int]) -> str:
    """Describe what asynchronous tensor parallel has fused in the first step; warn if a kind is missing."""
    found = " and ".join(f"{counts.get(kind, 0)} {kind}" for kind in _FUSED)
    warning = "" if all(map(counts.get, _FUSED)) else "WARNING parallelism.async_tp=true: "
    return f"{warning}fused {found} with products, in the first step"


def avoid_copies(async_tp: bool) -> None:
    """Let torch gather and scatter the sequence of a single sample as views, which needs no copies.

    torch 2.13 does so for gathers alone. Its pass for async_tp finds only gathers and scatters with
    copies.
    """
    for name, function in (
        ("_maybe_view_chunk_cat", _join_chunks),
        ("_chunk_or_narrow_cat", _stack_chunks),
    ):
        copies = async_tp == (function is _join_chunks)
        setattr(_functional_collectives, name, function if copies else getattr(torch._utils, name))


def _join_chunks(gathered: Tensor, ranks: int, dim: int) -> Tensor:
    return gathered if dim == 0 else torch.cat(gathered.chunk(ranks), dim)


def _stack_chunks(tensor: Tensor, num_chunks: int, narrow_dim: int, cat_dim: int) -> Tensor:
    if narrow_dim == 1 and cat_dim == 0 and len(tensor) == 1:
        return tensor.reshape(num_chunks, -1, *tensor.shape[2:])
    return torch.cat(tensor.chunk(num_chunks, narrow_dim), cat_dim)
