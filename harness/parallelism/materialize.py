"""Allocation and initialization: every rank generates each full parameter by name and keeps its shard."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from harness.model.decoder import Decoder
from harness.model.init import draw
from harness.model.spec import tensors


def materialize(part: Decoder, seed: int, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate and initialize a parallelized model part.

    Args:
        part: a Decoder on meta; its parameters may be DTensors.
        seed: the run's seed.
        device: where the part computes. Values are generated there even if parameters are stored elsewhere,
            so that offloading does not change a run.
        parameter_device: where parameters are stored.
    """
    allocate(part, device, parameter_device)
    specs = tensors(part.config)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            shape, ranges = tuple(parameter.shape), local_ranges(parameter)
            init = specs[name].init
            if not specs[name].is_expert:
                full = draw(name, shape, init, seed, device)
                local.copy_(full[_slices(ranges)])
                continue
            for row, expert in enumerate(ranges[0]):
                full = draw(f"{name}.{expert}", shape[1:], init, seed, device)
                local[row].copy_(full[_slices(ranges[1:])])


def allocate(part: Decoder, device: torch.device, parameter_device: torch.device) -> None:
    """Allocate a part, and compute its buffers."""
    part.to_empty(device=parameter_device)
    part.tie_embeddings()
    part.materialize_buffers(device)


def local_ranges(parameter: Tensor) -> list[range]:
    """The indices of this rank's shard in every dimension of the full tensor.

    FSDP over tensor parallel is a "strided" shard: its mesh axis is the outer one, but it splits after
    tensor parallel.
    """
    ranges = [range(size) for size in parameter.shape]
    if not isinstance(parameter, DTensor):
        return ranges
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the parameter's mesh"
    placements = list(enumerate(parameter.placements))
    placements.sort(key=lambda p: type(p[1]).__name__ == "_StridedShard")
    for axis, placement in placements:
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        # As torch.chunk: pieces of equal length, then a shorter one, then empty ones.
        length = -(-len(ranges[dim]) // mesh.size(axis))
        ranges[dim] = ranges[dim][length * coordinate[axis] :][:length]
    return ranges


def _slices(ranges: list[range]) -> tuple[slice, ...]:
    return tuple(slice(indices.start, indices.stop) for indices in ranges)
