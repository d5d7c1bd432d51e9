"""The run folder: enough to resume, resubmit or audit a run. Imports no torch.

    job.json overrides.txt code.json status.json metrics.jsonl result.json errors/ logs/ evidence/ attempts/

Only one process writes the shared files: the controller before the ranks start and after they end, rank 0
in between.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import time
import traceback
from pathlib import Path
from typing import Any

from harness.errors import EXIT_BUG, HarnessError, UserError
from harness.job import Job
from harness.metrics.result import git_commit, versions, write_json_atomically, write_result

PER_ATTEMPT = ("metrics.jsonl", "result.json", "status.json", "errors", "logs", "evidence", "tensorboard")


class RunFolder:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def begin(self, job: Job, overrides: list[str]) -> None:
        """Makes the folder ready for an attempt; what an earlier attempt wrote moves to ``attempts/<n>``.

        Raises:
            UserError: the same job is running in it, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._refuse_if_running()
            self._put_earlier_attempt_away()
            for name in ("errors", "logs"):
                (self.path / name).mkdir(exist_ok=True)
            write_text_atomically(self.path / "job.json", job.to_json())
            write_text_atomically(self.path / "overrides.txt", "".join(f"{o}\n" for o in overrides))
            code = {**git_commit(Path(__file__).parent), "versions": versions()}
            write_json_atomically(self.path / "code.json", code)
            self.set_status("starting")
        except OSError as error:
            raise UserError(f"runs_dir={job.runs_dir}: cannot write the run folder: {error}") from error

    def set_status(self, state: str, **facts: Any) -> None:
        """Writes ``status.json``: the state, who wrote it and when."""
        owner = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time()}
        write_json_atomically(self.path / "status.json", {"state": state, **owner, **facts})

    def record_error(self, rank: int, error: BaseException) -> None:
        """Writes ``errors/rank<rank>.json``; the earliest of them is what the run died of."""
        kind = error.kind if isinstance(error, HarnessError) else _kind_of(error)
        row = {
            "time": time.time(),
            "rank": rank,
            "host": socket.gethostname(),
            "kind": kind,
            "type": type(error).__name__,
            "message": str(error).strip() or type(error).__name__,
            "exit_code": error.exit_code if isinstance(error, HarnessError) else _exit_code_of(kind),
            "traceback": "".join(traceback.format_exception(error)),
        }
        (self.path / "errors").mkdir(parents=True, exist_ok=True)
        write_json_atomically(self.path / "errors" / f"rank{rank}.json", row)

    def first_error(self) -> dict[str, Any] | None:
        """The earliest error that any rank recorded: later ones are its consequences."""
        rows = [json.loads(p.read_text()) for p in (self.path / "errors").glob("rank*.json")]
        # A rank that lost its peer can notice and write before the culprit has written: consequences come last.
        return min(rows, key=lambda row: (row["kind"] == "peer", row["time"]), default=None)

    def conclude(self, job: Job, exit_reason: str, exit_code: int, facts: dict[str, Any]) -> None:
        """Writes ``result.json``, the run's one flat row, and the final status."""
        code = json.loads((self.path / "code.json").read_text())
        row = {
            "id": job.id,
            "numerics_id": job.numerics_id,
            "name": job.name,
            "exit_reason": exit_reason,
            "exit_code": exit_code,
            "world_size": job.world_size,
            **facts,
            "job": job.to_dict(),
            "code": code,
            "host": {"name": socket.gethostname(), "system": platform.platform(), "cores": os.cpu_count()},
        }
        error = self.first_error() if exit_code else None
        if error is not None:
            row["error"] = {key: error[key] for key in ("kind", "type", "rank", "message")}
        write_result(self.path, row)
        self.set_status(exit_reason, exit_code=exit_code)

    @property
    def is_concluded(self) -> bool:
        """Whether this attempt has left its row."""
        return (self.path / "result.json").is_file()

    def _refuse_if_running(self) -> None:
        status = self.path / "status.json"
        if not status.is_file():
            return
        last = json.loads(status.read_text())
        if last["state"] in ("starting", "running") and last["host"] == socket.gethostname() and _alive(last["pid"]):
            raise UserError(f"{self.path}: this job is already running here (pid {last['pid']})")

    def _put_earlier_attempt_away(self) -> None:
        present = [self.path / name for name in PER_ATTEMPT if (self.path / name).exists()]
        if not present:
            return
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        number = 1 + max((int(p.name) for p in attempts.iterdir() if p.name.isdigit()), default=0)
        target = attempts / str(number)
        target.mkdir()
        for path in present:
            path.rename(target / path.name)


def write_text_atomically(path: Path, text: str) -> None:
    """Writes a text file so that a reader sees the old one or the new one, never a part."""
    from harness.metrics.atomic import write_atomically

    write_atomically(path, text.encode())


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return pid != os.getpid()


_PEER_SIGNS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "connection was closed")


def _kind_of(error: BaseException) -> str:
    """Sorts an exception that is not the harness's own: machine, peer (another rank is gone), or bug."""
    text, name = str(error), type(error).__name__
    if "OutOfMemory" in name or isinstance(error, MemoryError) or "Cannot allocate memory" in text:
        return "out_of_memory"
    if any(sign in text for sign in _PEER_SIGNS):
        return "peer"
    if "DistBackendError" in name or "Timed out" in text or "timeout" in text.lower() and "collective" in text.lower():
        return "collective_timeout"
    if isinstance(error, KeyboardInterrupt):
        return "interrupted"
    return "bug"


def _exit_code_of(kind: str) -> int:
    from harness.errors import EXIT_INTERRUPTED, EXIT_MACHINE

    if kind in ("out_of_memory", "collective_timeout", "peer"):
        return EXIT_MACHINE
    return EXIT_INTERRUPTED if kind == "interrupted" else EXIT_BUG
