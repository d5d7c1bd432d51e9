"""The run folder: the files needed to resume, resubmit or audit a run.

    job.json overrides.txt code.json status.json metrics.jsonl metrics/ result.json
    checkpoints/ errors/ logs/ evidence/ flight_recorder/ profile/ phases/ slurm/ attempts/ slow_ranks.json

One process at a time writes the shared files: the controller before the ranks start and after they end, rank
0 in between. On SLURM the controller of an attempt is the batch process (``harness.launch.slurm_attempt``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from harness.config.failures import ERROR_FIELDS_IN_ROW
from harness.config.job import Job
from harness.metrics.result import git_commit, versions, write_json_atomically, write_result
from harness.run.errors import RunErrors
from harness.run.status import LOCK, RESERVE, RESERVED_BYTES, is_running
from harness.util.errors import UserError
from harness.util.files import write_atomically
from harness.util.locks import LockedError, lock

LEAVING_SECONDS = 10.0


class RunFolder(RunErrors):
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._lock: IO[bytes] | None = None

    def plan(self, job: Job, overrides: list[str]) -> None:
        """Describe a job that will run here later, unless an attempt has already started.

        Raises:
            UserError: the folder cannot be written.
        """
        if (self.path / "job.json").exists() and self.state != "planned":
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.describe(job, overrides)
            self.set_status("planned")
        except OSError as error:
            raise UserError(f"runs_dir={job.runs_dir}: cannot write the run folder: {error}") from error

    def read_job(self) -> Job:
        """Return the job in ``job.json``.

        Raises:
            UserError: the file is missing or damaged.
        """
        try:
            return Job.read(self.path / "job.json")
        except FileNotFoundError:
            raise UserError(f"{self.path}: no job.json; the folder was removed or never created") from None

    @contextlib.contextmanager
    def locked(self, job: Job) -> Iterator[None]:
        """Lock the folder and keep the lock, unless the body raises."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
            self._refuse_if_running()
            (self.path / RESERVE).write_bytes(os.urandom(RESERVED_BYTES))
            yield
        except OSError as error:
            self.release()
            raise UserError(f"runs_dir={job.runs_dir}: cannot write the run folder: {error}") from error
        except BaseException:
            self.release()
            raise

    def describe(self, job: Job, overrides: list[str]) -> None:
        """Write job, overrides and code version; create the folders that ranks write into."""
        for name in ("errors", "logs"):
            (self.path / name).mkdir(exist_ok=True)
        write_atomically(self.path / "job.json", job.to_json().encode())
        write_atomically(self.path / "overrides.txt", "".join(f"{o}\n" for o in overrides).encode())
        write_json_atomically(self.path / "code.json", _code())

    def release(self) -> None:
        """Release the lock, as the end of the process also does."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def write_result(self, job: Job, exit_reason: str, exit_code: int, facts: dict[str, Any]) -> None:
        """Write ``result.json``, the run's one flat row, and the final status."""
        row = {
            "id": job.id,
            "numerics_id": job.numerics_id,
            "name": job.name,
            "exit_reason": exit_reason,
            "exit_code": exit_code,
            "world_size": job.world_size,
            **facts,
            "job": job.to_dict(),
            "code": self._read("code.json"),
            "host": {"name": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()},
            **self._cause(exit_reason),
        }
        self._write_end(row, exit_reason, exit_code)

    def ensure_result(self, job: Job, exit_reason: str, exit_code: int) -> None:
        """Write ``result.json``, or correct its exit reason and cause of failure.

        Rank 0 may have died before writing it, or may have written it knowing only that a peer was lost.
        """
        row = self.row
        wanted = {"exit_reason": exit_reason, "exit_code": exit_code, **self._cause(exit_reason)}
        if not row:
            last = self.last_metrics
            facts = {"step": last.get("step", 0), "tokens": last.get("tokens", 0), "loss": last.get("loss")}
            self.write_result(job, exit_reason, exit_code, facts)
        elif any(row.get(key) != value for key, value in wanted.items()):
            others = {key: value for key, value in row.items() if not key.startswith("error.")}
            self._write_end({**others, **wanted}, exit_reason, exit_code)

    def _cause(self, exit_reason: str) -> dict[str, Any]:
        """Fields of the row that name the cause of a failure, or say that the SLURM job was cancelled."""
        if exit_reason == "interrupted" and self.is_cancelled:
            return {"error.kind": "cancelled"}
        error = (self.first_error() if exit_reason == "failed" else None) or {}
        return {f"error.{key}": error[key] for key in ERROR_FIELDS_IN_ROW if key in error}

    def _write_end(self, row: dict[str, Any], exit_reason: str, exit_code: int) -> None:
        """Write the row and the final status; if that fails, print how the run ended in one line."""
        try:
            self._write_with_reserve(lambda: write_result(self.path, row))
            self.set_status(exit_reason, exit_code=exit_code)
            (self.path / RESERVE).unlink(missing_ok=True)
        except OSError as error:
            sys.stderr.write(
                f"WARNING {self.path}: how the run ended ({exit_reason}, exit code {exit_code}) cannot be "
                f"written: {error.strerror}\n"
            )

    def hold(self) -> None:
        """Lock the folder, unless this object has done so; the lock ends with the process at the latest.

        Raises:
            UserError: another process has the lock, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._hold()
        except OSError as error:
            raise UserError(f"{self.path}: cannot write the run folder: {error}") from error

    def _hold(self) -> None:
        if self._lock is not None:
            return
        try:
            # None on file systems without locks; _refuse_if_running then checks the status alone.
            self._lock = lock(self.path / LOCK, create=True)
        except LockedError:
            raise self._running(self._read("status.json")) from None

    def _refuse_if_running(self) -> None:
        """Check the status too: rank 0 may briefly outlive a killed controller, without the lock."""
        deadline = time.monotonic() + (LEAVING_SECONDS if self._lock is not None else 0.0)
        while (last := self._read("status.json")) and is_running(last):
            if time.monotonic() >= deadline:
                raise self._running(last)
            time.sleep(0.1)

    def _running(self, status: dict[str, Any]) -> UserError:
        process = f" (pid {status['pid']} on {status.get('host')})" if "pid" in status else ""
        return UserError(f"{self.path}: this job is already running{process}; wait for it or stop it")


@functools.cache
def _code() -> dict[str, Any]:
    """Commit and package versions of this process's code; cached, because git is slow."""
    return {**git_commit(Path(__file__).parent), "versions": versions()}
