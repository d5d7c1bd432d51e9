"""Functions that a GPU repeats without the host: CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EAGER_CALLS = 2
"""Calls before a function is captured: they compile, and make communicators and the optimizer's state."""


class Graphed:
    """A function of tensors on a GPU: captured in a CUDA graph after ``EAGER_CALLS`` calls, then replayed.

    A replay reads and writes the memory of the captured call, so what the function reads beside its arguments
    must stay where it is and be changed in place.

    Args:
        function: it gets each tensor and number in memory of its own, always the same; numbers in float32.
        pool: memory pool, of functions that are called one after another.
        stream: stream of all calls: gradients stay on the one where they were first accumulated.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.function, self.pool, self.stream, self.calls = function, pool, stream, 0
        self.inputs: list[Tensor | None] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *values: Tensor | float | None) -> tuple[Tensor, ...]:
        """Return copies of the function's results."""
        self.inputs = self.inputs or [
            None if value is None else torch.empty_like(torch.as_tensor(value), device=self.stream.device)
            for value in values
        ]
        for static, value in zip(self.inputs, values, strict=True):
            if isinstance(value, Tensor):
                static.copy_(value)  # type: ignore[union-attr]
            elif value is not None:
                static.fill_(value)  # type: ignore[union-attr]
        self.calls += 1
        if self.calls <= EAGER_CALLS:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                outputs = self.function(*self.inputs)
            torch.cuda.current_stream().wait_stream(self.stream)
            return outputs
        if self.graph is None:
            self.graph = torch.cuda.CUDAGraph()
            # Other threads may go on: one of them allocates batches.
            with torch.cuda.graph(self.graph, self.pool, self.stream, capture_error_mode="thread_local"):
                self.outputs = self.function(*self.inputs)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def close(self) -> None:
        """Delete the graph, which has to be done before its communicators are closed."""
        if self.graph is not None:
            self.graph.reset()
