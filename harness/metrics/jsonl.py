"""``metrics.jsonl``: one JSON object a line, appended row by row; the truth that every view is a view of."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.errors import UserError
from harness.metrics.atomic import write_atomically
from harness.metrics.encoding import dumps, loads

Row = dict[str, Any]
_SHOWN = 5


class MetricsFile:
    """The rows of a run, kept through crashes and resumes.

    Opening repairs what a crash in mid-write left: a broken last line is cut off, a whole one that only lacks
    its newline gets it. Each row is handed to the operating system when it is written. A file that is deleted
    meanwhile is written again.

    Args:
        path: the file; it is created with its folder if missing.

    Attributes:
        notes: warnings about the file for the user, one line each; the caller removes those it has shown.

    Raises:
        OSError: the file cannot be created, read or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        _repair_tail(path)
        self._file = path.open("a+b")

    def write(self, row: Row) -> None:
        """Appends one row.

        Raises:
            TypeError: a value has no form in JSON; nothing is written.
            OSError: the disk is full or gone.
        """
        line = dumps(row).encode() + b"\n"
        self._restore_if_deleted()
        self._file.write(line)
        self._file.flush()

    def truncate_after(self, step: int) -> int:
        """Drops the rows of later steps: a run that resumes from ``step`` will write them again.

        Lines that are damaged are dropped too, and noted; a copy of the file as it was found is kept.

        Returns:
            how many rows were dropped.
        """
        rows, damaged = read_rows(self.path)
        kept = [row for row in rows if _step(row) <= step]
        if damaged:
            copy = _free_name(self.path)
            shutil.copy2(self.path, copy)
            self.notes.append(f"{_in_words(self.path, damaged)}; {copy.name} is the file as it was found")
        if damaged or len(kept) < len(rows):
            self._file.close()
            write_atomically(self.path, b"".join(dumps(row).encode() + b"\n" for row in kept))
            self._file = self.path.open("a+b")
        return len(rows) - len(kept)

    def expect_rows_up_to(self, step: int, interval: int) -> None:
        """Notes that rows are missing, where the last one is further from ``step`` than rows are apart.

        Args:
            step: the last step that the run has finished.
            interval: how many steps rows are apart; those of an earlier attempt may be further.
        """
        steps = sorted({_step(row) for row in read_rows(self.path)[0] if "loss" in row} | {0})
        apart = max((later - earlier for earlier, later in itertools.pairwise(steps[1:])), default=0)
        last_due = step - step % max(interval, apart)
        if steps[-1] < max(last_due, min(step, 1)):
            self.notes.append(
                f"WARNING {self.path}: the rows of steps {steps[-1] + 1} to {step} are missing; "
                "the curve has a gap there"
            )

    def close(self) -> None:
        """Closes the file; no row can be written afterwards. Damage done to it meanwhile is noted."""
        if self._file.closed:
            return
        try:
            self._restore_if_deleted()
            damaged = read_rows(self.path)[1]
            if damaged:
                self.notes.append(_in_words(self.path, damaged))
        finally:
            self._file.close()

    def _restore_if_deleted(self) -> None:
        """Writes the file again if it is gone; its content is there as long as it is open."""
        if self.path.exists():
            return
        self._file.seek(0)
        content = self._file.read()
        self._file.close()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, content)
        self._file = self.path.open("a+b")
        self.notes.append(f"WARNING {self.path} was deleted while the run wrote it, and is written again")

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
    rows, damaged = read_rows(path)
    if damaged:
        raise UserError(f"{path}: line {damaged[0][0]} is not a JSON object; remove it to use the file")
    return rows


def read_rows(path: Path) -> tuple[list[Row], list[tuple[int, int]]]:
    """The rows of a file that may be damaged.

    Returns:
        the rows, and for each damaged line before the last one its number and the step of the row before it.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows: list[Row] = []
    damaged: list[tuple[int, int]] = []
    for number, line in enumerate(lines, start=1):
        row = _row(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            damaged.append((number, _step(rows[-1]) if rows else 0))
    return rows, damaged


def _step(row: Row) -> int:
    """The step of a row; 0 where it says none."""
    step = row.get("step", 0)
    return step if isinstance(step, int) else 0


def _in_words(path: Path, damaged: list[tuple[int, int]]) -> str:
    lines = ", ".join(str(number) for number, _ in damaged[:_SHOWN]) + (", ..." if damaged[_SHOWN:] else "")
    steps = ", ".join(str(step) for step in list(dict.fromkeys(step for _, step in damaged))[:_SHOWN])
    what = "line is" if len(damaged) == 1 else "lines are"
    return f"WARNING {path}: {len(damaged)} {what} damaged ({lines}); the curve has a gap after step {steps}"


def _free_name(path: Path) -> Path:
    """A name beside a file that is not taken."""
    names = (path.with_name(f"{path.stem}.damaged-{number}{path.suffix}") for number in itertools.count(1))
    return next(name for name in names if not name.exists())


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
