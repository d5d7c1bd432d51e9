"""The true global gradient norm, whatever the layout, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from harness.parallelism.mesh import Mesh


def settle_gradients(parameters: Iterable[Tensor]) -> None:
    """Brings every gradient to its parameter's placement.

    A replicated parameter that worked on a split sequence (a norm under sequence parallel) has a
    partial gradient on every rank; where FSDP does not sum it, this does.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and isinstance(parameter, DTensor):
            if gradient.placements != parameter.placements:
                parameter.grad = gradient.redistribute(placements=parameter.placements)


def local_square_sum(parameters: Iterable[Tensor], mesh: Mesh, device: torch.device) -> Tensor:
    """This rank's share of the squared 2-norm of all gradients; the sum over the world is the whole.

    Each rank adds the squares it holds, divided by the number of ranks that hold the same ones, so one
    sum over the world is right for any mix of sharded, replicated and pipelined parameters. Squares are
    summed in float64: on a CPU a float32 norm of 4 million elements is 1e-4 too small, and smaller
    shards less so, which would make layouts seem to differ.

    Returns:
        float64 scalar on ``device``.
    """
    holders = prod(degree for axis, degree in mesh.degrees.items() if axis != "pp")
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        gradient, shards = parameter.grad, 1
        if isinstance(gradient, DTensor):
            split = [i for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)]
            shards = prod(gradient.device_mesh.size(i) for i in split)
            gradient = gradient.to_local()
        if gradient is not None and gradient.numel():
            by_copies.setdefault(holders // shards, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in by_copies.items():
        norms = torch._foreach_norm(gradients, 2, dtype=torch.float64)
        total += torch.stack(list(norms)).square().sum().to(device) / copies
    return total


def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scales gradients so that their global norm is at most ``max_norm``; 0 leaves them alone."""
    if not max_norm or norm <= max_norm:
        return
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    torch._foreach_mul_(local, max_norm / (norm + 1e-6))
