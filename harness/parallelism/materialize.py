"""Allocation and initialization: every rank generates each full parameter by name and keeps its shard."""

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Placement, Replicate

from harness.model.part import ModelPart
from harness.model.spec import Init, tensors
from harness.parallelism.fused import lay_parameters


def materialize(
    part: ModelPart, seed: int, device: torch.device, parameter_device: torch.device
) -> None:
    """Allocate and initialize a parallelized model part.

    Args:
        part: a part on meta; its parameters may be DTensors.
        device: where the part computes. Values are generated there even if parameters are stored
            elsewhere, so that offloading does not change a run.
        parameter_device: where parameters are stored.
    """
    allocate(part, device, parameter_device)
    specs = tensors(part.config)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            shape = tuple(parameter.shape)
            ranges = local_ranges(parameter)
            init = specs[name].init
            if not specs[name].is_expert:
                full = draw(name, shape, init, seed, device)
                local.copy_(full[_slices(ranges)])
                continue
            for row, expert in enumerate(ranges[0]):
                full = draw(f"{name}.{expert}", shape[1:], init, seed, device)
                local[row].copy_(full[_slices(ranges[1:])])


def allocate(part: ModelPart, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate a part, and compute its buffers."""
    part.to_empty(device=parameter_device)
    if not isinstance(part, FSDPModule):
        lay_parameters(part)
    part.tie_embeddings()
    part.materialize_buffers(device)


def local_ranges(parameter: Tensor) -> list[range]:
    """The indices of this rank's shard in every dimension of the full tensor."""
    if not isinstance(parameter, DTensor):
        return [range(size) for size in parameter.shape]
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the parameter's mesh"
    return shard_ranges(parameter.shape, parameter.device_mesh, parameter.placements, coordinate)


def shard_ranges(
    shape: Sequence[int],
    mesh: DeviceMesh,
    placements: Sequence[Placement],
    coordinate: Sequence[int],
) -> list[range]:
    """The indices of the shard at a coordinate of the mesh, in every dimension of the full tensor.

    FSDP over tensor parallel is a "strided" shard: its mesh axis is the outer one, but it splits
    after tensor parallel.
    """
    ranges = [range(size) for size in shape]
    ordered = sorted(enumerate(placements), key=lambda p: type(p[1]).__name__ == "_StridedShard")
    for axis, placement in ordered:
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        # As torch.chunk: pieces of equal length, then a shorter one, then empty ones.
        length = -(-len(ranges[dim]) // mesh.size(axis))
        ranges[dim] = ranges[dim][length * coordinate[axis] :][:length]
    return ranges


def _slices(ranges: list[range]) -> tuple[slice, ...]:
    return tuple(slice(indices.start, indices.stop) for indices in ranges)


def draw(name: str, shape: tuple[int, ...], init: Init, seed: int, device: torch.device) -> Tensor:
    """Generate the full initial value of one parameter, float32, by a generator of its own.

    The seed is the run's and the name. So values depend neither on the layout nor on the order in
    which modules are built, and no seed checkpoint is needed to compare layouts. They do depend on
    the kind of device: torch's generators of CPUs and GPUs are different.

    Experts' values are generated one expert at a time, under the parameter's name and the expert's
    number (``...experts.w1.7``), because no rank needs all of them.
    """
    full = torch.empty(shape, dtype=torch.float32, device=device)
    if not init.std and init.uniform is None:
        return full.fill_(init.mean)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    generator = torch.Generator(device=device).manual_seed(
        int.from_bytes(digest[:8], "little") >> 1
    )
    if init.uniform is not None:
        full.uniform_(*init.uniform, generator=generator)
        return full.log_() if init.logarithm else full
    if math.isinf(init.cut):
        return nn.init.normal_(full, std=init.std, generator=generator)
    return nn.init.trunc_normal_(full, std=init.std, a=-init.cut, b=init.cut, generator=generator)
