"""Columns of memory: peaks of this process and of the allocator."""

from __future__ import annotations

from collections.abc import Sequence

from harness.metrics.memory import MEMORY, allocator, peak_memory_gib
from harness.train.observer import Observer, Row


class Memory(Observer):
    """Reads the memory after the steps that are logged."""

    metrics = MEMORY
    maxima = tuple(metric.name for metric in MEMORY)

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        if not self.run.is_logged(step):
            return {}
        device = self.run.engine.device.type
        return {"memory_gib": peak_memory_gib(device), **allocator(device)}
