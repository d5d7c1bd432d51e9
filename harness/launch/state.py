"""The state of a run, read from its run folder and from SLURM's queue."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.launch.queue import Jobs, Queued, SlurmError, jobs
from harness.launch.slurm_record import FILE, SlurmJobRecord
from harness.metrics.phases import SlowRank, slow_ranks
from harness.run.folder import RunFolder
from harness.util.errors import UserError

# States in which a process runs the job, or SLURM will start or continue one.
BUSY = ("pending", "running", "suspended")
# States of a job that must not be started again: SLURM has it in its queue, or a process runs it.
HELD = (*BUSY, "blocked")
FACTS = ("tokens_per_second", "tokens_per_second_per_rank", "mfu", "memory_gib", "loss")


@dataclass(frozen=True)
class RunState:
    """The current state of a run.

    Attributes:
        run_dir: its run folder.
        state: ``planned`` (never started), ``pending`` (waits in SLURM's queue), ``blocked`` (is in the queue
            and can never start), ``running``, ``suspended`` (by SLURM), ``completed``, ``stopped``
            (interrupted, can resume), ``cancelled`` (its SLURM job was), ``failed``, or ``lost`` (ended
            without a result).
        step: the last finished step.
        steps: total number of steps.
        facts: values of the metrics FACTS; None where unknown.
        kind: class of the failure.
        reason: the message of a failure, or why a pending job waits.
        job_record: the record of its SLURM job, if it was submitted.
        job_id: id of its SLURM job, while that waits or runs.
    """

    run_dir: Path
    state: str
    step: int = 0
    steps: int = 0
    facts: dict[str, float | None] | None = None
    kind: str | None = None
    reason: str = ""
    job_record: SlurmJobRecord | None = None
    job_id: str | None = None
    slow: tuple[SlowRank, ...] = ()
    """Ranks that the last attempt found slow."""

    @property
    def about(self) -> str:
        """The class of a failure, if any, and the reason; then the slow ranks."""
        reason = f"{self.kind}: {self.reason}" if self.kind else self.reason
        return "; ".join([*([reason] if reason else []), *(f"slow: {each}" for each in self.slow)])

    @property
    def is_damaged(self) -> bool:
        """Whether a damaged file hides the state; ``reason`` names the file."""
        return self.state == "lost" and self.kind == "user"


def read_states(run_dirs: Sequence[Path]) -> list[RunState]:
    """Return the states of all runs, with one query of SLURM if any run needs it.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    listed = queued_jobs(run_dirs)
    return [read_state(run_dir, listed) for run_dir in run_dirs]


def queued_jobs(run_dirs: Sequence[Path]) -> Jobs | None:
    """Return SLURM's jobs if any run was submitted and is not complete; None if there is no SLURM here.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    if not any((path / FILE).is_file() and RunFolder(path).state != "completed" for path in run_dirs):
        return Jobs([])
    return jobs() if shutil.which("squeue") is not None else None


def states_in_folders(run_dirs: Sequence[Path], error: SlurmError) -> list[RunState]:
    """Return the states that the run folders know while SLURM does not answer; show the error."""
    sys.stderr.write(f"WARNING {error}; shown is what the run folders know\n")
    return [read_state(run_dir, None, silent="SLURM does not answer") for run_dir in run_dirs]


def read_state(
    run_dir: Path, listed: Jobs | None, silent: str = "no SLURM here to read its state from"
) -> RunState:
    """Return the state of one run.

    Args:
        run_dir: its run folder.
        listed: SLURM's jobs; None if they are not known.
        silent: why they are not known.
    """
    folder = RunFolder(run_dir)
    status, row = folder.state, folder.row
    try:
        job_record = SlurmJobRecord.read(run_dir)
    except UserError as error:
        return RunState(run_dir, "lost", kind="user", reason=str(error))
    found = None if job_record is None or listed is None else job_record.find(listed)
    state, reason, kind = _state(folder, status, job_record, listed, found, silent)
    if state == "failed":
        kind = row.get("error.kind", "unknown")
        reason = " ".join(str(row.get("error.message", "")).split())
        rank = row.get("error.rank")
        if rank is not None and not reason.startswith(f"rank {rank}"):
            reason = f"rank {rank}: {reason}"
    facts = _facts(row) if row and state != "running" else folder.last_metrics
    return RunState(
        run_dir,
        state,
        step=int(facts.get("step") or 0),
        steps=folder.steps,
        facts={name: facts.get(name) for name in FACTS},
        kind=kind,
        reason=reason,
        job_record=job_record,
        job_id=None if found is None else found.id,
        slow=tuple(slow_ranks(run_dir)),
    )


def _state(
    folder: RunFolder,
    status: str | None,
    job_record: SlurmJobRecord | None,
    listed: Jobs | None,
    found: Queued | None,
    silent: str,
) -> tuple[str, str, str | None]:
    """Return the state, its reason, and the class of a failure."""
    if status == "completed":
        return "completed", "", None
    if found is not None and status != "failed":
        restarts = 0 if job_record is None else job_record.restarts
        again = f", started {restarts + 1} times" if restarts else ""
        if found.state in ("SUSPENDED", "STOPPED"):
            return "suspended", f"job {found.id}: scontrol resume {found.id} continues it{again}", None
        if found.never_starts:
            works = "cancel it (harness sweep cancel), then a request that SLURM can meet"
            return "blocked", f"job {found.id} can never start: {found.reason}; would work: {works}", "user"
        if found.is_waiting:
            return "pending", f"job {found.id} waits: {found.reason}{again}", None
        return "running", f"job {found.id}{again}", None
    if status == "failed":
        return "failed", "", None
    if status == "interrupted" and not (job_record is not None and job_record.begun and listed is not None):
        if job_record is not None and job_record.cancelled:
            return "cancelled", "", None
        return "stopped", folder.stop_reason or "before its end; resume continues it", None
    if status in (None, "planned"):
        return "planned", "", None
    if job_record is not None:
        if listed is None:
            return "pending" if status in ("submitted", "requeued") else "running", silent, None
        if status == "submitted" and job_record.job_id is None:
            return "planned", "never submitted: the command ended before it called sbatch", None
        return "lost", job_record.ended_without_result, "unknown"
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
