"""Run the points that a sweeper chooses, batch by batch, and return their values. Imports no Hydra."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.compose.composer import Composed
from harness.launch.state import BUSY, HELD
from harness.launch.submit import confirm
from harness.launch.sweep.distinct import check_swept, run_dir_of, unique_points
from harness.launch.sweep.registry import Point, Registry, Skipped, override_key, sets_label
from harness.launch.sweep.run import (
    Task,
    busy_points,
    follow_points,
    run_point,
    states_of,
    submit_points,
    with_group,
)
from harness.launch.sweep.study_record import PointFailedError, StudyRecord
from harness.run.folder import RunFolder
from harness.util.errors import STOPPED, ConfigError, UserError


@dataclass(frozen=True)
class Outcome:
    """What a sweeper gets for a point: its value, or the reason why it has none."""

    value: float | list[float] | None = None
    error: PointFailedError | None = None


class Study:
    """Runs points for one of Hydra's sweepers, in the folder of a sweep.

    A point that has already run gives its value at once. A point that failed is not started again by the same
    process, but when the study continues.

    Args:
        registry: the folder.
        record: the objective.
        compose: returns the point of some overrides; its job is None if it is not valid.
        axes: fields and groups that the sweeper chooses, which name a point.
        failed: value of failed and illegal points; None reports them as failed.
        trials: number of points that the sweeper will choose from now on; None if unknown.
        before: number of points of earlier processes.
    """

    def __init__(
        self,
        registry: Registry,
        record: StudyRecord,
        compose: Callable[[list[str]], Composed],
        *,
        axes: Sequence[str],
        failed: float | None = None,
        trials: int | None = None,
        before: int = 0,
    ) -> None:
        self.registry, self.record, self.compose = registry, record, compose
        self.axes, self.failed, self.trials, self.before = set(axes), failed, trials, before
        # Each value of a label that is an axis has a run of its own.
        self._swept = check_swept([name for name in axes if sets_label(name)])
        self.done = 0
        self.bug: Exception | None = None
        self._tried: set[Path] = set()
        self._confirmed = False

    def run(self, batch: Sequence[Sequence[str]]) -> list[Outcome]:
        """Run a batch of points, and wait until all have ended.

        Args:
            batch: the overrides of each point, in Hydra's syntax.

        Raises:
            KeyboardInterrupt: the user stopped a run, or following.
            UserError: the points cannot be started here.
        """
        try:
            return self._run([self.compose(list(point)) for point in batch])
        except UserError:
            raise
        except Exception as error:
            self.bug = error  # not an error of the sweeper, through which it is raised
            raise

    def _run(self, batch: Sequence[Composed]) -> list[Outcome]:
        legal = [each for each in batch if each.job is not None]
        tasks = [(point, with_group(job, self.registry)) for point, job in unique_points(legal, self._swept)]
        for point, job in tasks:
            if job.cluster.dry_run:
                rule = "shows a sweep whose points are known before it starts"
                raise ConfigError("cluster.dry_run", True, rule, "the overrides of one point, without -m")
            RunFolder(point.run_dir).plan(job, point.overrides)
        skipped = [Skipped(each.overrides, each.reason) for each in batch if each.job is None]
        self.registry.add([point for point, _ in tasks], skipped)
        local = self._submit(tasks, len(batch))
        outcomes: list[Outcome | None] = []
        for index, each in enumerate(batch):
            sys.stderr.write(f"{self._number(index)} {self._name(each)}\n")
            task = None if each.job is None else local.pop(run_dir_of(each.job, self._swept), None)
            if task is not None and run_point(task[1], task[0]) in STOPPED:
                raise KeyboardInterrupt
            outcomes.append(self._outcome(each))
            self._show(index, outcomes[-1])
        busy = [index for index, outcome in enumerate(outcomes) if outcome is None]
        self._follow([batch[index] for index in busy], [self._number(index) for index in busy])
        for index in busy:
            outcomes[index] = self._outcome(batch[index])
            self._show(index, outcomes[index])
        self.done += len(batch)
        return [self._reported(each) for each in outcomes if each is not None]

    def _submit(self, tasks: Sequence[Task], batch: int) -> dict[Path, Task]:
        """Submit the points that need it to SLURM; return those to run here, by run folder."""
        seen = states_of([point for point, _ in tasks])
        wanted = [
            task
            for task, each in zip(tasks, seen, strict=True)
            if each.state not in ("completed", *HELD)
            # A point that ran out of memory does so again.
            and each.kind != "out_of_memory"
            and each.run_dir not in self._tried
        ]
        self._tried |= {point.run_dir for point, _ in wanted}
        remote = [task for task in wanted if task[1].cluster.kind == "slurm"]
        if remote:
            self._confirm(remote, batch)
            submit_points(self.registry, remote, busy_points(self.registry, tasks, seen))
        return {task[0].run_dir: task for task in wanted if task not in remote}

    def _confirm(self, tasks: Sequence[Task], batch: int) -> None:
        """Ask once for the cost of all points, which is estimated by the first batch."""
        if not self._confirmed:
            batches = 1 if self.trials is None else math.ceil(self.trials / batch)
            confirm([job for _, job in tasks] * batches)
        self._confirmed = True

    def _follow(self, waiting: Sequence[Composed], names: Sequence[str]) -> None:
        points = [self._point(each) for each in waiting]
        if points and follow_points(points, names):
            raise KeyboardInterrupt

    def _point(self, composed: Composed) -> Point:
        return Point(composed.job.id, run_dir_of(composed.job, self._swept), composed.overrides)

    def _outcome(self, point: Composed) -> Outcome | None:
        """Return the value of a point, or its failure; None while it is pending or running."""
        if point.job is None:
            return Outcome(error=PointFailedError(f"not a valid job: {point.reason}"))
        [seen] = states_of([self._point(point)])
        if seen.state in BUSY:
            return None
        if seen.state != "completed":
            return Outcome(error=PointFailedError(f"{seen.state}: {seen.about}"))
        try:
            return Outcome(self.record.value(RunFolder(seen.run_dir).row))
        except PointFailedError as error:
            return Outcome(error=error)

    def _reported(self, outcome: Outcome) -> Outcome:
        """Replace a failure by ``failed``, the value that stands for it."""
        if outcome.error is None or self.failed is None:
            return outcome
        several = len(self.record.objective)
        return Outcome([self.failed] * several if several > 1 else self.failed)

    def _number(self, index: int) -> str:
        of = "" if self.trials is None else f"/{self.before + self.trials}"
        return f"[{self.before + self.done + index + 1}{of}]"

    def _name(self, point: Composed) -> str:
        return " ".join(each for each in point.overrides if override_key(each) in self.axes)

    def _show(self, index: int, outcome: Outcome | None) -> None:
        if outcome is not None:
            shown = outcome.error or self.record.format(outcome.value)
            sys.stderr.write(f"{self._number(index)} {shown}\n")
