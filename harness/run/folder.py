"""The run folder: the files needed to resume, resubmit or audit a run.

    job.json overrides.txt code.json status.json metrics.jsonl metrics/ result.json checkpoints/
    errors/ logs/ evidence/ flight_recorder/ profile/ phases/ slurm/ attempts/ slow_ranks.json
    layouts.json layout.json

One process at a time writes the shared files: the controller before the ranks start and after they
end, rank 0 in between. On SLURM the controller of an attempt is the batch process
(``harness.launch.slurm_attempt``).
"""

import contextlib
import functools
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from harness.config.job import Job
from harness.metrics.jsonl import read_rows
from harness.run.errors import RunErrors
from harness.run.result import git_commit, read_result, versions, write_json_atomically
from harness.util.encoding import parse_object, read_object
from harness.util.errors import UserError
from harness.util.files import LockedError, lock, write_atomically

METRICS = "metrics.jsonl"
STATUS = "status.json"
LAYOUT = "layout.json"
"""Written for an attempt that goes on after a loss: its job, and what was lost."""
BEGUN = ("starting", "running")
"""States of an attempt that has begun and not ended."""
LOCK = ".lock"
_LARGEST_PID = 2**22  # on Linux
LEAVING_SECONDS = 10.0
LATEST = "latest"
"""Link beside the runs of a name, to the one that was started last."""


def run_folders(folder: Path, levels: int = 4) -> list[Path]:
    """Return the run folders in a folder, or in folders below it; run folders are not nested."""
    if (folder / "job.json").is_file():
        return [folder]
    if not levels or not folder.is_dir():
        return []
    found = []
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != LATEST:
            found += run_folders(path, levels - 1)
    return found


class RunFolder:
    """The folder of one run: the files that describe it, the state of its last attempt, and its lock.

    How an attempt ends is written by ``harness.run.record.RunRecord``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.errors = RunErrors(path)
        self._lock: IO[bytes] | None = None

    @property
    def state(self) -> str | None:
        """State of the last attempt; None without a readable ``status.json``.

        planned, submitted, starting, running, requeued, completed, interrupted or failed.
        """
        state = self._read(STATUS).get("state")
        return state if isinstance(state, str) else None

    @property
    def started(self) -> float | None:
        """When the first process of the last attempt started; it tells attempts apart."""
        return self._read(STATUS).get("started")

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
    def code(self) -> dict[str, Any]:
        """Commit and package versions of the attempt; empty if they are not recorded."""
        return self._read("code.json")

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
        try:
            rows = [row for row in read_rows(self.path / METRICS)[0] if "loss" in row]
        except OSError:
            return {}
        return rows[-1] if rows else {}

    @property
    def may_be_running(self) -> bool:
        """Whether a process may be running the job; on another machine, judged by the lock if supported."""
        status = self._read(STATUS)
        if status.get("host") == socket.gethostname() or status.get("state") not in BEGUN:
            return is_running(status)
        try:
            held = lock(self.path / LOCK)
        except (LockedError, OSError):
            return True
        if held is not None:
            held.close()
        return held is None

    def seconds(self, end: float | None = None) -> float:
        """Time that the attempts have taken, from the start of each one's first process to its end.

        Args:
            end: time at which this attempt ends; None: that of its status, or of its last row of metrics if
                it was killed.
        """
        status = self._read(STATUS)
        earlier = float(status.get("earlier_seconds", 0.0))
        started = status.get("started")
        if started is None:
            return earlier
        if end is None:
            end = float(status["time"])
            if status["state"] in BEGUN:
                with contextlib.suppress(OSError):
                    end = max(end, (self.path / METRICS).stat().st_mtime)
        return earlier + max(0.0, end - started)

    def set_status(self, state: str, **facts: Any) -> None:
        """Write ``status.json``: the state, the time and process that set it, when the attempt started."""
        pid = os.getpid()
        before = self._read(STATUS)
        kept: dict[str, Any] = {
            name: before[name] for name in ("started", "earlier_seconds") if name in before
        }
        if state in BEGUN:
            kept.setdefault("started", time.time())
        status = {
            "state": state,
            "host": socket.gethostname(),
            "pid": pid,
            "pid_started": _start_of(pid),
            "time": time.time(),
            **kept,
            **facts,
        }
        write_json_atomically(self.path / STATUS, status)

    def _read(self, name: str) -> dict[str, Any]:
        try:
            return parse_object((self.path / name).read_bytes())
        except (OSError, ValueError):  # missing or damaged
            return {}

    def plan(self, job: Job, overrides: list[str]) -> None:
        """Describe a job that will run here later, unless an attempt has already started."""
        if (self.path / "job.json").exists() and self.state != "planned":
            return
        with self._written():
            self.describe(job, overrides)
            self.set_status("planned")

    def read_job(self) -> Job:
        """Return the job in ``job.json``."""
        try:
            return Job.read(self.path / "job.json")
        except FileNotFoundError:
            raise UserError(
                f"{self.path}: no job.json; the folder was removed or never created"
            ) from None

    @property
    def layout(self) -> dict[str, Any]:
        """Content of ``layout.json``; empty for an attempt that does not go on after a loss."""
        return self._read(LAYOUT)

    def attempt_job(self) -> Job:
        """Return the job of this attempt: that of ``layout.json`` if there is one, or the run's."""
        path = self.path / LAYOUT
        if not path.is_file():
            return self.read_job()
        stored = read_object(path).get("job")
        if not isinstance(stored, dict):
            raise UserError(f"{path}: damaged: it has no job")
        return Job.from_stored(stored)

    def id_of(self, job: Job) -> str:
        """Return the id of this attempt's job, or of the job that it is another layout of."""
        return str(self.layout.get("id", job.id))

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder and keep the lock, unless the body raises."""
        try:
            with self._written():
                self.hold()
                self._refuse_if_running()
                yield
        except BaseException:
            self.release()
            raise

    @contextlib.contextmanager
    def _written(self) -> Iterator[None]:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            yield
        except OSError as error:
            raise UserError(f"{self.path}: cannot write the run folder: {error}") from error

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

    def hold(self) -> None:
        """Lock the folder, unless this object has done so; the lock ends with the process at the latest."""
        if self._lock is not None:
            return
        try:
            # None on file systems without locks; _refuse_if_running then checks the status alone.
            with self._written():
                self._lock = lock(self.path / LOCK, create=True)
        except LockedError:
            raise self._running(self._read(STATUS)) from None

    def _refuse_if_running(self) -> None:
        """Check the status too: rank 0 may briefly outlive a killed controller, without the lock."""
        deadline = time.monotonic() + (LEAVING_SECONDS if self._lock is not None else 0.0)
        while (last := self._read(STATUS)) and is_running(last):
            if time.monotonic() >= deadline:
                raise self._running(last)
            time.sleep(0.1)

    def _running(self, status: dict[str, Any]) -> UserError:
        process = f" (pid {status['pid']} on {status.get('host')})" if "pid" in status else ""
        return UserError(
            f"{self.path}: this job is already running{process}; wait for it or stop it"
        )


def is_running(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status still runs; False if it ran on another machine."""
    if status.get("state") not in BEGUN or status.get("host") != socket.gethostname():
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


@functools.cache
def _code() -> dict[str, Any]:
    """Commit and package versions of this process's code; cached, because git is slow."""
    return {**git_commit(Path(__file__).parent), "versions": versions()}
