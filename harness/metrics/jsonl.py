"""``metrics.jsonl``: one JSON object a line, appended row by row; the truth that every view is a view of."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Any

from harness.errors import UserError
from harness.metrics.atomic import write_atomically
from harness.metrics.encoding import dumps, loads

Row = dict[str, Any]


class MetricsFile:
    """The rows of a run, kept through crashes and resumes.

    Opening repairs what a crash in mid-write left: a broken last line is cut off, a whole one that only lacks
    its newline gets it. Each row is handed to the operating system when it is written.

    Args:
        path: the file; it is created with its folder if missing.

    Raises:
        OSError: the file cannot be created, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_tail(path)
        self._file = path.open("ab")

    def write(self, row: Row) -> None:
        """Appends one row.

        Raises:
            TypeError: a value has no form in JSON; nothing is written.
            OSError: the disk is full or gone.
        """
        self._file.write(dumps(row).encode() + b"\n")
        self._file.flush()

    def truncate_after(self, step: int) -> int:
        """Drops the rows of later steps: a run that resumes from ``step`` will write them again.

        Returns:
            how many rows were dropped.
        """
        rows = read_metrics(self.path)
        kept = [row for row in rows if row.get("step", 0) <= step]
        if len(kept) < len(rows):
            self._file.close()
            write_atomically(self.path, b"".join(dumps(row).encode() + b"\n" for row in kept))
            self._file = self.path.open("ab")
        return len(rows) - len(kept)

    def close(self) -> None:
        """Closes the file; no row can be written afterwards."""
        self._file.close()

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[Row]:
    """All rows in the order they were written, non-finite floats as floats.

    A broken last line is left out: the run may be writing it right now, or died while it did.

    Raises:
        OSError: the file is missing or cannot be read.
        UserError: a line before the last one is not a JSON object, so the file was damaged by something else.
    """
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows: list[Row] = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise UserError(f"{path}: line {number} is not a JSON object; remove it to use the file")
    return rows


def _row(line: bytes) -> Row | None:
    """The row that ``line`` holds, or None if the line is broken."""
    try:
        row = loads(line.decode())
    except ValueError:  # of JSON or of UTF-8, whose error is a ValueError too
        return None
    return row if isinstance(row, dict) else None


def _repair_tail(path: Path) -> None:
    """Makes the file end with a whole row and its newline."""
    content = path.read_bytes() if path.exists() else b""
    end = content.rfind(b"\n", 0, len(content) - 1) + 1 if content else 0
    last = content[end:]
    if not last:
        return
    if _row(last.rstrip(b"\n")) is None:
        with path.open("rb+") as file:
            file.truncate(end)
    elif not last.endswith(b"\n"):
        with path.open("ab") as file:
            file.write(b"\n")
