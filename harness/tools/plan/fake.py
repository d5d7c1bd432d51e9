"""One rank of a fake world: torch's fake process group, fake tensors, and replacements for GPU kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.optim import adam
from torch.testing._internal.distributed.fake_pg import FakeStore

from harness.config.job import Job
from harness.model.kernels import Kernel, SdpaKernel
from harness.model.part import ModelPart
from harness.optimizer import muon
from harness.optimizer.adamw import RoundedAdamW
from harness.parallelism import clip
from harness.parallelism.context import RingAttention, UlyssesAttention
from harness.parallelism.expert import ExpertExchange
from harness.train.engine import Engine
from harness.util.errors import UserError

aten = torch.ops.aten
CPU = torch.device("cpu")


@contextmanager
def fake_process_group(rank: int, world_size: int) -> Iterator[None]:
    """Make this process a rank of a fake process group, whose other ranks do not exist.

    Raises:
        UserError: the process is already a rank of a process group.
    """
    if dist.is_initialized():
        raise UserError(
            f"fake process group of {world_size} ranks: this process is already in a process group; "
            "would work: a process without one"
        )
    _clear_sharding_prop_cache()
    # init_process_group replaces the hook, to put the rank before every line of an uncaught error.
    excepthook = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook
        # Cached sharding decisions refer to meshes of destroyed groups.
        _clear_sharding_prop_cache()


def cpu_version(job: Job) -> tuple[Job, list[str]]:
    """Return the job in a form that a CPU can lay out, and notes on what was removed or replaced.

    Names, shapes and placements of parameters do not change.
    """
    notes = []
    if job.parallelism.async_tp:
        job = replace(job, parallelism=replace(job.parallelism, async_tp=False))
        notes.append("async_tp is left out: symmetric memory needs GPUs")
    if job.precision.linear != "none" and not job.precision.emulate:
        job = replace(job, precision=replace(job.precision, emulate=True))
        notes.append(f"{job.precision.linear} is emulated: its kernels need a GPU")
    if job.compile.enable:
        job = replace(job, compile=replace(job.compile, enable=False))
        notes.append("nothing is compiled")
    return job, notes


# Methods of a mesh that compute with its real tensor of ranks.
_MESH_METHODS = ("__getitem__", "_flatten", "_concatenate", "_unflatten", "get_coordinate", "get_local_rank")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Run operations on fake tensors: they have shapes and dtypes, but neither values nor memory."""
    mesh: Any = DeviceMesh
    with ExitStack() as undo:
        for name in _MESH_METHODS:
            if hasattr(mesh, name):
                undo.enter_context(patch.object(mesh, name, _with_real_tensors(getattr(mesh, name))))
        undo.enter_context(patch.object(mesh, "mesh", property(_with_real_tensors(mesh.mesh.fget))))
        undo.enter_context(patch.object(muon, "mesh_ranks", _with_real_tensors(muon.mesh_ranks)))
        # It must not cache fake tensors.
        clip._device_constant.cache_clear()
        undo.callback(clip._device_constant.cache_clear)
        # Optimizers read their step counts.
        undo.enter_context(patch.object(adam, "_get_value", lambda _: 1.0))
        undo.enter_context(patch.object(RoundedAdamW, "_count", staticmethod(lambda _: 1.0)))
        # The host reads its results.
        undo.enter_context(patch.object(Engine, "world_sum", _with_real_tensors(Engine.world_sum)))
        # Some tensors are created earlier, such as the positions of a context-parallel rank.
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _with_real_tensors(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function so that it runs outside of the fake mode."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def stages_in(schedule: Any) -> list[Any]:
    """torch's stages of a schedule."""
    return getattr(schedule, "_stages", None) or [schedule._stage]


def replace_modules(part: ModelPart) -> None:
    """Replace modules of a model part that need values or a GPU kernel."""
    for module in part.kernels:
        if isinstance(module.inner, UlyssesAttention):
            module.inner.inner = _kernel(module.inner.inner, part.seq_len)
        elif not isinstance(module.inner, RingAttention):
            module.inner = _kernel(module.inner, part.seq_len)
    for moe in part.mixtures.values():
        if isinstance(moe.exchange, ExpertExchange):
            moe.exchange = EvenExchange(moe.exchange.group)


def _kernel(kernel: Kernel, seq_len: int) -> Kernel:
    """Return a ``FakeKernel``; keep sdpa if it needs a dense mask, whose memory counts."""
    needs_mask = not kernel.spec.is_causal(seq_len) or kernel.spec.has_sinks
    return kernel if isinstance(kernel, SdpaKernel) and needs_mask else FakeKernel(kernel.spec)


class FakeKernel(Kernel):
    """Attention without a mask in memory; it saves queries, keys, values, the output and one sum per row.

    In layers with a window or chunks, all queries attend to the maximum number of keys of a query. FLOPs are
    counted the same way (``harness/model/accounting.py``).
    """

    def mask(self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device) -> None:
        return None

    def forward(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: None, sinks_H: Tensor | None = None
    ) -> Tensor:
        keys = slice(None, self.spec.span.most_reach(k_BTKD.shape[1]))
        q, k, v = q_BTHD.transpose(1, 2), k_BTKD[:, keys].transpose(1, 2), v_BTKE[:, keys].transpose(1, 2)
        scale = self.spec.scale
        if q.shape[-1] == v.shape[-1]:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, self.spec.causal, scale=scale
            )
        else:
            # The only GPU kernel that all versions have and that takes values of another width.
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, self.spec.causal, scale=scale
            )
        if sinks_H is not None:
            out = out * torch.sigmoid(lse.detach().view(out.shape[:3]) - sinks_H[:, None])[..., None].to(out)
        return out.transpose(1, 2)


class EvenExchange(ExpertExchange):
    """Every rank sends the same number of rows to each rank: without values the routing is unknown."""

    def _lengths(self, given: Tensor, got: Tensor, rows: int) -> tuple[list[int], list[int]]:
        even = [rows // self.ranks + (rank < rows % self.ranks) for rank in range(self.ranks)]
        return even, [even[self.group.rank()]] * self.ranks
