"""The run folder: the files needed to resume, resubmit or audit a run. Imports no torch.

    job.json overrides.txt code.json status.json metrics.jsonl result.json
    checkpoints/ errors/ logs/ evidence/ flight_recorder/ profile/ slurm/ attempts/

One process at a time writes the shared files: the controller before the ranks start and after they end, rank
0 in between. On SLURM the controller of an attempt is the batch process (``harness.cluster.attempt``).
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.checkpoint.catalog import CheckpointFolder
from harness.checkpoint.resume import CONTINUES, can_resume
from harness.errors import DISK_FULL, UserError
from harness.failures import CONSEQUENCES, ERROR_FIELDS_IN_ROW, describe_failure
from harness.files import write_atomically
from harness.job import Job
from harness.locks import LockedError, lock
from harness.metrics.encoding import parse_object
from harness.metrics.jsonl import read_rows
from harness.metrics.result import git_commit, read_result, versions, write_json_atomically, write_result
from harness.processes import is_running, start_of

DESCRIPTION = ("job.json", "overrides.txt", "code.json", CONTINUES, "slurm")
PER_ATTEMPT = ("result.json", "status.json", "errors", "logs", "evidence", "flight_recorder", "profile")
# An attempt that resumes appends to these.
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
PER_CURVE = (METRICS, EVALUATIONS, "tensorboard")
LOCK = ".lock"
# Disk space reserved for the run's result, in case the disk is full when it ends.
RESERVE, RESERVED_BYTES = ".reserve", 1 << 18
# Required fields of a recorded error, and their types.
_ERROR_FIELDS = {
    **dict.fromkeys(("kind", "type", "message", "traceback"), str),
    "exit_code": int,
    "rank": int | None,
    "time": int | float,
}
LEAVING_SECONDS = 10.0


class RunFolder:
    """The folder of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None
        self._unrecorded: list[dict[str, Any]] = []

    def begin(self, job: Job, overrides: list[str], *, adopt: bool = False, state: str = "starting") -> None:
        """Prepare the folder for an attempt, and lock it.

        Files of an earlier attempt move to ``attempts/<n>``. The metrics stay if there is a checkpoint to
        resume from.

        Args:
            job: the resolved job.
            overrides: the overrides on the command line.
            adopt: whether to resume from stopped runs of the same experiment on other layouts, if their
                checkpoints are newer.
            state: the new state in ``status.json``.

        Raises:
            UserError: the same job is running in the folder, or the folder cannot be written.
        """
        with self._locked(job):
            others = _unfinished_siblings(job) if adopt else []
            self._archive_earlier_attempt(job, (*DESCRIPTION, *PER_ATTEMPT))
            self._describe(job, overrides)
            if others:
                write_json_atomically(self.path / CONTINUES, {"folders": others})
            self.set_status(state)

    def plan(self, job: Job, overrides: list[str]) -> None:
        """Describe a job that will run here later, unless an attempt has already started.

        Raises:
            UserError: the folder cannot be written.
        """
        if (self.path / "job.json").exists() and self.state != "planned":
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._describe(job, overrides)
            self.set_status("planned")
        except OSError as error:
            raise UserError(f"runs_dir={job.runs_dir}: cannot write the run folder: {error}") from error

    def begin_again(self, job: Job) -> None:
        """Prepare the folder for another attempt of the job described in it, and lock it.

        Before the first attempt of a submitted job, the folder is as ``begin`` left it.

        Raises:
            UserError: the same job is running in the folder, or the folder cannot be written.
        """
        with self._locked(job):
            if self.state != "submitted":
                self._archive_earlier_attempt(job, PER_ATTEMPT)
            for name in ("errors", "logs"):
                (self.path / name).mkdir(exist_ok=True)
            self.set_status("starting")

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
    def _locked(self, job: Job) -> Iterator[None]:
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

    def _describe(self, job: Job, overrides: list[str]) -> None:
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

    def set_status(self, state: str, **facts: Any) -> None:
        """Write ``status.json``: the state, and the time and process that set it."""
        pid = os.getpid()
        owner = {"host": socket.gethostname(), "pid": pid, "pid_started": start_of(pid), "time": time.time()}
        self._write_with_reserve(
            lambda: write_json_atomically(self.path / "status.json", {"state": state, **owner, **facts})
        )

    def record_error(
        self, rank: int | None, error: BaseException, *, step: int | None = None
    ) -> dict[str, Any]:
        """Write ``errors/rank<rank>.json``; the earliest of these files is the cause of the run's failure.

        If it cannot be written, print the error to stderr, so that the writing error does not hide it.

        Args:
            rank: the rank that failed; None for the controller.
            error: the exception, or one that describes a failure observed by the controller.
            step: the last completed step, if any.

        Returns:
            The recorded fields, with the ``kind`` and ``exit_code`` that the process should end with.
        """
        row = {
            "time": time.time(),
            "rank": rank,
            "step": step,
            "host": socket.gethostname(),
            **describe_failure(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        path = self._error_path(rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._write_with_reserve(lambda: write_json_atomically(path, row))
        except OSError as failure:
            self._unrecorded.append(row)
            text = row["traceback"] if row["kind"] == "bug" else f"error: {row['message']} "
            sys.stderr.write(f"{text}(could not be recorded in {path.parent}: {failure.strerror})\n")
        return row

    def rewrite_error(self, error: dict[str, Any]) -> None:
        """Replace the recorded error of a rank, e.g. to add fields."""
        path = self._error_path(error["rank"])
        try:
            write_json_atomically(path, error)
        except OSError as failure:
            sys.stderr.write(f"WARNING {path}: cannot be written: {failure}\n")

    def _error_path(self, rank: int | None) -> Path:
        return self.path / "errors" / ("controller.json" if rank is None else f"rank{rank}.json")

    def has_error_of(self, rank: int) -> bool:
        """Whether a rank has recorded an error."""
        return self._error_path(rank).is_file()

    def first_error(self) -> dict[str, Any] | None:
        """The earliest error that is not a consequence of another rank's, or else the earliest of all."""
        rows = list(self._unrecorded)
        for path in (self.path / "errors").glob("*.json"):
            # Skip unreadable files: they must not hide the other errors.
            with contextlib.suppress(OSError, ValueError):
                row = parse_object(path.read_bytes())
                if all(isinstance(row.get(name), kind) for name, kind in _ERROR_FIELDS.items()):
                    rows.append({"rank": None, **row})
        # A rank that lost a peer can write its error before the failing rank does.
        return min(rows, key=lambda row: (CONSEQUENCES.get(row["kind"], 0), row["time"]), default=None)

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
        }
        error = self.first_error() if exit_reason == "failed" else None
        if error is not None:
            row["error"] = {key: error[key] for key in ERROR_FIELDS_IN_ROW if key in error}
        self._write_end(row, exit_reason, exit_code)

    def ensure_result(self, job: Job, exit_reason: str, exit_code: int) -> None:
        """Write ``result.json``, or correct its exit reason and cause of failure.

        Rank 0 may have died before writing it, or may have written it knowing only that a peer was lost.
        """
        row = self.row
        error = (self.first_error() if exit_reason == "failed" else None) or {}
        cause = {f"error.{key}": error[key] for key in ERROR_FIELDS_IN_ROW if key in error}
        recorded = {key: row.get(key) for key in ("exit_reason", "exit_code", *cause)}
        wanted = {"exit_reason": exit_reason, "exit_code": exit_code, **cause}
        if not row:
            self.write_result(job, exit_reason, exit_code, self._last_metrics())
        elif recorded != wanted:
            others = {key: value for key, value in row.items() if not key.startswith("error.")}
            self._write_end({**others, **wanted}, exit_reason, exit_code)

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

    def _write_with_reserve(self, write: Callable[[], object]) -> None:
        """Call ``write``; if the disk is full, free the reserved space and try again.

        Raises:
            OSError: it cannot be written.
        """
        try:
            write()
        except OSError as error:
            if error.errno not in DISK_FULL or not (self.path / RESERVE).exists():
                raise
            (self.path / RESERVE).unlink(missing_ok=True)
            write()

    @property
    def state(self) -> str | None:
        """State of the last attempt; None without a readable ``status.json``.

        planned, submitted, starting, running, requeued, completed, interrupted or failed.
        """
        state = self._read("status.json").get("state")
        return state if isinstance(state, str) else None

    @property
    def stop_reason(self) -> str | None:
        """Why the last attempt was stopped early; None if unknown."""
        return self._read("status.json").get("reason")

    @property
    def row(self) -> dict[str, Any]:
        """Content of ``result.json``; empty if it is missing or damaged."""
        try:
            return read_result(self.path)
        except (OSError, ValueError):
            return {}

    @property
    def may_be_running(self) -> bool:
        """Whether a process may be running the job; on another machine, judged by the lock if supported."""
        status = self._read("status.json")
        if status.get("host") == socket.gethostname() or status.get("state") not in ("starting", "running"):
            return is_running(status)
        try:
            held = lock(self.path / LOCK)
        except (LockedError, OSError):
            return True
        if held is not None:
            held.close()
        return held is None

    @property
    def has_result(self) -> bool:
        """Whether this attempt has written ``result.json``."""
        return (self.path / "result.json").is_file()

    def _last_metrics(self) -> dict[str, Any]:
        """Step, tokens and loss of the last row of metrics, for a run whose rank 0 wrote no result."""
        try:
            rows = [row for row in read_rows(self.path / METRICS)[0] if "loss" in row]
        except OSError:
            rows = []
        last = rows[-1] if rows else {}
        return {"step": last.get("step", 0), "tokens": last.get("tokens", 0), "loss": last.get("loss")}

    def _read(self, name: str) -> dict[str, Any]:
        """Content of a JSON file of the folder; empty if it is missing or damaged."""
        try:
            return parse_object((self.path / name).read_bytes())
        except (OSError, ValueError):
            return {}

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

    def _archive_earlier_attempt(self, job: Job, names: tuple[str, ...]) -> None:
        """Move files of an earlier attempt to ``attempts/<n>``."""
        if self.state == "planned":
            return  # no earlier attempt
        resumes = can_resume(job, self.path)
        names = names if resumes else (*names, *PER_CURVE)
        present = [self.path / name for name in names if (self.path / name).exists()]
        if not present:
            return
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        number = 1 + max((int(p.name) for p in attempts.iterdir() if p.name.isdigit()), default=0)
        target = attempts / str(number)
        target.mkdir()
        for path in present:
            path.rename(target / path.name)
        curve = self.path / METRICS
        if resumes and job.checkpoint.load_step >= 0 and curve.exists():
            # Keep a copy: rows after load_step are cut off, and the new attempt may not repeat them.
            shutil.copy2(curve, target)


def _unfinished_siblings(job: Job) -> list[str]:
    """Checkpoint folders of stopped runs of the same experiment on other layouts.

    These have the same name and numerics, and another id. Completed and running ones are left out.
    """
    config, runs = job.checkpoint, job.run_dir.parent
    if not config.enable or not config.resume or config.folder != type(config)().folder or not runs.is_dir():
        return []
    found = []
    for path in sorted(runs.iterdir()):
        folder, checkpoints = RunFolder(path), path / config.folder
        if path.name == job.id or not checkpoints.is_dir() or folder.state in ("completed", None):
            continue
        if folder.may_be_running or _numerics_id(path) != job.numerics_id:
            continue
        if CheckpointFolder(str(checkpoints)).complete(1)[0]:
            found.append(str(checkpoints.resolve()))
    return found


def _numerics_id(run_dir: Path) -> str | None:
    """``numerics_id`` of the job in a run folder; None if this version cannot read it."""
    try:
        return Job.read(run_dir / "job.json").numerics_id
    except (FileNotFoundError, UserError):
        return None


@functools.cache
def _code() -> dict[str, Any]:
    """Commit and package versions of this process's code; cached, because git is slow."""
    return {**git_commit(Path(__file__).parent), "versions": versions()}
