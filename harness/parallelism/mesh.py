"""The device mesh: which ranks each rank works with, on every axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.parallelism.config import ParallelismConfig

SHARD = "shard"
"""The axis of ranks that share parameters: dp_shard x cp."""
EXPERT_SHARD, EXPERT, EXPERT_TENSOR = "expert_shard", "ep", "expert_tp"
"""Axes of the experts' own mesh: ranks that share the parameters of the same experts, ranks that have
different ones, and with expert_tensor_parallel ranks that share every expert."""


@dataclass(frozen=True)
class Mesh:
    """A named mesh with the questions the rest of the code asks of it.

    Axes of degree 1 have no process group, so that starting does not pay for them. Instead of dp_shard and cp
    the mesh has ``shard``, both as one axis: ranks that share the sequence have each a part of the gradients,
    like ranks that have sequences of their own, so FSDP treats them alike. It is always there, because FSDP
    also carries mixed precision where nothing is sharded.
    """

    device_mesh: DeviceMesh
    degrees: dict[str, int]
    context: dist.ProcessGroup | None = None
    """The ranks that share this rank's sequences, with context parallel."""
    experts: DeviceMesh | None = None
    """Where experts are laid out in another way than the rest of the parameters: dp_replicate, expert_shard,
    ep and expert_tp."""

    def size(self, axis: str) -> int:
        """Degree of an axis."""
        return self.degrees[axis]

    def rank(self, axis: str) -> int:
        """This rank's place on an axis."""
        if axis == "cp":
            return self.rank(SHARD) % self.size("cp")
        if axis == "dp_shard":
            return self.rank(SHARD) // self.size("cp")
        return self.device_mesh.get_local_rank(axis) if axis in self._names else 0

    def axis(self, *names: str) -> DeviceMesh:
        """The submesh of one or more axes, of which dp_shard and cp are the one axis ``shard``."""
        return self.device_mesh[names if len(names) > 1 else names[0]]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of one axis of degree above 1."""
        if axis == "cp":
            assert self.context is not None, "the layout has no context parallel"
            return self.context
        return self.device_mesh.get_group(axis)

    @property
    def _names(self) -> tuple[str, ...]:
        return self.device_mesh.mesh_dim_names or ()

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank works on, of dp_replicate x dp_shard."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")


def build_mesh(layout: ParallelismConfig, device: torch.device, *, has_experts: bool = False) -> Mesh:
    """Makes the process groups of a layout; all ranks call it together.

    Args:
        layout: degrees of parallelism, resolved.
        device: what the ranks compute on.
        has_experts: whether the model has experts, which may be laid out in another way.
    """
    degrees = layout.degrees
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        SHARD: layout.parameter_shards,
        "tp": layout.tp,
    }
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis == SHARD}
    device_mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    context = None
    if layout.cp > 1:
        groups = context_groups(device_mesh.mesh, list(sizes).index(SHARD), layout.cp)
        context, _ = dist.new_subgroups_by_enumeration(groups)
    experts = _expert_mesh(layout, device) if has_experts and layout.lays_out_experts else None
    return Mesh(device_mesh, degrees, context, experts)


def _expert_mesh(layout: ParallelismConfig, device: torch.device) -> DeviceMesh:
    """The same ranks in the same order, divided in another way within a replica of a stage."""
    sizes = {
        "pp": layout.pp,
        "dp_replicate": layout.dp_replicate,
        EXPERT_SHARD: layout.expert_shards,
        EXPERT: layout.ep,
        EXPERT_TENSOR: layout.tp if layout.expert_tensor_parallel else 1,
    }
    sizes = {axis: size for axis, size in sizes.items() if size > 1 or axis in (EXPERT_SHARD, EXPERT)}
    return init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def context_groups(ranks: Tensor, axis: int, cp: int) -> list[list[int]]:
    """The ranks of every context-parallel group: cp neighbours on the axis that dp_shard and cp make up."""
    return ranks.unflatten(axis, (-1, cp)).movedim(axis + 1, -1).reshape(-1, cp).tolist()
