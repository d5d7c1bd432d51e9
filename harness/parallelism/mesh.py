"""The device mesh: process groups of every axis."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.config.parallelism import ParallelismConfig
from harness.util.errors import ConfigError

SHARD = "shard"
"""The axis that FSDP shards parameters over: dp_shard x cp."""
EXPERT_SHARD = "expert_shard"
EXPERT = "ep"
EXPERT_TENSOR = "expert_tp"
"""Axes of the expert mesh: ranks that shard the same experts' parameters, ranks that hold different experts,
and with expert_tensor_parallel ranks that split every expert."""


@dataclass(frozen=True)
class Mesh:
    """A named device mesh.

    Axes of degree 1 have no process group, which saves startup time. Instead of dp_shard and cp the
    mesh has one axis ``shard`` for both: context-parallel ranks have partial gradients, like ranks
    with different sequences, so FSDP treats both alike. The axis always exists, because FSDP also
    implements mixed precision where nothing is sharded.
    """

    device_mesh: DeviceMesh
    degrees: dict[str, int]
    context: dist.ProcessGroup | None = None
    """With context parallel: the ranks that split this rank's sequences."""
    experts: DeviceMesh | None = None
    """Where experts are distributed differently from the other parameters: dp_replicate, expert_shard, ep and
    expert_tp."""

    def size(self, axis: str) -> int:
        """Degree of an axis."""
        return self.degrees[axis]

    def rank(self, axis: str) -> int:
        """This rank's coordinate on an axis."""
        if axis == "cp":
            return self.rank(SHARD) % self.size("cp")
        if axis == "dp_shard":
            return self.rank(SHARD) // self.size("cp")
        names = self.device_mesh.mesh_dim_names or ()
        return self.device_mesh.get_local_rank(axis) if axis in names else 0

    def axis(self, *names: str) -> DeviceMesh:
        """The submesh of one or more axes; dp_shard and cp are the one axis ``shard``."""
        return self.device_mesh[names]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of one axis of degree above 1."""
        if axis == "cp":
            assert self.context is not None, "the layout has no context parallel"
            return self.context
        return self.device_mesh.get_group(axis)

    @property
    def data_rank(self) -> int:
        """Index of this rank's part of the batch, in range(dp_replicate x dp_shard)."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")


def build_mesh(
    layout: ParallelismConfig, device: torch.device, *, has_experts: bool = False
) -> Mesh:
    """Make the process groups of a layout; all ranks must call it.

    Args:
        device: the ranks' device type.
        has_experts: whether the model has experts, which may need a mesh of their own.

    Raises:
        ConfigError: the layout needs a newer torch.
    """
    refuse_older_torch(layout, device)

    def made(sizes: dict[str, int]) -> DeviceMesh:
        outer = {"pp": layout.pp, "dp_replicate": layout.dp_replicate}
        always = (SHARD, EXPERT_SHARD, EXPERT)
        kept = {axis: size for axis, size in (outer | sizes).items() if size > 1 or axis in always}
        return init_device_mesh(device.type, tuple(kept.values()), mesh_dim_names=tuple(kept))

    device_mesh = made({SHARD: layout.parameter_shards, "tp": layout.tp})
    context = None
    if layout.cp > 1:
        axis = (device_mesh.mesh_dim_names or ()).index(SHARD)
        groups = context_groups(device_mesh.mesh, axis, layout.cp)
        context, _ = dist.new_subgroups_by_enumeration(groups)
    experts = None
    if has_experts and layout.has_expert_mesh:
        # The same ranks in the same order, with expert axes within a replica of a stage.
        parts = layout.tp if layout.expert_tensor_parallel else 1
        experts = made(
            {EXPERT_SHARD: layout.expert_shards, EXPERT: layout.ep, EXPERT_TENSOR: parts}
        )
    return Mesh(device_mesh, layout.degrees, context, experts)


def refuse_older_torch(layout: ParallelismConfig, device: torch.device) -> None:
    """Raise ConfigError where torch is older than 2.13 and the layout needs what it lacks.

    Tensor parallel needs placements of gradients (``DTensor.from_local``), and gathering keys a function. Of
    pipelines on CPUs the schedules with a V fail to connect. On GPUs no layout of several ranks was tried.
    """
    if torch.__version__ >= "2.13":
        return
    rule = f"needs torch 2.13 or newer, and this is {torch.__version__}"
    for axis in ("tp", "pp"):
        degree = layout.degrees[axis]
        if degree > 1:
            raise ConfigError(f"parallelism.{axis}", degree, rule, "1, or torch 2.13")
    if layout.gathers_keys:
        raise ConfigError("parallelism.cp_method", "gather", rule, "ring, ulysses, or torch 2.13")
    ranks = layout.world_size
    if device.type == "cuda" and ranks > 1:
        works = "one rank, cpu, or torch 2.13"
        raise ConfigError("cluster.device", "cuda", f"with {ranks} ranks {rule}", works)


def stage_group(mesh: Mesh) -> dist.ProcessGroup | None:
    """Return the group of all ranks of this pipeline stage, None for one rank; all ranks must call it."""
    stages = mesh.size("pp")
    ranks = mesh.device_mesh.size()
    if ranks == stages:
        return None
    if stages == 1:
        return dist.group.WORLD
    # The axis pp is the outermost.
    group, _ = dist.new_subgroups_by_enumeration(mesh.device_mesh.mesh.reshape(stages, -1).tolist())
    return group


def context_groups(ranks: Tensor, axis: int, cp: int) -> list[list[int]]:
    """Ranks of every context-parallel group: cp neighbours on the axis ``shard``."""
    return ranks.unflatten(axis, (-1, cp)).movedim(axis + 1, -1).reshape(-1, cp).tolist()
