"""``errors/``: what the ranks and the controller of an attempt say about their failure, and the cause."""

import contextlib
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from harness.config.failures import CONSEQUENCES, describe_failure
from harness.run.result import write_json_atomically
from harness.util.encoding import parse_object

# Required fields of a recorded error, and their types.
_FIELDS = {
    **dict.fromkeys(("kind", "type", "message", "traceback"), str),
    "exit_code": int,
    "rank": int | None,
    "time": int | float,
}


class RunErrors:
    """The errors of the last attempt of a run, one file for each rank and one for the controller."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self._unrecorded: list[dict[str, Any]] = []

    def record(
        self, rank: int | None, error: BaseException, *, step: int | None = None
    ) -> dict[str, Any]:
        """Write ``errors/rank<rank>.json``; without a rank the controller's.

        If it cannot be written, print the error to stderr, so that the writing error does not hide
        it. ``step`` is the last completed one.

        Returns:
            The recorded fields, with the ``kind`` and ``exit_code`` that the process should end
            with.
        """
        row = {
            "time": time.time(),
            "rank": rank,
            "step": step,
            "host": socket.gethostname(),
            **describe_failure(error),
            "traceback": "".join(traceback.format_exception(error)),
        }
        path = self._path(rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomically(path, row)
        except OSError as failure:
            self._unrecorded.append(row)
            text = row["traceback"] if row["kind"] == "bug" else f"error: {row['message']} "
            sys.stderr.write(
                f"{text}(could not be recorded in {path.parent}: {failure.strerror})\n"
            )
        return row

    def replace(self, error: dict[str, Any]) -> None:
        """Replace the recorded error of a rank, e.g. to add fields."""
        path = self._path(error["rank"])
        try:
            write_json_atomically(path, error)
        except OSError as failure:
            sys.stderr.write(f"WARNING {path}: cannot be written: {failure}\n")

    def has(self, rank: int) -> bool:
        """Whether a rank has recorded an error."""
        return self._path(rank).is_file()

    def first(self) -> dict[str, Any] | None:
        """The earliest error that is not a consequence of another rank's, or else the earliest of all."""
        # A rank that lost a peer can write its error before the failing rank does.
        return min(
            self.all(),
            key=lambda row: (CONSEQUENCES.get(row["kind"], 0), row["time"]),
            default=None,
        )

    def all(self) -> list[dict[str, Any]]:
        """All errors of the attempt."""
        rows = list(self._unrecorded)
        for path in (self.run_dir / "errors").glob("*.json"):
            # Skip unreadable files: they must not hide the other errors.
            with contextlib.suppress(OSError, ValueError):
                row = parse_object(path.read_bytes())
                if all(isinstance(row.get(name), kind) for name, kind in _FIELDS.items()):
                    rows.append({"rank": None, **row})
        return rows

    def _path(self, rank: int | None) -> Path:
        return self.run_dir / "errors" / ("controller.json" if rank is None else f"rank{rank}.json")
