"""Traces of single steps for chrome://tracing and Perfetto, and snapshots of GPU memory.

    profile/step-<n>/rank<r>.json.gz                    the trace whose last step is n
    profile/step-<n>/memory/rank<r>.pickle              for pytorch.org/memory_viz
    profile/step-<n>/memory/rank<r>-out-of-memory.pickle

A profiler exists only for one trace. Between traces there is no overhead.
"""

from collections.abc import Sequence

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from harness.metrics.window import PROFILING
from harness.train.observer import Need, Observer, Row, Run

FOLDER = "profile"
# Allocations and frees recorded for a snapshot.
_EVENTS = 100_000


class Profiling(Observer):
    """Profiles steps of this rank at the job's interval."""

    section = PROFILING

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.config = run.job.profiling
        self._folder = run.folder / FOLDER
        self._device = run.engine.device
        self._rank = run.ranks.rank
        self._writes = self._rank in self.config.ranks
        self._start_step = 0
        self._step = 0
        self._trace: profile | None = None
        if self._device.type != "cuda":
            self.config.refuse_snapshots(f"ranks compute on {self._device.type}")
        self._snapshots = self._writes and self.config.memory_snapshot

    def start(self) -> None:
        if self._trace is not None:  # the run has gone back
            self._trace.stop()
            self._trace = None
        # Intervals begin after the last step already done.
        self._start_step = self.run.progress.step
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def needs(self, step: int) -> Need:
        if self._index(step) < 0:
            return Need.NOTHING
        return Need.SLOWS | Need.ASIDE if self._ends_trace(step) else Need.SLOWS

    def begin_step(self, step: int) -> Sequence[float]:
        self._step = step
        if self._writes and self._index(step) == 0:
            activities = [ProfilerActivity.CPU]
            if self._device.type == "cuda":
                activities.append(ProfilerActivity.CUDA)
            config = self.config
            self._trace = profile(
                activities=activities,
                schedule=schedule(
                    skip_first=step, wait=0, warmup=config.warmup, active=config.active
                ),
                record_shapes=True,
            )
            # Otherwise the trace would count steps from 0.
            self._trace.step_num = step
            self._trace.current_action = self._trace.schedule(step)  # type: ignore[assignment]
            self._trace.start()
        return ()

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        if not self._ends_trace(step):
            if self._trace is not None:
                self._trace.step()
            return {}
        if self._trace is not None:
            self._trace.stop()
            self._write(self._trace, step)
            self._trace = None
        # Wait here for the ranks that write; otherwise the wait would count as time of the next
        # step.
        self.run.engine.world_max([0.0])
        return {}

    def close(self, error: BaseException | None) -> None:
        if self._snapshots and isinstance(error, torch.OutOfMemoryError):
            step = max(self._step, self.run.progress.step + 1)
            try:
                self._write_snapshot(step, f"rank{self._rank}-out-of-memory.pickle")
            except OSError as failure:
                self.run.message(f"WARNING the memory snapshot could not be written: {failure}")
        if self._trace is not None:  # an incomplete trace is dropped
            self._trace.stop()
            self._trace = None
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _index(self, step: int) -> int:
        """Index of a step among the profiled steps of its interval, on any rank; negative: not profiled."""
        config = self.config
        into = (step - self._start_step - 1) % config.interval
        return into - (config.interval - config.warmup - config.active)

    def _ends_trace(self, step: int) -> bool:
        return self._index(step) == self.config.warmup + self.config.active - 1

    def _write(self, trace: profile, step: int) -> None:
        folder = self._folder / f"step-{step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(folder / f"rank{self._rank}.json.gz"))
            if self._snapshots:
                self._write_snapshot(step, f"rank{self._rank}.pickle")
        except OSError as error:
            self.run.message(f"WARNING the trace of step {step} could not be written: {error}")
            return
        self.run.message(f"traced step {step}: {folder}")

    def _write_snapshot(self, step: int, name: str) -> None:
        path = self._folder / f"step-{step}" / "memory" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
