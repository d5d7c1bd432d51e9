"""The state of a sweep's point, read from its run folder and from SLURM's queue."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.cluster.follow import ended_without_result
from harness.cluster.job_record import SlurmJobRecord
from harness.cluster.queue import Jobs, Queued, jobs
from harness.errors import UserError
from harness.metrics.jsonl import read_rows
from harness.run_folder import RunFolder
from harness.sweep.registry import Point, Registry

# States in which a process runs the point, or SLURM will start one.
BUSY = ("pending", "running")
FACTS = ("tokens_per_second", "tokens_per_second_per_rank", "mfu", "memory_gib", "loss")


@dataclass(frozen=True)
class PointState:
    """The current state of a point.

    Attributes:
        point: the point.
        state: ``planned`` (never started), ``pending`` (waits in SLURM's queue), ``running``, ``completed``,
            ``stopped`` (interrupted, can resume), ``cancelled`` (its SLURM job was), ``failed``, or ``lost``
            (ended without a result).
        step: the last finished step.
        steps: total number of steps.
        facts: values of the metrics FACTS; None where unknown.
        kind: class of the failure.
        reason: the message of a failure, or why a pending job waits.
        has_begun_elsewhere: whether its job has started on another machine, whose last writes may not be
            visible yet.
        job_record: the record of its SLURM job, if it was submitted.
        job_id: id of its SLURM job, while that waits or runs.
    """

    point: Point
    state: str
    step: int = 0
    steps: int = 0
    facts: dict[str, float | None] | None = None
    kind: str | None = None
    reason: str = ""
    has_begun_elsewhere: bool = False
    job_record: SlurmJobRecord | None = None
    job_id: str | None = None

    @property
    def about(self) -> str:
        """The class of a failure, if any, and the reason."""
        return f"{self.kind}: {self.reason}" if self.kind else self.reason


def points_in(folder: Path) -> list[Point]:
    """Return the points of a sweep folder, the run of a run folder, or all runs of one name.

    Raises:
        UserError: the folder has neither a sweep nor a run.
    """
    registry = Registry(folder)
    if registry.exists:
        return registry.points()
    runs = (
        [folder] if (folder / "job.json").is_file() else sorted(p.parent for p in folder.glob("*/job.json"))
    )
    if not runs:
        raise UserError(f"{folder}: neither a sweep folder nor a run folder{registry.neighbours()}")
    return [Point(run.name, run, typed_overrides(run)) for run in runs]


def typed_overrides(run_dir: Path) -> list[str]:
    """Return the overrides that a run was last started with; empty if they are not recorded."""
    path = run_dir / "overrides.txt"
    return path.read_text().splitlines() if path.is_file() else []


def read_states(points: Sequence[Point]) -> list[PointState]:
    """Return the states of all points, with one query of SLURM if any point needs it.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    listed = queued_jobs(points)
    return [read_state(point, listed) for point in points]


def queued_jobs(points: Sequence[Point]) -> Jobs | None:
    """Return SLURM's jobs if any point was submitted and is not complete; None if there is no SLURM here.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    if not any(
        SlurmJobRecord.read(point.run_dir) and RunFolder(point.run_dir).state != "completed"
        for point in points
    ):
        return Jobs([])
    return jobs() if shutil.which("squeue") is not None else None


def read_state(point: Point, listed: Jobs | None) -> PointState:
    """Return the state of one point.

    Args:
        point: the point.
        listed: SLURM's jobs; None if there is no SLURM here.
    """
    job_record = SlurmJobRecord.read(point.run_dir)
    folder = RunFolder(point.run_dir)
    status, row = folder.state, folder.row
    found = None
    if job_record is not None and listed is not None:
        found = job_record.find(listed.candidates(job_record.job_id, job_record.name))
    state, reason, kind = _state(folder, status, job_record, listed, found)
    if state == "failed":
        kind = row.get("error.kind", "unknown")
        reason = " ".join(str(row.get("error.message", "")).split())
        rank = row.get("error.rank")
        if rank is not None and not reason.startswith(f"rank {rank}"):
            reason = f"rank {rank}: {reason}"
    facts = _facts(row) if row and state != "running" else _running_facts(folder)
    return PointState(
        point,
        state,
        step=int(facts.get("step") or 0),
        steps=_steps(point),
        facts={name: facts.get(name) for name in FACTS},
        kind=kind,
        reason=reason,
        has_begun_elsewhere=job_record is not None and status not in ("planned", "submitted"),
        job_record=job_record,
        job_id=None if found is None else found.id,
    )


def _state(
    folder: RunFolder,
    status: str | None,
    job_record: SlurmJobRecord | None,
    listed: Jobs | None,
    found: Queued | None,
) -> tuple[str, str, str | None]:
    """Return the state, its reason, and the class of a failure."""
    if status == "completed":
        return "completed", "", None
    if found is not None and status != "failed":
        again = (
            f", started {job_record.restarts + 1} times"
            if job_record is not None and job_record.restarts
            else ""
        )
        if found.is_waiting:
            return "pending", f"job {found.id} waits: {found.reason}{again}", None
        return "running", f"job {found.id}{again}", None
    if status == "failed":
        return "failed", "", None
    if status == "interrupted":
        if job_record is not None and job_record.cancelled:
            return "cancelled", "", None
        return "stopped", folder.stop_reason or "before its end; resume continues it", None
    if status in (None, "planned"):
        return "planned", "", None
    if job_record is not None:
        if listed is None:
            return "running", "no SLURM here to read its state from", None
        return "lost", ended_without_result(job_record), "unknown"
    if folder.may_be_running:
        return "running", "", None
    return "lost", "the process that ran it is gone", "unknown"


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """Return the facts of an ended run; throughput is that of the complete measurement window."""
    rate, ranks = row.get("window.tokens_per_second"), row.get("world_size")
    # A damaged row may have any values.
    if not isinstance(rate, int | float) or not isinstance(ranks, int) or ranks < 1:
        return {**row, "tokens_per_second": None, "tokens_per_second_per_rank": None}
    return {**row, "tokens_per_second": rate, "tokens_per_second_per_rank": rate / ranks}


def _running_facts(folder: RunFolder) -> dict[str, Any]:
    """Return the last row of metrics."""
    try:
        rows = [row for row in read_rows(folder.path / "metrics.jsonl")[0] if "loss" in row]
    except OSError:
        return {}
    return rows[-1] if rows else {}


def _steps(point: Point) -> int:
    try:
        return point.job.training.steps
    except (OSError, ValueError, UserError):
        return 0
