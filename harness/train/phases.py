"""Record the phases of this rank's steps: rows of ``phases/rank<r>.jsonl``, and slow ranks."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median

import torch.distributed as dist

from harness.metrics.jsonl import MetricsFile
from harness.metrics.phases import Phases, StepPhases
from harness.metrics.result import write_json_atomically
from harness.metrics.slow import FILE, KINDS, WINDOW, SlowRanks, own_seconds
from harness.metrics.window import EXCLUDED
from harness.parallelism.marks import Marks
from harness.train.engine import Engine
from harness.train.rank_metrics import where_is

FOLDER = "phases"
WITH_SPANS = 5
"""Rows that also have the spans of their last step: the first ones of an attempt."""


class PhaseLog:
    """The phases of this rank, from the first step to ``close``; all ranks make one together.

    Args:
        run_dir: the run folder.
        engine: model and layout of this rank.
        warmup: steps that no row counts, as in throughput.
    """

    def __init__(self, run_dir: Path, engine: Engine, warmup: int) -> None:
        self._engine, self._warmup, self._run_dir = engine, warmup, run_dir
        self.world = engine.job.world_size
        self._where = where_is(engine)
        self.rank: int = self._where["rank"]
        everyone = [self._where] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, self._where)
        names = [(each["host"], each["device"]) for each in everyone]
        self.slow = SlowRanks([each["stage"] for each in everyone], names)
        self._phases = Phases(engine.device, self._where["stage"])
        self._marks = Marks(self._phases, engine.parts, engine.mesh, engine.device)
        self._file = MetricsFile(run_dir / FOLDER / f"rank{self.rank}.jsonl")
        self.last: dict[str, float] = {}
        """Mean seconds of each phase, of the newest row."""
        self._first = 0
        self._row: list[StepPhases] = []
        self._window: list[list[float]] = []
        self._rows = 0

    def start(self, step: int) -> None:
        """Begin the first step after ``step``."""
        self._first = step + 1 + max(1, self._warmup)
        self._phases.restart()

    def end_step(self, step: int) -> None:
        """End a step; the next one begins."""
        self._phases.end_step(step)

    def take(self, *, logged: bool) -> None:
        """Read the ended steps; if the step is logged, write the row of those since the last one.

        Raises:
            OSError: the file cannot be written.
        """
        for each in self._phases.take():
            if each.step >= self._first:
                self._row.append(each)
                self._window.append(own_seconds(each.on_core))
        if logged and self._row:
            self._write()

    def beside(self, step: int) -> list[float]:
        """Return the values to sum over the world in this step, with its counts: this rank's in its slots."""
        if self.world == 1 or step <= self._first or (step - self._first) % WINDOW:
            return []
        own = [median(kind) for kind in zip(*self._window, strict=True)] if self._window else []
        self._window = []
        slots = [0.0] * (self.world * len(KINDS))
        slots[self.rank * len(KINDS) : self.rank * len(KINDS) + len(own)] = own
        return slots

    def observe(self, sums: Sequence[float], step: int) -> list[str]:
        """Return warnings about ranks that have become slow, from the sums of ``beside``."""
        if not sums:
            return []
        seconds = [sums[at : at + len(KINDS)] for at in range(0, len(sums), len(KINDS))]
        before = self.slow.found
        found = self.slow.observe(seconds, step)
        if self.slow.found != before and self.rank == 0:
            write_json_atomically(self._run_dir / FILE, {"slow": [asdict(each) for each in self.slow.found]})
        return [f"WARNING slow: {each}" for each in found]

    def close(self) -> None:
        """Remove the marks and close the file."""
        self._marks.remove()
        self._phases.close()
        self._file.close()

    def _write(self) -> None:
        steps, self._row = self._row, []
        self.last = phases = _mean(step.seconds for step in steps)
        last = steps[-1]
        self._rows += 1
        spans = [[s.start, s.end, s.phase, s.stage] for s in last.spans if s.phase not in EXCLUDED]
        shown = {"aligned_at": last.aligned_at, "spans": spans} if self._rows <= WITH_SPANS else {}
        self._file.write(
            {
                "step": last.step,
                "steps": len(steps),
                **self._where,
                "seconds": sum(phases[phase] for phase in phases if phase not in EXCLUDED),
                **({"queued": self._queued(steps, phases)} if self._phases.sees_queue else {}),
                "phases": phases,
                **({"stages": _mean_passes(steps)} if len(self._engine.parts) > 1 else {}),
                **shown,
            }
        )

    def _queued(self, steps: Sequence[StepPhases], phases: dict[str, float]) -> float:
        """Return the mean seconds of a step in which a core was missing to compute."""
        return sum(own_seconds(phases)) - sum(own_seconds(_mean(step.on_core for step in steps)))


def _mean(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each phase over steps; a step without it counts as zero."""
    total: dict[str, float] = defaultdict(float)
    count = 0
    for phases in steps:
        count += 1
        for phase, seconds in phases.items():
            total[phase] += seconds
    return {phase: seconds / count for phase, seconds in total.items()}


def _mean_passes(steps: Sequence[StepPhases]) -> dict[int, dict[str, float]]:
    """Return the mean of each phase of each pipeline stage."""
    passes = [step.passes for step in steps]
    stages = sorted({stage for each in passes for stage in each})
    return {stage: _mean(each.get(stage, {}) for each in passes) for stage in stages}
