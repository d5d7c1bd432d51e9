"""A source of weights in memory, to be read and written as the formats of checkpoints are."""

from __future__ import annotations

from torch import Tensor

from harness.checkpoint.formats import TensorFacts


class Held:
    """A source in memory."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.held = tensors
        self.tensors = {name: TensorFacts(tuple(t.shape), t.dtype) for name, t in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self.held[name]
