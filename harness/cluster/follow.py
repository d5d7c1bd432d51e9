"""Follow a SLURM job: show its output, and find out how it ended if it wrote no result."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

from harness.cluster.job_record import SlurmJobRecord
from harness.cluster.outcome import finish_run, format_failure, last_lines
from harness.cluster.queue import ENDED as ENDED_JOB
from harness.cluster.queue import Queued, SlurmError, jobs, last_states
from harness.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_OK, MachineError, UserError
from harness.job import Job
from harness.run_folder import RunFolder

POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0
# A shared file system may show a job's last writes up to this long after the job has left the queue.
LAST_WRITES_SECONDS = 15.0

ENDED = ("completed", "interrupted", "failed")


def queued(run_dir: Path) -> Queued | None:
    """Return a run's job in SLURM's queue, or None."""
    job_record = SlurmJobRecord.read(run_dir)
    return None if job_record is None else job_record.find(jobs().live)


def job_id_of(run_dir: Path) -> str | None:
    """Return the id of a run's SLURM job, or None."""
    job_record = SlurmJobRecord.read(run_dir)
    return None if job_record is None else job_record.job_id


class JobLost(MachineError):
    """A SLURM job that ended without a result."""

    def __init__(self, job_record: SlurmJobRecord, state: str | None) -> None:
        # SLURM keeps no record of a waiting task of an array that is cancelled.
        self.kind = "cancelled" if job_record.cancelled else _KINDS.get(state or "", "unknown")
        known = f"SLURM says {state}" if state else "SLURM does not know it any more"
        log = last_lines(slurm_log(job_record)) if job_record.logs and job_record.job_id else ""
        super().__init__(f"{ended_without_result(job_record)}; {known}{log}")


def ended_without_result(job_record: SlurmJobRecord) -> str:
    """Return a message that a job ended without a result, with the path of its log if known."""
    named = f"SLURM job {job_record.job_id}" if job_record.job_id else f"the SLURM job {job_record.name}"
    look = f", see {slurm_log(job_record)}" if job_record.logs and job_record.job_id else ""
    return f"{named} ended without a result{look}"


def slurm_log(job_record: SlurmJobRecord) -> Path:
    """Return the path of the job script's output."""
    return Path(job_record.logs or "") / f"{job_record.job_id}_0_log.out"


_KINDS = {
    "NODE_FAIL": "node",
    "BOOT_FAIL": "node",
    "PREEMPTED": "preempted",
    "TIMEOUT": "preempted",
    "DEADLINE": "preempted",
    "OUT_OF_MEMORY": "out_of_memory",
    "CANCELLED": "cancelled",
}


def state_of(job_record: SlurmJobRecord) -> str | None:
    """Return a job's state in SLURM's terms, also for other users' jobs; None if SLURM has forgotten it."""
    return None if job_record.job_id is None else last_states([job_record.job_id]).get(job_record.job_id)


def is_live(state: str | None) -> bool:
    """Whether a job in this state has not ended."""
    return state is not None and state not in ENDED_JOB


def record_lost_job(
    job: Job, folder: RunFolder, job_record: SlurmJobRecord, state: str | None, *, quiet: bool = False
) -> int:
    """Write the row of a run whose job ended without a result; return the run's exit code.

    A cancelled job counts as interrupted, not as failed.

    Args:
        job: the resolved job.
        folder: its run folder, held by this process.
        job_record: the record of the SLURM job.
        state: SLURM's final state of the job, or None.
        quiet: print nothing.
    """
    lost = JobLost(job_record, state)
    if lost.kind == "cancelled":
        replace(job_record, cancelled=True).write(folder.path)
        return finish_run(job, folder, EXIT_INTERRUPTED, quiet=quiet)
    folder.record_error(None, lost)
    return finish_run(job, folder, lost.exit_code, quiet=quiet)


def follow(job: Job, folder: RunFolder) -> int:
    """Show rank 0's output until the job ends; return the run's exit code."""
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
                        return _show_end(job, folder)
                    is_gone = gone_since is not None and now - gone_since > LAST_WRITES_SECONDS
                    if found is None and is_gone:
                        code = _record_if_lost(job, folder)
                        if code is not None:
                            return code
                except SlurmError as error:
                    sys.stderr.write(f"WARNING {error}\n")
                    time.sleep(QUEUE_SECONDS)
                    continue
                gone_since = None if found is not None else gone_since or now
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        sys.stderr.write(f"\nstopped following; job {job_id_of(folder.path)} continues in {folder.path}\n")
        return EXIT_INTERRUPTED


def _record_if_lost(job: Job, folder: RunFolder) -> int | None:
    """If the job ended without a result, write the run's row and return its exit code; else return None."""
    job_record = SlurmJobRecord.read(folder.path)
    state = None if job_record is None else state_of(job_record)
    if job_record is None or is_live(state):
        return None
    try:
        folder.hold()
    except UserError:  # its job still holds it, or another process is writing the row
        return None
    try:
        # The job's last writes may have arrived meanwhile.
        return None if folder.state in ENDED else record_lost_job(job, folder, job_record, state)
    finally:
        folder.release()


def _show_end(job: Job, folder: RunFolder) -> int:
    error = folder.first_error() if folder.state == "failed" else None
    if error is not None:
        sys.stderr.write(format_failure(error, job.world_size, folder))
    if folder.stop_reason is not None:
        sys.stderr.write(f"{folder.stop_reason}\n")
    # The row may be damaged, or not yet visible on a shared file system.
    unknown = EXIT_OK if folder.state == "completed" else EXIT_MACHINE
    return int(folder.row.get("exit_code", unknown))


class Tail:
    """Prints text as it is appended to a file; a file that replaces it is printed from its beginning."""

    def __init__(self, path: Path) -> None:
        self.path, self._inode, self._shown = path, -1, 0

    def show(self) -> None:
        """Print the new text."""
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
