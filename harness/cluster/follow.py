"""What becomes of a job that was submitted: shown while it runs, found out when it is gone without a word."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from harness.cluster.outcome import account_of, settle
from harness.cluster.queue import LIVE, Queued, SlurmError, last_state, queue
from harness.cluster.ticket import Ticket
from harness.errors import EXIT_INTERRUPTED, EXIT_OK, MachineError
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
    return None if ticket is None else ticket.find(queue())


def job_id_of(run_dir: Path) -> str | None:
    """The id of a run's SLURM job; None if it has none."""
    ticket = Ticket.read(run_dir)
    return None if ticket is None else ticket.job_id


class JobLost(MachineError):
    """A SLURM job that is over without having left its row."""

    def __init__(self, ticket: Ticket) -> None:
        state = None if ticket.job_id is None else last_state(ticket.job_id)
        # SLURM keeps no record of a waiting task of an array that is cancelled.
        self.kind = "cancelled" if ticket.cancelled else _KINDS.get(state or "", "unknown")
        named = f"SLURM job {ticket.job_id}" if ticket.job_id else f"the SLURM job {ticket.name}"
        said = f"SLURM says {state}" if state else "SLURM does not know it any more"
        super().__init__(f"{named} is over and has not said what became of it; {said}")


_KINDS = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
    "DEADLINE": "preempted",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
}


def is_live(ticket: Ticket) -> bool:
    """Whether SLURM says that a job is not over, which need not be in this user's queue."""
    return ticket.job_id is not None and last_state(ticket.job_id) in LIVE


def settle_lost(job: Job, folder: RunFolder, ticket: Ticket) -> int:
    """Writes down what can be known of a run whose job is over without a word; returns its exit code."""
    lost = JobLost(ticket)
    folder.record_error(None, lost)
    return settle(job, folder, lost.exit_code)


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
                    is_gone = gone_since is not None and now - gone_since > LAST_WORDS_SECONDS
                    ticket = Ticket.read(folder.path)
                    if found is None and is_gone and ticket is not None and not is_live(ticket):
                        return settle_lost(job, folder, ticket)
                except SlurmError as error:
                    sys.stderr.write(f"WARNING {error}\n")
                    time.sleep(QUEUE_SECONDS)
                    continue
                gone_since = None if found is not None else gone_since or now
                if found is None and folder.state in ENDED:
                    tail.show()
                    return _tell_end(job, folder)
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nnot following any more; job {job_id_of(folder.path)} goes on in {folder.path}\n")
        return EXIT_INTERRUPTED


def _tell_end(job: Job, folder: RunFolder) -> int:
    error = folder.first_error() if folder.state == "failed" else None
    if error is not None:
        sys.stderr.write(account_of(error, job.world_size, folder))
    return int(folder.row.get("exit_code", EXIT_OK))


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
