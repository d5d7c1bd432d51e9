"""From meta to memory: every rank draws each parameter whole, by name, and keeps its own shard."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from harness.model.decoder import Decoder
from harness.model.init import draw


def materialize(part: Decoder, seed: int, device: torch.device, parameter_device: torch.device) -> None:
    """Gives a parallelized model part its memory and its initial values.

    Args:
        part: a Decoder on meta; its parameters may be DTensors.
        seed: the run's seed.
        device: where the part computes. Values are drawn there even when parameters live elsewhere, so
            that offloading does not change a run.
        parameter_device: where parameters live.
    """
    part.to_empty(device=parameter_device)
    part.tie_embeddings()
    part.materialize_buffers(device)
    with torch.no_grad():
        for name, parameter in part.named_parameters():
            full = draw(name, tuple(parameter.shape), part.config, seed, device)
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(local_shard(full, parameter))


def local_shard(full: Tensor, parameter: Tensor) -> Tensor:
    """The piece of a full tensor that this rank's shard of ``parameter`` stands for.

    FSDP over tensor parallel is a "strided" shard: its mesh axis is the outer one, but it splits what
    tensor parallelism has split before.
    """
    if not isinstance(parameter, DTensor):
        return full
    mesh, coordinate = parameter.device_mesh, parameter.device_mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the parameter's mesh"
    placements = list(enumerate(parameter.placements))
    placements.sort(key=lambda p: type(p[1]).__name__ == "_StridedShard")
    for axis, placement in placements:
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        chunks = torch.chunk(full, mesh.size(axis), dim=dim)
        # torch.chunk gives fewer pieces than ranks when the rows do not suffice: the rest are empty.
        index = coordinate[axis]
        full = chunks[index] if index < len(chunks) else full.narrow(dim, 0, 0)
    return full
