"""Local tensors of modules that compute without DTensors."""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


def local_shard(module: nn.Module, name: str) -> Tensor:
    """The local shard of a parameter (``to_local``), or the parameter itself when it is no DTensor.

    ``module.partial_gradients`` maps a parameter's name to the placements of its gradient, where ranks with
    the same shard each compute a summand of it.
    """
    parameter = getattr(module, name)
    if not isinstance(parameter, DTensor):
        return parameter  # type: ignore[no-any-return]
    placements = getattr(module, "partial_gradients", {}).get(name)
    return parameter.to_local(grad_placements=placements)


def to_local(x: Tensor) -> Tensor:
    """A replicated activation as a plain tensor; the ranks' gradients are summed."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial()] * len(x.placements))
