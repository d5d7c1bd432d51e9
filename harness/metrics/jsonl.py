"""``metrics.jsonl``: one JSON object per line, appended row by row; the primary record of a run."""

from pathlib import Path
from typing import Any

from harness.util.encoding import dumps, loads
from harness.util.errors import UserError
from harness.util.files import write_atomically

Row = dict[str, Any]
_SHOWN = 5


class MetricsFile:
    """The rows of a run, kept through crashes and resumes.

    Opening repairs a file that a crash left in mid-write: a broken last line is cut off, and a
    complete last line gets its missing newline. Each row is flushed to the operating system.

    Attributes:
        notes: warnings for the user, one line each; the caller removes those it has shown.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        repair_tail(path)
        self._file = path.open("a+b")

    def write(self, row: Row) -> None:
        """Append one row."""
        self._file.write(dumps(row).encode() + b"\n")
        self._file.flush()

    def truncate_after(self, step: int) -> None:
        """Drop the rows of later steps: a run that resumes from ``step`` will write them again.

        Damaged lines are dropped too, with a note, after the file was added to a copy.
        """
        rows, damaged = read_rows(self.path)
        kept = [row for row in rows if row.get("step", 0) <= step]
        if damaged:
            copy = self.path.with_suffix(".damaged.jsonl")
            with copy.open("ab") as file:  # after that of an earlier start
                file.write(self.path.read_bytes())
            self.notes.append(f"{_gaps(self.path, damaged)}; {copy.name} has the file as it was")
        if damaged or len(kept) < len(rows):
            self._file.close()
            write_atomically(self.path, b"".join(dumps(row).encode() + b"\n" for row in kept))
            self._file = self.path.open("a+b")

    def close(self) -> None:
        """Close the file; add a note if it is gone, or lines in it are damaged."""
        if self._file.closed:
            return
        self._file.close()
        if not self.path.exists():
            self.notes.append(f"WARNING {self.path} was deleted while the run wrote it")
        elif damaged := read_rows(self.path)[1]:
            self.notes.append(_gaps(self.path, damaged))


def read_metrics(path: Path) -> list[Row]:
    """Return all rows in the order they were written, non-finite floats as floats.

    A broken last line is left out: the run may be writing it, or died while writing it.

    Raises:
        OSError: the file is missing or cannot be read.
        UserError: a line before the last one is not a JSON object, so the file is damaged.
    """
    rows, damaged = read_rows(path)
    if damaged:
        raise UserError(
            f"{path}: line {damaged[0]} is not a JSON object; remove it to use the file"
        )
    return rows


def read_rows(path: Path) -> tuple[list[Row], list[int]]:
    """Return the rows of a file, and the numbers of damaged lines before the last one."""
    lines = path.read_bytes().split(b"\n")
    if lines[-1] == b"":
        lines.pop()
    rows = [_row(line) for line in lines]
    damaged = [number for number, row in enumerate(rows[:-1], start=1) if row is None]
    return [row for row in rows if row is not None], damaged


def _gaps(path: Path, damaged: list[int]) -> str:
    return f"WARNING {path}: damaged, the curve has a gap at line {', '.join(map(str, damaged[:_SHOWN]))}"


def _row(line: bytes) -> Row | None:
    try:
        row = loads(line.decode())
    except ValueError:  # not JSON, or not UTF-8
        return None
    return row if isinstance(row, dict) else None


def repair_tail(path: Path) -> None:
    """Make the file end with a complete row and a newline."""
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
