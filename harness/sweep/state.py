"""What has become of a point: read from its run folder, and from SLURM's queue while it is there."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.cluster.queue import Queued, queue
from harness.cluster.ticket import Ticket
from harness.errors import UserError
from harness.metrics.jsonl import read_metrics
from harness.run_folder import RunFolder
from harness.sweep.registry import Point

# States in which a process is at it, or SLURM will start one.
BUSY = ("pending", "running")


@dataclass(frozen=True)
class Seen:
    """A point as it is now.

    Attributes:
        point: which.
        state: ``planned`` (never started), ``pending`` (SLURM has it and no nodes for it), ``running``,
            ``completed``, ``stopped`` (asked to, can go on), ``failed``, or ``lost`` (over without a word).
        step: the last step that was finished.
        steps: how many there will be.
        facts: tokens_per_second, mfu, memory_gib and loss, as far as they are known.
        kind: class of the failure.
        reason: what there is to say: of a failure what happened, of a pending job why it waits.
        has_begun_elsewhere: whether another machine may still have to say how it ended.
    """

    point: Point
    state: str
    step: int = 0
    steps: int = 0
    facts: dict[str, float | None] | None = None
    kind: str | None = None
    reason: str = ""
    has_begun_elsewhere: bool = False

    @property
    def about(self) -> str:
        """The class of a failure, and what there is to say."""
        return f"{self.kind}: {self.reason}" if self.kind else self.reason


def look_at_all(points: Sequence[Point]) -> list[Seen]:
    """How all points are, with one question to SLURM if any of them is its business.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    tickets = [Ticket.read(point.run_dir) for point in points]
    asked = any(tickets) and shutil.which("squeue") is not None
    jobs = queue() if asked else None if any(tickets) else []
    return [look_at(point, ticket, jobs) for point, ticket in zip(points, tickets, strict=True)]


def look_at(point: Point, ticket: Ticket | None, jobs: list[Queued] | None) -> Seen:
    """How one point is.

    Args:
        point: which.
        ticket: of its SLURM job, if it was submitted.
        jobs: what is in the queue; None if that cannot be known here.
    """
    folder = RunFolder(point.run_dir)
    status, row = folder.state, folder.row
    found = ticket.find(jobs) if ticket is not None and jobs is not None else None
    state, reason, kind = _state(folder, status, ticket, jobs, found)
    if state == "failed":
        kind = row.get("error.kind", "unknown")
        reason = " ".join(str(row.get("error.message", "")).split())
        rank = row.get("error.rank")
        if rank is not None and not reason.startswith(f"rank {rank}"):
            reason = f"rank {rank}: {reason}"
    facts = _facts(row) if row and state != "running" else _running_facts(folder)
    return Seen(
        point,
        state,
        step=int(facts.get("step") or 0),
        steps=_steps(point),
        facts={name: facts.get(name) for name in ("tokens_per_second", "mfu", "memory_gib", "loss")},
        kind=kind,
        reason=reason,
        has_begun_elsewhere=ticket is not None and status not in ("planned", "submitted"),
    )


def _state(
    folder: RunFolder,
    status: str | None,
    ticket: Ticket | None,
    jobs: list[Queued] | None,
    found: Queued | None,
) -> tuple[str, str, str | None]:
    """The state, what there is to say of it, and the class of a failure that can be seen from here."""
    if status == "completed":
        return "completed", "", None
    if found is not None and status != "failed":
        again = f", started {ticket.restarts + 1} times" if ticket is not None and ticket.restarts else ""
        if found.waits:
            return "pending", f"job {found.id} waits: {found.reason}{again}", None
        return "running", f"job {found.id}{again}", None
    if status == "failed":
        return "failed", "", None
    if status == "interrupted":
        return "stopped", "before its end; resume goes on with it", None
    if status in (None, "planned"):
        return "planned", "", None
    if ticket is not None:
        if jobs is None:
            return "running", "there is no SLURM here to ask", None
        return (
            "lost",
            f"job {ticket.job_id or ticket.name} is over and has not said what became of it",
            "unknown",
        )
    if folder.may_be_running:
        return "running", "", None
    return "lost", "the process that ran it is gone", "unknown"


def _facts(row: dict[str, Any]) -> dict[str, Any]:
    """Of a run that is over: its throughput is that of the whole window."""
    return {**row, "tokens_per_second": row.get("window.tokens_per_second")}


def _running_facts(folder: RunFolder) -> dict[str, Any]:
    """The last row of metrics."""
    try:
        rows = [row for row in read_metrics(folder.path / "metrics.jsonl") if "loss" in row]
    except (OSError, UserError):
        return {}
    return rows[-1] if rows else {}


def _steps(point: Point) -> int:
    try:
        return point.job.training.steps
    except (OSError, ValueError, UserError):
        return 0
