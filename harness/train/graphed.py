"""Steps that a GPU repeats without the host: passes and update are captured in CUDA graphs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from harness.config.job import Job
from harness.data.batch import AnyBatch, Batch
from harness.model.part import ModelPart
from harness.parallelism.mesh import Mesh
from harness.train.engine import Engine

EAGER_CALLS = 2
"""Calls before a function is captured: they compile, and make communicators and the optimizer's
state."""


class Graphed:
    """A function of tensors on a GPU: captured in a CUDA graph after ``EAGER_CALLS`` calls, then replayed.

    A replay reads and writes the memory of the captured call, so what the function reads beside its
    arguments must stay where it is and be changed in place.

    Args:
        function: it gets each tensor and number in memory of its own, always the same; numbers in
            float32.
        pool: memory pool, of functions that are called one after another.
        stream: stream of all calls: gradients stay on the one where they were first accumulated.
    """

    def __init__(
        self, function: Callable[..., tuple[Tensor, ...]], pool: Any, stream: torch.cuda.Stream
    ) -> None:
        self.function = function
        self.pool = pool
        self.stream = stream
        self.calls = 0
        self.inputs: list[Tensor | None] = []
        self.graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, *values: Tensor | float | None) -> tuple[Tensor, ...]:
        """Return copies of the function's results."""
        self.inputs = self.inputs or [
            None
            if value is None
            else torch.empty_like(torch.as_tensor(value), device=self.stream.device)
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
            with torch.cuda.graph(
                self.graph, self.pool, self.stream, capture_error_mode="thread_local"
            ):
                self.outputs = self.function(*self.inputs)
        self.graph.replay()
        return tuple(output.clone() for output in self.outputs)

    def close(self) -> None:
        """Delete the graph, which has to be done before its communicators are closed."""
        if self.graph is not None:
            self.graph.reset()


class GraphedEngine(Engine):
    """An engine that captures its passes and its update after ``EAGER_CALLS`` steps, and then replays them.

    ``compile.cuda_graphs`` has it built. The plain engine says what a step computes. Here is only
    what a replay needs: numbers that change come as tensors, and gradients stay where they are.
    """

    def __init__(
        self, job: Job, device: torch.device, built: tuple[Mesh, list[ModelPart]] | None = None
    ) -> None:
        super().__init__(job, device, built)
        torch.cuda.empty_cache()  # what was freed while building, other streams cannot use
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        self.graphed_passes = Graphed(self._captured_passes, pool, stream)
        self.graphed_update = Graphed(self._captured_update, pool, stream)

    def close(self) -> None:
        """Delete the graphs."""
        self.graphed_passes.close()
        self.graphed_update.close()

    def _build_optimizer(self) -> torch.optim.Optimizer:
        optimizer = super()._build_optimizer()
        for group in optimizer.param_groups:
            if "capturable" in group:
                group["capturable"] = True
        return optimizer

    def _passes(
        self, denominator: float | Tensor, rows: float | Tensor, batch: AnyBatch
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        assert isinstance(batch, Batch)
        sums, loss, squares, needed = self.graphed_passes(denominator, rows, *batch)
        return sums, loss, squares, needed

    def _captured_passes(
        self, denominator: Tensor, rows: Tensor, *batch: Any
    ) -> tuple[Tensor, ...]:
        # Scales of float8 weights are computed inside of the graph, also after a validation.
        self.weights_changed = True
        return super()._passes(denominator, rows, Batch(*batch))

    def _update(self, norm: Tensor | float) -> None:
        self.graphed_update(norm, *(group["lr"] for group in self.optimizer.param_groups))

    def _captured_update(self, norm: Tensor, *rates: Tensor) -> tuple[Tensor, ...]:
        numbers = [group["lr"] for group in self.optimizer.param_groups]
        self._set_rates(rates)
        super()._update(norm)
        self._set_rates(numbers)  # the schedule computes with numbers
        return ()

    def _free_gradients(self) -> None:
        if self.graphed_passes.graph is None:  # it writes to the same gradients again
            super()._free_gradients()


def build_engine(job: Job, device: torch.device) -> Engine:
    """Build the engine that a job asks for."""
    if job.compile.cuda_graphs:
        return GraphedEngine(job, device)
    return Engine(job, device)
