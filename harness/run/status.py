"""The last attempt in a run folder: its state, its row, and whether a process still runs it."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.metrics.result import read_result, write_json_atomically
from harness.util.encoding import parse_object
from harness.util.errors import DISK_FULL
from harness.util.locks import LockedError, lock

METRICS, STATUS = "metrics.jsonl", "status.json"
EVALUATIONS = "evaluations.jsonl"
LOCK = ".lock"
# Disk space reserved for the run's result, in case the disk is full when it ends.
RESERVE, RESERVED_BYTES = ".reserve", 1 << 18
_LARGEST_PID = 2**22  # on Linux


class RunStatus:
    """Files of a run folder that tell how far its last attempt has come."""

    def __init__(self, path: Path) -> None:
        self.path = path

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
    def steps(self) -> int:
        """Total number of steps of the job; 0 if unknown. ``read_job`` takes far longer."""
        training = self._read("job.json").get("training")
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
        """Content of a JSON file of the folder; empty if it is missing or damaged."""
        try:
            return parse_object((self.path / name).read_bytes())
        except (OSError, ValueError):
            return {}

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
