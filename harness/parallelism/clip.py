"""The global gradient norm, exact on every layout, and clipping by it."""

import functools
from collections.abc import Iterable
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from harness.parallelism.mesh import Mesh

_PIECE = 4096


def reduce_partial_gradients(parameters: Iterable[Tensor]) -> None:
    """Redistribute every gradient to its parameter's placements.

    A replicated parameter applied to a split sequence (a norm under sequence parallel) has a
    partial gradient on every rank. Where FSDP does not sum these, this function does.
    """
    for parameter in parameters:
        gradient = parameter.grad
        if not isinstance(gradient, DTensor) or not isinstance(parameter, DTensor):
            continue
        if gradient.placements != parameter.placements:
            parameter.grad = gradient.redistribute(placements=parameter.placements)


def local_squares(parameters: Iterable[Tensor], mesh: Mesh, device: torch.device) -> Tensor:
    """This rank's contribution to every gradient's squared 2-norm, in the order of the parameters.

    One sum over the world is correct for any mix of sharded, replicated and pipelined parameters.

    Returns:
        float64 vector on ``device``, 0 where there is no gradient.
    """
    parameters = list(parameters)
    gradients = []
    for parameter in parameters:
        gradient = torch.empty(0) if parameter.grad is None else parameter.grad
        gradients.append(gradient.to_local() if isinstance(gradient, DTensor) else gradient)
    return share_of_squares(gradients, holders_of(parameters, mesh), device)


def holders_of(parameters: Iterable[Tensor], mesh: Mesh) -> tuple[int, ...]:
    """Number of ranks that hold the same shard as this one, of each parameter."""
    ranks = prod(degree for axis, degree in mesh.degrees.items() if axis != "pp")
    holders = []
    for parameter in parameters:
        shards = 1
        if isinstance(parameter, DTensor):
            shards = prod(
                parameter.device_mesh.size(i)
                for i, placement in enumerate(parameter.placements)
                if not isinstance(placement, Replicate)
            )
        holders.append(ranks // shards)
    return tuple(holders)


def share_of_squares(
    shards: list[Tensor], holders: tuple[int, ...], device: torch.device
) -> Tensor:
    """This rank's contribution to squared 2-norms: the squares of its shards, shared by their holders.

    Returns:
        float64 vector on ``device``.
    """
    squares = squares_of(shards)
    return copy_async(squares / _device_constant(holders, squares.device), device)


def copy_async(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a tensor to a device without blocking the host; from the host (offload), through pinned memory."""
    if tensor.device.type == device.type:
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def squares_of(tensors: list[Tensor]) -> Tensor:
    """Sum of squares of the elements of each tensor, float64.

    On a CPU a float32 norm of 4 million normal elements is 1e-4 too small. Smaller shards have a
    smaller error, so layouts would seem to differ. Converting to float64 takes eight times as long.
    Norms of short pieces, summed in float64, are as fast as a float32 norm and accurate to 1e-8.
    Norms are float32 also for bfloat16 gradients, where they would have eight bits and depend on
    the sharding (pytorch#194033).
    """
    nonempty = [tensor for tensor in tensors if tensor.numel()]
    if nonempty and nonempty[0].device.type != "cpu":
        zero = torch.zeros((), device=nonempty[0].device)
        norms = iter(torch._foreach_norm(nonempty, 2, dtype=torch.float32))
        return torch.stack([next(norms) if t.numel() else zero for t in tensors]).double().square()
    pieces = [torch.zeros(0)]
    owners = []
    for index, tensor in enumerate(tensors):
        flat = tensor.reshape(-1)
        whole = flat.numel() - flat.numel() % _PIECE
        pieces.append(
            torch.linalg.vector_norm(flat[:whole].view(-1, _PIECE), dim=1, dtype=torch.float32)
        )
        pieces.append(torch.linalg.vector_norm(flat[whole:], dtype=torch.float32).unsqueeze(0))
        owners += [index] * (whole // _PIECE + 1)
    squares = torch.zeros(len(tensors), dtype=torch.float64)
    return squares.index_add_(0, torch.tensor(owners), torch.cat(pieces).double().square())


@functools.cache
def _device_constant(values: tuple[int, ...], device: torch.device) -> Tensor:
    """Vector of values, cached: each copy to the device makes the host wait."""
    return torch.tensor(values, dtype=torch.float64, device=device)


def clip_gradients(parameters: Iterable[Tensor], norm: Tensor | float, max_norm: float) -> None:
    """Scale gradients so that their global norm is at most ``max_norm``; 0 disables clipping.

    The norm may be a tensor on the device: the host does not wait for it.
    """
    local = [
        p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        for p in parameters
        if p.grad is not None
    ]
    if not max_norm or not local:
        return
    if not isinstance(norm, Tensor):
        # full() fills on the device; copying a host value there would make the host wait.
        norm = torch.full((), norm, dtype=torch.float64, device=local[0].device)
    factor = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    # In float32 also for bfloat16 gradients, where the factor would have eight bits.
    torch._foreach_mul_(local, factor.to(local[0].device, torch.float32))
