"""Traces of steps, and snapshots of memory, at the job's interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from harness.config.metrics import ProfilingConfig
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


FOLDER = "profile"
# Allocations and frees recorded for a snapshot.
_EVENTS = 100_000


class Profiler:
    """Profile steps of this rank at the job's interval.

    Args:
        config: what to record, and when.
        run_dir: the run folder.
        rank: this rank.
        device: its device.
        message: shows a line to the user.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        run_dir: Path,
        rank: int,
        device: torch.device,
        message: Callable[[str], None],
    ) -> None:
        self.config, self._folder, self._rank, self._device = config, run_dir / FOLDER, rank, device
        self._message = message
        self._writes = config.enable and rank in config.ranks
        self._start_step = 0
        self._trace: profile | None = None
        if config.enable and device.type != "cuda":
            config.refuse_snapshots(f"ranks compute on {device.type}")

    def start(self, step: int) -> None:
        """Set the last step already done; intervals begin there."""
        self._start_step = step
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def is_profiled(self, step: int) -> bool:
        """Whether a profiler runs during this step, on any rank; such a step is slower than others."""
        return self._index(step) >= 0

    def ends_trace(self, step: int) -> bool:
        """Whether this step is the last of a trace, on any rank."""
        return self._index(step) == self.config.warmup + self.config.active - 1

    def begin_step(self, step: int) -> None:
        """Call this before a step."""
        if self._writes and self._index(step) == 0:
            self._trace = self._profile(step)
            self._trace.start()

    def end_step(self, step: int) -> None:
        """Call this after a step; writes the trace that ends with it."""
        if self._trace is None:
            return
        if not self.ends_trace(step):
            self._trace.step()
            return
        trace, self._trace = self._trace, None
        trace.stop()
        folder = self._folder / f"step-{step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(folder / f"rank{self._rank}.json.gz"))
            if self._snapshots:
                self._write_snapshot(folder / "memory" / f"rank{self._rank}.pickle")
        except OSError as error:
            self._message(f"WARNING the trace of step {step} could not be written: {error}")
            return
        self._message(f"traced step {step}: {folder}")

    def out_of_memory(self, step: int) -> None:
        """Write a snapshot of memory, if snapshots are enabled."""
        if not self._snapshots:
            return
        name = f"rank{self._rank}-out-of-memory.pickle"
        try:
            self._write_snapshot(self._folder / f"step-{step}" / "memory" / name)
        except OSError as error:
            self._message(f"WARNING the memory snapshot could not be written: {error}")

    def close(self) -> None:
        """Stop profiling; an incomplete trace is dropped."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)

    @property
    def _snapshots(self) -> bool:
        return self._writes and self.config.memory_snapshot

    def _index(self, step: int) -> int:
        """Index of a step among the profiled steps of its interval, from 0; negative if not profiled."""
        config = self.config
        if not config.enable:
            return -1
        into = (step - self._start_step - 1) % config.interval
        return into - (config.interval - config.warmup - config.active)

    def _profile(self, first: int) -> profile:
        """Make a profiler whose first step is ``first``."""
        warmup, active = self.config.warmup, self.config.active

        def action(step: int) -> ProfilerAction:
            index = max(0, step - first)  # the constructor calls this once before step_num is set below
            if index < warmup:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD_AND_SAVE if index == warmup + active - 1 else ProfilerAction.RECORD

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        profiler = profile(
            activities=activities,
            schedule=action,
            record_shapes=self.config.record_shapes,
            with_stack=self.config.with_stack,
        )
        profiler.step_num = first  # otherwise the trace would count steps from 0
        return profiler

    def _write_snapshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
