"""The true global gradient norm, whatever the layout, and clipping by it."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from harness.parallelism.mesh import Mesh

_PIECE = 4096


def settle_gradients(parameters: Iterable[Tensor]) -> None:
    """Brings every gradient to its parameter's placement.

    A replicated parameter that worked on a split sequence (a norm under sequence parallel) has a
    partial gradient on every rank; where FSDP does not sum it, this does.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def local_square_sum(parameters: Iterable[Tensor], mesh: Mesh, device: torch.device) -> Tensor:
    """This rank's share of the squared 2-norm of all gradients; the sum over the world is the whole.

    Each rank adds the squares it holds, divided by the number of ranks that hold the same ones, so one
    sum over the world is right for any mix of sharded, replicated and pipelined parameters.

    Returns:
        float64 scalar on ``device``.
    """
    holders = prod(degree for axis, degree in mesh.degrees.items() if axis != "pp")
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        gradient, shards = parameter.grad, 1
        if isinstance(gradient, DTensor):
            split = [
                i for i, placement in enumerate(gradient.placements) if not isinstance(placement, Replicate)
            ]
            shards = prod(gradient.device_mesh.size(i) for i in split)
            gradient = gradient.to_local()
        if gradient is not None and gradient.numel():
            by_copies.setdefault(holders // shards, []).append(gradient)
    total = torch.zeros((), dtype=torch.float64, device=device)
    for copies, gradients in by_copies.items():
        total += square_sum(gradients).to(device) / copies
    return total


def square_sum(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of all elements, float64.

    On a CPU a float32 norm of 4 million normal elements is 1e-4 too small, and that of smaller shards less
    so, which makes layouts seem to differ; converting to float64 takes eight times as long. Norms of short
    pieces, added up in float64, are as quick as the one and accurate to 1e-8.
    """
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, 2)).double().square().sum()
    norms = []
    for tensor in tensors:
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _PIECE
        norms.append(torch.linalg.vector_norm(flat[:whole].view(-1, _PIECE), dim=1))
        norms.append(torch.linalg.vector_norm(flat[whole:]).unsqueeze(0))
    return torch.cat(norms).double().square().sum()


def clip_gradients(parameters: Iterable[Tensor], norm: float, max_norm: float) -> None:
    """Scales gradients so that their global norm is at most ``max_norm``; 0 leaves them alone."""
    if not max_norm or norm <= max_norm:
        return
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad for p in parameters if p.grad is not None
    ]
    torch._foreach_mul_(local, max_norm / (norm + 1e-6))
