"""What becomes of a job that was submitted: shown while it runs, found out when it is gone without a word."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from harness.cluster.outcome import account_of, last_words, settle
from harness.cluster.queue import ENDED as ENDED_JOB
from harness.cluster.queue import Queued, SlurmError, jobs, last_states
from harness.cluster.ticket import Ticket
from harness.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_OK, MachineError, UserError
from harness.job import Job
from harness.run_folder import RunFolder

POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0
# How long after a job has left the queue its last words may still be on the way.
LAST_WORDS_SECONDS = 15.0

ENDED = ("completed", "interrupted", "failed")


def queued(run_dir: Path) -> Queued | None:
    """The SLURM job that a run is in the queue as; None if there is none."""
    ticket = Ticket.read(run_dir)
    return None if ticket is None else ticket.find(jobs().live)


def job_id_of(run_dir: Path) -> str | None:
    """The id of a run's SLURM job; None if it has none."""
    ticket = Ticket.read(run_dir)
    return None if ticket is None else ticket.job_id


class JobLost(MachineError):
    """A SLURM job that ended without a result."""

    def __init__(self, ticket: Ticket, state: str | None) -> None:
        # SLURM keeps no record of a waiting task of an array that is cancelled.
        self.kind = "cancelled" if ticket.cancelled else _KINDS.get(state or "", "unknown")
        said = f"SLURM says {state}" if state else "SLURM does not know it any more"
        log = last_words(slurm_log(ticket)) if ticket.logs and ticket.job_id else ""
        super().__init__(f"{ended_without_result(ticket)}; {said}{log}")


def ended_without_result(ticket: Ticket) -> str:
    """Says that a job has left no row, and where its output is if that is known."""
    named = f"SLURM job {ticket.job_id}" if ticket.job_id else f"the SLURM job {ticket.name}"
    look = f", see {slurm_log(ticket)}" if ticket.logs and ticket.job_id else ""
    return f"{named} ended without a result{look}"


def slurm_log(ticket: Ticket) -> Path:
    """Return the path of what the job's script prints."""
    return Path(ticket.logs or "") / f"{ticket.job_id}_0_log.out"


_KINDS = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
    "DEADLINE": "preempted",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
}


def state_of(ticket: Ticket) -> str | None:
    """The state SLURM has for a job, which need not be in this user's queue; None if it knows none."""
    return None if ticket.job_id is None else last_states([ticket.job_id]).get(ticket.job_id)


def is_live(state: str | None) -> bool:
    """Whether a job in a state is not over."""
    return state is not None and state not in ENDED_JOB


def settle_lost(
    job: Job, folder: RunFolder, ticket: Ticket, state: str | None, *, quiet: bool = False
) -> int:
    """Write the row of a run whose job is over without one; return its exit code.

    A job that was cancelled is interrupted and has not failed.

    Args:
        job: the resolved job.
        folder: its run folder, held by this process.
        ticket: of the SLURM job.
        state: SLURM's word for how the job ended; None if it does not know.
        quiet: print nothing.
    """
    lost = JobLost(ticket, state)
    if lost.kind == "cancelled":
        replace(ticket, cancelled=True).write(folder.path)
        return settle(job, folder, EXIT_INTERRUPTED, quiet=quiet)
    folder.record_error(None, lost)
    return settle(job, folder, lost.exit_code, quiet=quiet)


def follow(job: Job, folder: RunFolder) -> int:
    """Shows what rank 0 prints until the job is over; returns the run's exit code."""
    tail, asked, gone_since = Tail(folder.path / "logs" / "rank0.out"), 0.0, None
    try:
        while True:
            tail.show()
            now = time.monotonic()
            if now - asked >= QUEUE_SECONDS or folder.state in ENDED:
                asked = now
                try:
                    found = queued(folder.path)
                    if found is None and folder.state in ENDED:
                        tail.show()
                        return _tell_end(job, folder)
                    is_gone = gone_since is not None and now - gone_since > LAST_WORDS_SECONDS
                    if found is None and is_gone:
                        code = _settle_if_lost(job, folder)
                        if code is not None:
                            return code
                except SlurmError as error:
                    sys.stderr.write(f"WARNING {error}\n")
                    time.sleep(QUEUE_SECONDS)
                    continue
                gone_since = None if found is not None else gone_since or now
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nnot following any more; job {job_id_of(folder.path)} goes on in {folder.path}\n")
        return EXIT_INTERRUPTED


def _settle_if_lost(job: Job, folder: RunFolder) -> int | None:
    """Write the row of a run whose job is over without one; return its exit code, or None if it is not."""
    ticket = Ticket.read(folder.path)
    state = None if ticket is None else state_of(ticket)
    if ticket is None or is_live(state):
        return None
    try:
        folder.hold()
    except UserError:  # its job still has it, or somebody else is writing the row
        return None
    try:
        # What the job wrote last may have come meanwhile.
        return None if folder.state in ENDED else settle_lost(job, folder, ticket, state)
    finally:
        folder.release()


def _tell_end(job: Job, folder: RunFolder) -> int:
    error = folder.first_error() if folder.state == "failed" else None
    if error is not None:
        sys.stderr.write(account_of(error, job.world_size, folder))
    if folder.stop_reason is not None:
        sys.stderr.write(f"{folder.stop_reason}\n")
    # The row may be damaged, or not be seen yet on a shared file system.
    unknown = EXIT_OK if folder.state == "completed" else EXIT_MACHINE
    return int(folder.row.get("exit_code", unknown))


class Tail:
    """Prints what is appended to a file; one that takes its place is printed from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._shown = path, -1, 0

    def show(self) -> None:
        """Prints what is new."""
        try:
            with self.path.open("rb") as file:
                inode = self.path.stat().st_ino
                if inode != self._inode:
                    self._inode, self._shown = inode, 0
                file.seek(self._shown)
                new = file.read()
        except FileNotFoundError:
            return
        self._shown += len(new)
        sys.stdout.write(new.decode(errors="replace"))
        sys.stdout.flush()
