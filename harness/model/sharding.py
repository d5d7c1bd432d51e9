"""The words in which a module says how it is split over tensor-parallel ranks.

Model code declares, beside itself, a ``sharding``: from the name of a submodule to one of these words.
What a word means in collectives is decided in one place, ``harness/parallelism/tensor.py``.
"""

from __future__ import annotations

from enum import StrEnum


class Split(StrEnum):
    """How one submodule is split."""

    VOCABULARY = "vocabulary"
    """An embedding table by rows; its output enters the residual stream."""
    COLUMN = "column"
    """A linear by output features; input whole, output split."""
    ROW = "row"
    """A linear by input features; its (partial) output is summed into the residual stream."""
    NORM = "norm"
    """A norm on the residual stream; split along the sequence when the stream is."""
    REGION = "region"
    """A module whose inputs are taken whole out of the residual stream (attention, feed-forward)."""
    HEAD = "head"
    """The output projection by vocabulary; logits stay split for the parallel loss, else are gathered."""
