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
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from harness.config.failures import CONSEQUENCES, ERROR_FIELDS_IN_ROW, describe_failure
from harness.config.job import Job
from harness.run.result import git_commit, read_result, versions, write_json_atomically, write_result
from harness.util.encoding import parse_object
from harness.util.errors import DISK_FULL, UserError
from harness.util.files import LockedError, lock, write_atomically

METRICS, STATUS = "metrics.jsonl", "status.json"
LOCK = ".lock"
# Disk space reserved for the run's result, in case the disk is full when it ends.
RESERVE, RESERVED_BYTES = ".reserve", 1 << 18
_LARGEST_PID = 2**22  # on Linux
LOG_LINES_SHOWN = 8
# Required fields of a recorded error, and their types.
_FIELDS = {
    **dict.fromkeys(("kind", "type", "message", "traceback"), str),
    "exit_code": int,
    "rank": int | None,
    "time": int | float,
}
LEAVING_SECONDS = 10.0
LATEST = "latest"
"""Link beside the runs of a name, to the one that was started last."""


def run_folders(folder: Path, levels: int = 4) -> list[Path]:
    """Return the run folders in a folder, or in folders below it; run folders are not nested."""
    if (folder / "job.json").is_file():
        return [folder]
    if not levels or not folder.is_dir():
        return []
    inside = sorted(path for path in folder.iterdir() if path.is_dir() and path.name != LATEST)
    return [run for path in inside for run in run_folders(path, levels - 1)]


class RunFolder:
    """The folder of one run: state and errors of its last attempt, and its lock."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._unrecorded: list[dict[str, Any]] = []
        self._lock: IO[bytes] | None = None

    @property
    def state(self) -> str | None:
        """State of the last attempt; None without a readable ``status.json``.

        planned, submitted, starting, running, requeued, completed, interrupted or failed.
        """
        state = self._read(STATUS).get("state")
        return state if isinstance(state, str) else None

    @property
    def stop_reason(self) -> str | None:
        """Why the last attempt was stopped early; None if unknown."""
        return self._read(STATUS).get("reason")

    @property
    def row(self) -> dict[str, Any]:
        """Content of ``result.json``; empty if it is missing or damaged."""
        try:
            return read_result(self.path)
        except (OSError, ValueError):
            return {}

    @property
    def has_result(self) -> bool:
        """Whether this attempt has written ``result.json``."""
        return (self.path / "result.json").is_file()

    @property
    def plain_job(self) -> dict[str, Any]:
        """Content of ``job.json``; empty if it is missing or damaged."""
        return self._read("job.json")

    @property
    def steps(self) -> int:
        """Total number of steps of the job; 0 if unknown. ``read_job`` takes far longer."""
        training = self.plain_job.get("training")
        steps = training.get("steps") if isinstance(training, dict) else None
        return steps if isinstance(steps, int) else 0

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody cancelled the SLURM job of this attempt."""
        return self._read("slurm/job.json").get("cancelled") is True

    def wait_for_result(self, seconds: float) -> None:
        """Wait until this attempt has written ``result.json``, but no longer than ``seconds``."""
        deadline = time.monotonic() + seconds
        while not self.has_result and time.monotonic() < deadline:
            time.sleep(0.05)

    @property
    def last_metrics(self) -> dict[str, Any]:
        """The last row of metrics that has a loss; empty if there is none."""
        from harness.metrics.jsonl import read_rows

        try:
            rows = [row for row in read_rows(self.path / METRICS)[0] if "loss" in row]
        except OSError:
            rows = []
        return rows[-1] if rows else {}

    @property
    def earlier_attempt(self) -> Path | None:
        """Folder with the files of the attempt before this one; None if this is the first."""
        attempts = [path for path in (self.path / "attempts").glob("*") if path.name.isdigit()]
        return max(attempts, key=lambda path: int(path.name), default=None)

    @property
    def may_be_running(self) -> bool:
        """Whether a process may be running the job; on another machine, judged by the lock if supported."""
        status = self._read(STATUS)
        if status.get("host") == socket.gethostname() or status.get("state") not in ("starting", "running"):
            return is_running(status)
        try:
            held = lock(self.path / LOCK)
        except (LockedError, OSError):
            return True
        if held is not None:
            held.close()
        return held is None

    def set_status(self, state: str, **facts: Any) -> None:
        """Write ``status.json``: the state, and the time and process that set it."""
        pid = os.getpid()
        owner = {"host": socket.gethostname(), "pid": pid, "pid_started": _start_of(pid), "time": time.time()}
        self._write_with_reserve(
            lambda: write_json_atomically(self.path / STATUS, {"state": state, **owner, **facts})
        )

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return parse_object((self.path / name).read_bytes())
        except (OSError, ValueError):  # missing or damaged
            return {}

    def _write_with_reserve(self, write: Callable[[], object]) -> None:
        """Call ``write``; if the disk is full, free the reserved space and try again."""
        try:
            write()
        except OSError as error:
            if error.errno not in DISK_FULL or not (self.path / RESERVE).exists():
                raise
            (self.path / RESERVE).unlink(missing_ok=True)
            write()

    def record_error(
        self, rank: int | None, error: BaseException, *, step: int | None = None
    ) -> dict[str, Any]:
        """Write ``errors/rank<rank>.json``; without a rank the controller's.

        If it cannot be written, print the error to stderr, so that the writing error does not hide it.
        ``step`` is the last completed one.

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
                if all(isinstance(row.get(name), kind) for name, kind in _FIELDS.items()):
                    rows.append({"rank": None, **row})
        # A rank that lost a peer can write its error before the failing rank does.
        return min(rows, key=lambda row: (CONSEQUENCES.get(row["kind"], 0), row["time"]), default=None)

    def _error_path(self, rank: int | None) -> Path:
        return self.path / "errors" / ("controller.json" if rank is None else f"rank{rank}.json")

    def plan(self, job: Job, overrides: list[str]) -> None:
        """Describe a job that will run here later, unless an attempt has already started."""
        if (self.path / "job.json").exists() and self.state != "planned":
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self.describe(job, overrides)
            self.set_status("planned")
        except OSError as error:
            raise UserError(f"runs_dir={job.runs_dir}: cannot write the run folder: {error}") from error

    def read_job(self) -> Job:
        """Return the job in ``job.json``."""
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

    def link_latest(self) -> None:
        """Make the link ``latest`` beside the folder; nothing depends on it."""
        link = self.path.with_name(f".{LATEST}.{os.getpid()}")
        try:
            link.symlink_to(self.path.name)
            link.replace(self.path.with_name(LATEST))
        except OSError:  # a file system without links, or a folder of that name
            link.unlink(missing_ok=True)

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
        """Lock the folder, unless this object has done so; the lock ends with the process at the latest."""
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


def is_running(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status still runs; False if it ran on another machine."""
    if status.get("state") not in ("starting", "running") or status.get("host") != socket.gethostname():
        return False
    pid = status.get("pid")
    if not isinstance(pid, int) or not 0 < pid <= _LARGEST_PID or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # Process ids are reused.
    return status.get("pid_started") in (None, _start_of(pid))


def _start_of(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it is unreadable or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None


def last_lines(log: Path) -> str:
    """Return the end of a log, formatted to follow a message; empty if there is no log."""
    try:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in ["last lines of its log:", *tail]) if tail else ""


@functools.cache
def _code() -> dict[str, Any]:
    """Commit and package versions of this process's code; cached, because git is slow."""
    return {**git_commit(Path(__file__).parent), "versions": versions()}
