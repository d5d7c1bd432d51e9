"""Traces of steps, and snapshots of memory, at the job's interval."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from harness.metrics.profiler import Profiler
from harness.metrics.window import PROFILING
from harness.train.observer import Need, Observer, Row, Run


class Profiling(Observer):
    """Drives the ``Profiler`` of this rank."""

    section = PROFILING

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        rank = dist.get_rank() if dist.is_initialized() else 0
        self._profiler = Profiler(run.job.profiling, run.folder, rank, run.engine.device, run.message)
        self._step = 0

    def start(self) -> None:
        self._profiler.start(self.run.progress.step)

    def needs(self, step: int) -> Need:
        needs = Need.SLOWS if self._profiler.is_profiled(step) else Need.NOTHING
        return needs | Need.ASIDE if self._profiler.ends_trace(step) else needs

    def begin_step(self, step: int) -> Sequence[float]:
        self._step = step
        self._profiler.begin_step(step)
        return ()

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        self._profiler.end_step(step)
        if self._profiler.ends_trace(step):
            # Wait here for the ranks that write; otherwise the wait would count as time of the next step.
            self.run.engine.world_max([0.0])
        return {}

    def close(self, error: BaseException | None) -> None:
        if isinstance(error, torch.OutOfMemoryError):
            self._profiler.out_of_memory(max(self._step, self.run.progress.step + 1))
        self._profiler.close()
