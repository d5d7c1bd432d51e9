"""``errors/`` of a run folder: one file per process that failed, of which the earliest is the cause."""

from __future__ import annotations

import contextlib
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from harness.config.failures import CONSEQUENCES, describe_failure
from harness.metrics.result import write_json_atomically
from harness.run.status import RunStatus
from harness.util.encoding import parse_object

LOG_LINES_SHOWN = 8
# Required fields of a recorded error, and their types.
_FIELDS = {
    **dict.fromkeys(("kind", "type", "message", "traceback"), str),
    "exit_code": int,
    "rank": int | None,
    "time": int | float,
}


class RunErrors(RunStatus):
    """The errors of a run's last attempt."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._unrecorded: list[dict[str, Any]] = []

    def record_error(
        self, rank: int | None, error: BaseException, *, step: int | None = None
    ) -> dict[str, Any]:
        """Write ``errors/rank<rank>.json``.

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


def last_lines(log: Path) -> str:
    """Return the end of a log, formatted to follow a message; empty if there is no log."""
    try:
        tail = log.read_text(errors="replace").splitlines()[-LOG_LINES_SHOWN:]
    except OSError:
        return ""
    return "".join(f"\n  {line}" for line in ["last lines of its log:", *tail]) if tail else ""
