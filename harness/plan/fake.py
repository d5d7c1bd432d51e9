"""A world in one process: torch's fake process group, tensors without memory, and stand-ins for GPUs."""

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

from harness.errors import UserError
from harness.job import Job
from harness.model.attention import Attention, LatentAttention
from harness.model.decoder import Decoder
from harness.model.kernels import Kernel, SdpaKernel
from harness.optimizer.adamw import RoundedAdamW
from harness.parallelism import clip
from harness.parallelism.context import RingAttention, UlyssesAttention
from harness.parallelism.expert import ExpertExchange

aten = torch.ops.aten
CPU = torch.device("cpu")


@contextmanager
def pretending(rank: int, world_size: int) -> Iterator[None]:
    """This process is a rank of a world whose other ranks are not there; afterwards it is none.

    Raises:
        UserError: it is a rank of a real one.
    """
    if dist.is_initialized():
        raise UserError(
            f"a pretended world of {world_size} ranks: this process is a rank of another one already; "
            "would work: a process that is none"
        )
    _clear_sharding_prop_cache()
    # torch puts the rank before every line of an uncaught error, for good.
    says_errors = sys.excepthook
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = says_errors
        # Cached sharding decisions hold meshes of groups that are gone.
        _clear_sharding_prop_cache()


def stand_in(job: Job) -> tuple[Job, list[str]]:
    """The job as a CPU can lay it out, and what had to be left out or replaced for that.

    Names, shapes and placements of parameters are those of the job.
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


# Methods of a mesh that compute with its tensor of ranks, which is a real one.
_MESH_METHODS = ("__getitem__", "_flatten", "_concatenate", "_unflatten", "get_coordinate", "get_local_rank")


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Operations have shapes and formats and compute nothing; tensors take no memory."""
    mesh: Any = DeviceMesh
    with ExitStack() as undo:
        for name in _MESH_METHODS:
            if hasattr(mesh, name):
                undo.enter_context(patch.object(mesh, name, _really(getattr(mesh, name))))
        undo.enter_context(patch.object(mesh, "mesh", property(_really(mesh.mesh.fget))))
        # What it keeps for later would be without values.
        clip._vector.cache_clear()
        undo.callback(clip._vector.cache_clear)
        # Optimizers ask how many steps there were.
        undo.enter_context(patch.object(adam, "_get_value", lambda _: 1.0))
        undo.enter_context(patch.object(RoundedAdamW, "_count", staticmethod(lambda _: 1.0)))
        # Some tensors are made earlier, such as the positions of a context-parallel rank.
        undo.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield


def _really(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, outside of a world of fake tensors."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def stages_in(schedule: Any) -> list[Any]:
    """torch's stages in one of its schedules."""
    return getattr(schedule, "_stages", None) or [schedule._stage]


def without_values(part: Decoder) -> None:
    """Replaces, in a model part, what needs values or a GPU's kernel."""
    for module in part.modules():
        if isinstance(module, Attention | LatentAttention):
            if isinstance(module.inner, UlyssesAttention):
                module.inner.inner = _kernel(module.inner.inner, part.seq_len)
            elif not isinstance(module.inner, RingAttention):
                module.inner = _kernel(module.inner, part.seq_len)
    for moe in part.mixtures.values():
        if isinstance(moe.exchange, ExpertExchange):
            moe.exchange = EvenExchange(moe.exchange.group)


def _kernel(kernel: Kernel, seq_len: int) -> Kernel:
    needs_mask = not kernel.reach.is_causal(seq_len) or kernel.reach.has_sinks
    return kernel if isinstance(kernel, SdpaKernel) and needs_mask else FakeKernel(kernel.reach)


class FakeKernel(Kernel):
    """A kernel without a mask in memory; it keeps queries, keys, values, the output and one sum a row.

    Where a layer does not see the whole sequence, queries meet as many keys as the most that one of them
    sees. That is how FLOPs are counted (``harness/model/accounting.py``).
    """

    def mask(self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device) -> None:
        return None

    def forward(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: None, sinks_H: Tensor | None = None
    ) -> Tensor:
        keys = slice(None, self.reach.span.most_reach(k_BTKD.shape[1]))
        q, k, v = q_BTHD.transpose(1, 2), k_BTKD[:, keys].transpose(1, 2), v_BTKE[:, keys].transpose(1, 2)
        scale = self.reach.scale
        if q.shape[-1] == v.shape[-1]:
            out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=scale)
        else:
            # The one kernel of GPUs that is there in all versions and takes values of another width.
            out, lse, *_ = aten._scaled_dot_product_efficient_attention(
                q, k, v, None, True, 0.0, True, scale=scale
            )
        if sinks_H is not None:
            out = out * torch.sigmoid(lse.detach().view(out.shape[:3]) - sinks_H[:, None])[..., None].to(out)
        return out.transpose(1, 2)


class EvenExchange(ExpertExchange):
    """Every rank sends as many rows to every other: how many go where is not known without values."""

    def _lengths(self, given: Tensor, got: Tensor, rows: int) -> tuple[list[int], list[int]]:
        even = [rows // self.ranks + (rank < rows % self.ranks) for rank in range(self.ranks)]
        return even, [even[self.group.rank()]] * self.ranks
