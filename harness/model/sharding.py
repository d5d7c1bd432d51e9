"""The words in which a module says how it is split over tensor-parallel ranks.

Model code declares, beside itself, a ``sharding``: from the name of a submodule to one of these words, and
where it has parameters of its own a ``parameter_sharding``. What a word means in collectives is decided in
one place, ``harness/parallelism/tensor.py``.
"""

from __future__ import annotations

from enum import StrEnum

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial


class Split(StrEnum):
    """How one submodule, or parameter, is split."""

    VOCABULARY = "vocabulary"
    """An embedding table by rows; its output enters the residual stream."""
    COLUMN = "column"
    """A linear by output features; input whole, output split."""
    ROW = "row"
    """A linear by input features; its (partial) output is summed into the residual stream."""
    NORM = "norm"
    """A norm on the residual stream; split along the sequence when the stream is."""
    STREAM = "stream"
    """A linear on the residual stream, position by position: held whole, and split along the sequence when
    the stream is."""
    HEAD_NORM = "head_norm"
    """A norm of every head alone, whose input is split by heads."""
    WHOLE = "whole"
    """A module inside a region that every rank computes alike, from inputs that are whole."""
    REGION = "region"
    """A module whose inputs are taken whole out of the residual stream (attention, feed-forward)."""
    MIXTURE = "mixture"
    """A mixture of experts, whose own parts say the rest."""
    ROUTER = "router"
    """What scores tokens for the experts."""
    EXPERTS = "experts"
    """The experts of a mixture, stacked."""
    HEAD = "head"
    """The output projection by vocabulary; logits stay split for the parallel loss, else are gathered."""
    HEADS = "heads"
    """A parameter with a number for every head, split by heads."""


def own_part(module: nn.Module, name: str) -> Tensor:
    """A parameter of a module that computes with plain tensors: what this rank has of it.

    Ranks that have the same part and each a share of its gradient say so in ``module.partial_gradients``, the
    placements of the gradient by the parameter's name.
    """
    parameter = getattr(module, name)
    if not isinstance(parameter, DTensor):
        return parameter  # type: ignore[no-any-return]
    placements = getattr(module, "partial_gradients", {}).get(name)
    return parameter.to_local(grad_placements=placements)


def as_plain(x: Tensor) -> Tensor:
    """An activation that all ranks have whole, as a plain tensor; each adds its share of the gradient."""
    if not isinstance(x, DTensor):
        return x
    return x.to_local(grad_placements=[Partial()] * len(x.placements))
