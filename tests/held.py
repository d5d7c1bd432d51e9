"""Weights in memory, with the interface of a checkpoint source."""

from harness.weights.source import TensorFacts


class Held:
    """A source in memory that records which tensors were read, in order."""

    def __init__(self, tensors):
        self.held = tensors
        self.tensors = {name: TensorFacts(tuple(t.shape), t.dtype) for name, t in tensors.items()}
        self.reads = []

    def read(self, name):
        self.reads.append(name)
        return self.held[name]
