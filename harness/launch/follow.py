"""Follow a SLURM job: show its output until it ends."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from harness.config.job import Job
from harness.launch.queue import Queued, SlurmError, jobs
from harness.launch.state import BUSY, SlurmJobRecord, record_lost
from harness.run.folder import RunFolder
from harness.train.finish import format_failure
from harness.util.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_OK, UserError

POLL_SECONDS = 1.0
QUEUE_SECONDS = 5.0
ENDED = ("completed", "interrupted", "failed")


def queued(run_dir: Path) -> Queued | None:
    """Return a run's job in SLURM's queue, or None."""
    job_record = SlurmJobRecord.read(run_dir)
    return None if job_record is None else job_record.find(jobs())


def follow(job: Job, folder: RunFolder) -> int:
    """Show rank 0's output until the job ends; return the run's exit code.

    Raises:
        UserError: a file of the run folder is damaged, or the job can never start.
    """
    tail, asked = Tail(folder.path / "logs" / "rank0.out"), 0.0
    try:
        while True:
            tail.show()
            if time.monotonic() - asked >= QUEUE_SECONDS or folder.state in ENDED:
                try:
                    [[seen], _] = record_lost([folder.path])
                    if seen.is_damaged or seen.state == "blocked":
                        raise UserError(seen.reason)
                    # Rank 0 may still print after it has written its status.
                    if seen.state not in (*BUSY, "lost") and queued(folder.path) is None:
                        tail.show()
                        return _show_end(job, folder)
                except SlurmError as error:
                    sys.stderr.write(f"WARNING {error}\n")
                    time.sleep(QUEUE_SECONDS)
                    continue
                asked = time.monotonic()
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        record = SlurmJobRecord.read(folder.path)
        ident = None if record is None else record.job_id
        sys.stderr.write(f"\nstopped following; job {ident} continues in {folder.path}\n")
        return EXIT_INTERRUPTED


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
