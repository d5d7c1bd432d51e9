"""Traces of single steps for chrome://tracing and Perfetto, and snapshots of a GPU's memory.

    profile/step-<n>/rank<r>.json.gz                    the trace whose last step is n
    profile/step-<n>/memory/rank<r>.pickle              for pytorch.org/memory_viz
    profile/step-<n>/memory/rank<r>-out-of-memory.pickle

A profiler lives for one trace. Between traces nothing of it is there, and nothing of it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, profile

from harness.metrics.config import ProfilingConfig

FOLDER = "profile"
# Allocations and releases that a snapshot can tell of.
_EVENTS = 100_000


class Profiler:
    """Profiles steps of this rank at the job's interval.

    Args:
        config: what and when.
        run_dir: the run folder.
        rank: this rank.
        device: what it computes on.
        say: shows a line to the user.
    """

    def __init__(
        self,
        config: ProfilingConfig,
        run_dir: Path,
        rank: int,
        device: torch.device,
        say: Callable[[str], None],
    ) -> None:
        self.config, self._folder, self._rank, self._device = config, run_dir / FOLDER, rank, device
        self._say = say
        self._writes = config.enable and rank in config.ranks
        self._start_step = 0
        self._trace: profile | None = None
        if config.enable and device.type != "cuda":
            config.refuse_snapshots(f"ranks compute on {device.type}")

    def start(self, step: int) -> None:
        """Says which step is done already; intervals begin there."""
        self._start_step = step
        if self._snapshots:
            torch.cuda.memory._record_memory_history(max_entries=_EVENTS)

    def is_profiled(self, step: int) -> bool:
        """Whether a profiler runs beside this step, on any rank: it says nothing of how fast others are."""
        return self._place(step) >= 0

    def ends_trace(self, step: int) -> bool:
        """Whether this step is the last of a trace, on any rank."""
        return self._place(step) == self.config.warmup + self.config.active - 1

    def begin_step(self, step: int) -> None:
        """To be called before a step."""
        if self._writes and self._place(step) == 0:
            self._trace = self._profile(step)
            self._trace.start()

    def end_step(self, step: int) -> None:
        """To be called after a step; writes the trace that it ends."""
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
            self._say(f"WARNING the trace of step {step} could not be written: {error}")
            return
        self._say(f"traced step {step}: {folder}")

    def out_of_memory(self, step: int) -> None:
        """Writes what the memory was full of, if it was to be recorded."""
        if not self._snapshots:
            return
        name = f"rank{self._rank}-out-of-memory.pickle"
        try:
            self._write_snapshot(self._folder / f"step-{step}" / "memory" / name)
        except OSError as error:
            self._say(f"WARNING the snapshot of the memory could not be written: {error}")

    def close(self) -> None:
        """Ends; a trace that is not whole is dropped."""
        if self._trace is not None:
            self._trace.stop()
            self._trace = None
        if self._snapshots:
            torch.cuda.memory._record_memory_history(enabled=None)

    @property
    def _snapshots(self) -> bool:
        return self._writes and self.config.memory_snapshot

    def _place(self, step: int) -> int:
        """The place of a step among those that the profiler runs beside, from 0; negative outside of them."""
        config = self.config
        if not config.enable:
            return -1
        into = (step - self._start_step - 1) % config.interval
        return into - (config.interval - config.warmup - config.active)

    def _profile(self, first: int) -> profile:
        """A profiler whose first step is ``first``."""
        warmup, active = self.config.warmup, self.config.active

        def action(step: int) -> ProfilerAction:
            place = max(0, step - first)  # it asks once before it is told where it is
            if place < warmup:
                return ProfilerAction.WARMUP
            return ProfilerAction.RECORD_AND_SAVE if place == warmup + active - 1 else ProfilerAction.RECORD

        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        made = profile(
            activities=activities,
            schedule=action,
            record_shapes=self.config.record_shapes,
            with_stack=self.config.with_stack,
        )
        made.step_num = first  # or else the trace would count steps from 0
        return made

    def _write_snapshot(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.cuda.memory._dump_snapshot(str(path))
