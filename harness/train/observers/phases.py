"""Times of the phases of a step on one rank: rows of ``phases/rank<r>.jsonl``, and slow ranks."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import chain
from statistics import median
from typing import Any

import torch.distributed as dist

from harness.metrics.columns import Metric
from harness.metrics.jsonl import MetricsFile
from harness.metrics.slow_ranks import FILE, KINDS, WINDOW, SlowRanks, own_seconds
from harness.metrics.window import EXCLUDED
from harness.run.result import write_json_atomically
from harness.train.observer import Observer, Row, Run
from harness.train.observers.phase_marks import Marks
from harness.train.observers.phase_times import Phases, StepPhases, total_of
from harness.train.observers.values import where_is

FOLDER = "phases"
WITH_SPANS = 5
"""Rows that also have the spans of their last step: the first ones of an attempt."""


class PhaseLog(Observer):
    """The phases of this rank, from the first step on."""

    metrics = (
        Metric(
            "slow_ranks",
            "count",
            "Ranks that compute longer than others.",
            "`profiling.phases=true`",
        ),
    )
    metrics_of_rank = (
        Metric(
            "phase.*",
            "s",
            "Mean time of a phase in the steps done last.",
            "`profiling.phases=true`",
        ),
    )

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        engine = run.engine
        self.world = run.job.world_size
        self._where = where_is(engine)
        self.rank: int = self._where["rank"]
        everyone = [self._where] * self.world
        if self.world > 1:
            dist.all_gather_object(everyone, self._where)
        names = [(each["host"], each["device"]) for each in everyone]
        self.slow = SlowRanks([each["stage"] for each in everyone], names)
        self._phases = Phases(engine.device, self._where["stage"])
        self._marks = Marks(self._phases, engine.parts, engine.mesh, engine.device)
        self._file = MetricsFile(run.folder / FOLDER / f"rank{self.rank}.jsonl")
        self._last: dict[str, float] = {}
        """Mean seconds of each phase, of the newest row."""
        self._first = 0
        self._row: list[StepPhases] = []
        self._window: list[list[float]] = []
        self._rows = 0

    def start(self) -> None:
        # No row counts the steps of warm-up, as in throughput.
        self._first = self.run.progress.step + 1 + max(1, self.run.job.metrics.warmup_steps)
        self._phases.restart()

    def begin_step(self, step: int) -> Sequence[float]:
        """Return every WINDOW steps the values to sum over the world: this rank's in its slots."""
        if self.world == 1 or step <= self._first or (step - self._first) % WINDOW:
            return ()
        own = [median(kind) for kind in zip(*self._window, strict=True)] if self._window else []
        self._window = []
        slots = [0.0] * (self.world * len(KINDS))
        slots[self.rank * len(KINDS) : self.rank * len(KINDS) + len(own)] = own
        return slots

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        self._phases.end_step(step)
        self._take()
        if sums:
            self._observe(sums, step)
        return {"slow_ranks": len(self.slow.slow)}

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        self._take()
        if self._row:
            self._write()
        own |= {f"phase.{name}": seconds for name, seconds in self._last.items()}

    def close(self, error: BaseException | None) -> None:
        self._marks.remove()
        self._phases.close()
        self._file.close()

    def _take(self) -> None:
        for each in self._phases.take():
            if each.step >= self._first:
                self._row.append(each)
                self._window.append(own_seconds(each.on_core))

    def _observe(self, sums: Sequence[float], step: int) -> None:
        seconds = [sums[at : at + len(KINDS)] for at in range(0, len(sums), len(KINDS))]
        before = self.slow.found
        found = self.slow.observe(seconds, step)
        if self.slow.found != before and self.rank == 0:
            found_so_far = {"slow": [asdict(each) for each in self.slow.found]}
            write_json_atomically(self.run.folder / FILE, found_so_far)
        for each in found:
            self.run.message(f"WARNING slow: {each}")

    def _write(self) -> None:
        steps = self._row
        self._row = []
        self._last = phases = _mean(step.seconds for step in steps)
        last = steps[-1]
        # Mean seconds of a step in which a core was missing to compute.
        queued = sum(own_seconds(phases)) - sum(own_seconds(_mean(step.on_core for step in steps)))
        row = {
            "step": last.step,
            "steps": len(steps),
            **self._where,
            "seconds": sum(phases[phase] for phase in phases if phase not in EXCLUDED),
            **({"queued": queued} if self._phases.sees_queue else {}),
            "phases": phases,
        }
        if len(self.run.engine.parts) > 1:
            passes = [step.passes for step in steps]
            row["stages"] = {
                stage: _mean(each.get(stage, {}) for each in passes)
                for stage in sorted({*chain(*passes)})
            }
        self._rows += 1
        if self._rows <= WITH_SPANS:
            row["aligned_at"] = last.aligned_at
            row["spans"] = [
                [s.start, s.end, s.phase, s.stage] for s in last.spans if s.phase not in EXCLUDED
            ]
        self._file.write(row)


def _mean(steps: Iterable[dict[str, float]]) -> dict[str, float]:
    """Return the mean of each phase over steps; a step without it counts as zero."""
    steps = list(steps)
    total = total_of(pair for phases in steps for pair in phases.items())
    return {phase: seconds / len(steps) for phase, seconds in total.items()}
