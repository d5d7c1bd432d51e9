"""The run folder: enough to resume, resubmit or audit a run. Imports no torch.

    job.json overrides.txt code.json status.json metrics.jsonl result.json
    checkpoints/ errors/ logs/ evidence/ flight_recorder/ profile/ slurm/ attempts/

Only one process writes the shared files: the controller before the ranks start and after they end, rank 0
in between. On SLURM the controller of an attempt is the batch process (``harness.cluster.attempt``).
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

from harness.checkpoint.resume import CONTINUES, can_resume, unfinished_siblings
from harness.errors import DISK_FULL, UserError
from harness.failures import CONSEQUENCES, SHOWN_OF_ERROR, describe_failure
from harness.job import Job
from harness.locks import Held, lock
from harness.metrics.encoding import parse_object
from harness.metrics.jsonl import read_rows
from harness.metrics.result import git_commit, read_result, versions, write_json_atomically, write_result
from harness.processes import is_running, start_of

DESCRIPTION = ("job.json", "overrides.txt", "code.json", CONTINUES, "slurm")
PER_ATTEMPT = ("result.json", "status.json", "errors", "logs", "evidence", "flight_recorder", "profile")
# What an attempt that resumes adds to.
METRICS = "metrics.jsonl"
PER_CURVE = (METRICS, "tensorboard")
LOCK = ".lock"
# Room for what became of the run, should the disk be full when it ends.
RESERVE, RESERVED_BYTES = ".reserve", 1 << 18
# What an account of a failure cannot do without.
_OF_AN_ERROR = {
    **dict.fromkeys(("kind", "type", "message", "traceback"), str),
    "exit_code": int,
    "rank": int | None,
    "time": int | float,
}
LEAVING_SECONDS = 10.0


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock: IO[bytes] | None = None
        self._unrecorded: list[dict[str, Any]] = []

    def begin(self, job: Job, overrides: list[str], *, adopt: bool = False, state: str = "starting") -> None:
        """Makes the folder ready for an attempt, and holds it.

        What an earlier attempt wrote moves to ``attempts/<n>``; the curve stays if there is a checkpoint to
        add to it from.

        Args:
            job: the resolved job.
            overrides: what was typed.
            adopt: whether to go on from checkpoints of the same experiment on other layouts, if they have
                come further and not to the end.
            state: what the status says then.

        Raises:
            UserError: the same job is running in it, or the folder cannot be written.
        """
        with self._taking(job):
            others = unfinished_siblings(job) if adopt else []
            self._put_earlier_attempt_away(job, (*DESCRIPTION, *PER_ATTEMPT))
            self._describe(job, overrides)
            if others:
                write_json_atomically(self.path / CONTINUES, {"folders": others})
            self.set_status(state)

    def plan(self, job: Job, overrides: list[str]) -> None:
        """Writes down a job that is to run here, unless an attempt at one has begun.

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
        """Makes the folder ready for another attempt of the job that is described in it, and holds it.

        The first attempt at a submitted job finds it as ``begin`` has left it.

        Raises:
            UserError: the same job is running in it, or the folder cannot be written.
        """
        with self._taking(job):
            if self.state != "submitted":
                self._put_earlier_attempt_away(job, PER_ATTEMPT)
            for name in ("errors", "logs"):
                (self.path / name).mkdir(exist_ok=True)
            self.set_status("starting")

    def read_job(self) -> Job:
        """Returns the job that is described here.

        Raises:
            UserError: there is none, or it is damaged.
        """
        try:
            return Job.read(self.path / "job.json")
        except FileNotFoundError:
            raise UserError(f"{self.path}: no job.json; the folder was removed or never made") from None

    @contextlib.contextmanager
    def _taking(self, job: Job) -> Iterator[None]:
        """Holds the folder from here on, unless making it ready fails."""
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
        """Writes what is run here, and makes the folders that ranks write into."""
        for name in ("errors", "logs"):
            (self.path / name).mkdir(exist_ok=True)
        write_text_atomically(self.path / "job.json", job.to_json())
        write_text_atomically(self.path / "overrides.txt", "".join(f"{o}\n" for o in overrides))
        write_json_atomically(self.path / "code.json", _code())

    def release(self) -> None:
        """Lets the next attempt in; the end of the process does too."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def set_status(self, state: str, **facts: Any) -> None:
        """Writes ``status.json``: the state, who wrote it and when."""
        pid = os.getpid()
        owner = {"host": socket.gethostname(), "pid": pid, "pid_started": start_of(pid), "time": time.time()}
        self._write_with_reserve(
            lambda: write_json_atomically(self.path / "status.json", {"state": state, **owner, **facts})
        )

    def record_error(
        self, rank: int | None, error: BaseException, *, step: int | None = None
    ) -> dict[str, Any]:
        """Writes ``errors/rank<rank>.json``; the earliest of them is what the run died of.

        If even that fails, the error goes to stderr: it must not get lost behind the one of writing it down.

        Args:
            rank: which rank it happened to; None for the controller.
            error: what was raised, or an account of what was seen from outside.
            step: the last step that was finished, if any.

        Returns:
            what is recorded; ``kind`` and ``exit_code`` are what the process ends with.
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
            told = row["traceback"] if row["kind"] == "bug" else f"error: {row['message']} "
            sys.stderr.write(f"{told}(could not be recorded in {path.parent}: {failure.strerror})\n")
        return row

    def rewrite_error(self, error: dict[str, Any]) -> None:
        """Replace the recorded error of a rank by one with more in it."""
        path = self._error_path(error["rank"])
        try:
            write_json_atomically(path, error)
        except OSError as failure:
            sys.stderr.write(f"WARNING {path}: cannot be written: {failure}\n")

    def _error_path(self, rank: int | None) -> Path:
        return self.path / "errors" / ("controller.json" if rank is None else f"rank{rank}.json")

    def has_error_of(self, rank: int) -> bool:
        """Whether a rank told what it died of."""
        return self._error_path(rank).is_file()

    def first_error(self) -> dict[str, Any] | None:
        """The earliest error that is no consequence of another rank's, or else the earliest of all."""
        rows = list(self._unrecorded)
        for path in (self.path / "errors").glob("*.json"):
            # One that cannot be read must not hide the others.
            with contextlib.suppress(OSError, ValueError):
                row = parse_object(path.read_bytes())
                if all(isinstance(row.get(name), kind) for name, kind in _OF_AN_ERROR.items()):
                    rows.append({"rank": None, **row})
        # A rank that lost its peer can notice and write before the culprit has written.
        return min(rows, key=lambda row: (CONSEQUENCES.get(row["kind"], 0), row["time"]), default=None)

    def conclude(self, job: Job, exit_reason: str, exit_code: int, facts: dict[str, Any]) -> None:
        """Writes ``result.json``, the run's one flat row, and the final status."""
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
            row["error"] = {key: error[key] for key in SHOWN_OF_ERROR if key in error}
        self._write_end(row, exit_reason, exit_code)

    def settle(self, job: Job, exit_reason: str, exit_code: int) -> None:
        """Sees to it that the row is there and names the cause.

        Rank 0 may be dead, or may have written its row when it knew only that a peer was gone.
        """
        row = self.row
        error = (self.first_error() if exit_reason == "failed" else None) or {}
        cause = {f"error.{key}": error[key] for key in SHOWN_OF_ERROR if key in error}
        told = {key: row.get(key) for key in ("exit_reason", "exit_code", *cause)}
        wanted = {"exit_reason": exit_reason, "exit_code": exit_code, **cause}
        if not row:
            self.conclude(job, exit_reason, exit_code, self._reached())
        elif told != wanted:
            kept = {key: value for key, value in row.items() if not key.startswith("error.")}
            self._write_end({**kept, **wanted}, exit_reason, exit_code)

    def _write_end(self, row: dict[str, Any], exit_reason: str, exit_code: int) -> None:
        """Writes the row and the final status, or one line if that fails: the cause must stay visible."""
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
        """Writes; where the disk is full, in the room that was reserved when the attempt began.

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
        """What the last attempt's status says of it.

        planned, submitted, starting, running, requeued, completed, interrupted or failed; None without one.
        """
        state = self._read("status.json").get("state")
        return state if isinstance(state, str) else None

    @property
    def stop_reason(self) -> str | None:
        """Return why the last attempt was stopped before its end; None if that is not known."""
        return self._read("status.json").get("reason")

    @property
    def row(self) -> dict[str, Any]:
        """The row that this attempt has left; empty before, and when the file is damaged."""
        try:
            return read_result(self.path)
        except (OSError, ValueError):
            return {}

    @property
    def may_be_running(self) -> bool:
        """Whether a process is at it; of one on another machine the lock tells, where there are locks."""
        status = self._read("status.json")
        if status.get("host") == socket.gethostname() or status.get("state") not in ("starting", "running"):
            return is_running(status)
        try:
            held = lock(self.path / LOCK)
        except (Held, OSError):
            return True
        if held is not None:
            held.close()
        return held is None

    @property
    def is_concluded(self) -> bool:
        """Whether this attempt has left its row."""
        return (self.path / "result.json").is_file()

    def _reached(self) -> dict[str, Any]:
        """How far the run came, from its last row of metrics: for a rank 0 that cannot say it any more."""
        try:
            rows = [row for row in read_rows(self.path / METRICS)[0] if "loss" in row]
        except OSError:
            rows = []
        last = rows[-1] if rows else {}
        return {"step": last.get("step", 0), "tokens": last.get("tokens", 0), "loss": last.get("loss")}

    def _read(self, name: str) -> dict[str, Any]:
        """A JSON file of the folder; empty if it is missing or broken."""
        try:
            return parse_object((self.path / name).read_bytes())
        except (OSError, ValueError):
            return {}

    def hold(self) -> None:
        """Takes the folder's lock, unless this object has it; it ends with this process however that ends.

        Raises:
            UserError: another process has it, or the folder cannot be written.
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
            # Where there are no locks, the status below has to do.
            self._lock = lock(self.path / LOCK, create=True)
        except Held:
            raise self._running(self._read("status.json")) from None

    def _refuse_if_running(self) -> None:
        """Checks for what the lock does not see: a rank 0 that outlives a killed controller by a moment."""
        deadline = time.monotonic() + (LEAVING_SECONDS if self._lock is not None else 0.0)
        while (last := self._read("status.json")) and is_running(last):
            if time.monotonic() >= deadline:
                raise self._running(last)
            time.sleep(0.1)

    def _running(self, status: dict[str, Any]) -> UserError:
        who = f" (pid {status['pid']} on {status.get('host')})" if "pid" in status else ""
        return UserError(f"{self.path}: this job is already running{who}; wait for it or stop it")

    def _put_earlier_attempt_away(self, job: Job, names: tuple[str, ...]) -> None:
        if self.state == "planned":
            return  # there was none
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
            # What comes after that step is cut off, and not because it will be written again.
            shutil.copy2(curve, target)


@functools.cache
def _code() -> dict[str, Any]:
    """Where this process's code came from; asked once, because git takes its time for every answer."""
    return {**git_commit(Path(__file__).parent), "versions": versions()}


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old one or the new one, never a part."""
    from harness.metrics.atomic import write_atomically

    write_atomically(path, text.encode())
