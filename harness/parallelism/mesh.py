"""The device mesh: which ranks each rank works with, on every axis."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from harness.parallelism.config import ParallelismConfig


@dataclass(frozen=True)
class Mesh:
    """A named mesh with the questions the rest of the code asks of it.

    Axes of degree 1 have no process group, so that starting does not pay for them; dp_shard is always
    there, because FSDP also carries mixed precision where nothing is sharded.
    """

    device_mesh: DeviceMesh
    degrees: dict[str, int]

    def size(self, axis: str) -> int:
        """Degree of an axis."""
        return self.degrees[axis]

    def rank(self, axis: str) -> int:
        """This rank's place on an axis."""
        return self.device_mesh.get_local_rank(axis) if axis in self._names else 0

    def axis(self, *names: str) -> DeviceMesh:
        """The submesh of one or more axes."""
        return self.device_mesh[names if len(names) > 1 else names[0]]

    def group(self, axis: str) -> dist.ProcessGroup:
        """The process group of one axis of degree above 1."""
        return self.device_mesh.get_group(axis)

    @property
    def _names(self) -> tuple[str, ...]:
        return self.device_mesh.mesh_dim_names or ()

    @property
    def data_rank(self) -> int:
        """Which share of the batch this rank works on, of dp_replicate x dp_shard."""
        return self.rank("dp_replicate") * self.size("dp_shard") + self.rank("dp_shard")


def build_mesh(layout: ParallelismConfig, device: torch.device) -> Mesh:
    """Makes the process groups of a layout; all ranks call it together."""
    degrees = layout.degrees
    names = tuple(axis for axis, degree in degrees.items() if degree > 1 or axis == "dp_shard")
    device_mesh = init_device_mesh(device.type, tuple(degrees[n] for n in names), mesh_dim_names=names)
    return Mesh(device_mesh, degrees)
