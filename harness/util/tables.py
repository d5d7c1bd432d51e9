"""Tables of raw values, as text for the terminal and as CSV."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from harness.util.words import MISSING, counted, dollars, figure, formatted, gib, seconds

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """Key in the rows."""
    heading: str
    form: str | Callable[[Any], str] = ""
    """Form of its numbers, which are aligned to the right; empty: text."""


# Functions that are forms, by name.
_FORMS = {form.__name__: form for form in (counted, dollars, figure, gib, seconds)}


def columns_of(table: str) -> list[Column]:
    """Columns of a text with a line for each: key, heading and form, two spaces or more apart.

    A form is a format spec, or the name of a function of ``harness/util/words.py``.
    """
    columns = []
    for line in table.strip().splitlines():
        key, heading, *form = re.split(" {2,}", line.strip())
        name = "".join(form)
        columns.append(Column(key, heading, _FORMS.get(name, name)))
    return columns


@dataclass(frozen=True)
class Table:
    """Columns and rows of raw values; columns that are empty in all rows are left out."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    title: str = ""
    notes: Sequence[str] = ()
    """Paragraphs: between title and table in documents, below it on the terminal."""
    marked: Any = None
    """Value in the first column of the row to highlight."""
    missing: str = MISSING
    """Text of unknown values."""
    bars: Collection[str] = ()
    """Keys of columns of which a page shows the share of the largest value as a bar."""

    @classmethod
    def of_cells(
        cls, headings: Sequence[str], cells: Iterable[Sequence[Any]], right: Collection[int] = ()
    ) -> Table:
        """Make a table of lists; the columns with an index in ``right`` are aligned to the right."""
        # A heading may occur twice.
        keys = [
            name if headings.index(name) == n else f"{name} {n}" for n, name in enumerate(headings)
        ]
        columns = [
            Column(key, name, str if n in right else "")
            for n, (key, name) in enumerate(zip(keys, headings, strict=True))
        ]
        return cls(columns, [dict(zip(keys, row, strict=True)) for row in cells], missing="")

    @property
    def shown(self) -> list[Column]:
        """Columns that have values."""
        filled: set[str] = set()
        for row in self.rows:
            filled |= {key for key, value in row.items() if value not in (None, "")}
        return [column for column in self.columns if column.key in filled or not self.rows]

    def cells(self) -> list[list[str]]:
        """Return the text of all rows, in the shown columns."""
        columns = self.shown
        cells = []
        for row in self.rows:
            cells.append(
                [formatted(row.get(column.key), column.form, self.missing) for column in columns]
            )
        return cells

    def is_marked(self, row: Row) -> bool:
        """Whether a row is highlighted."""
        return self.marked is not None and row.get(self.columns[0].key) == self.marked


def to_text(table: Table, indent: str = "") -> str:
    """Format a table for the terminal, each line after ``indent``; empty without rows."""
    if not table.rows:
        return ""
    columns = table.shown
    lines = [[each.heading for each in columns], *table.cells()]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    text = ""
    for cells in lines:
        placed = [
            cell.rjust(width) if column.form else cell.ljust(width)
            for column, cell, width in zip(columns, cells, widths, strict=True)
        ]
        text += f"{indent}{'  '.join(placed).rstrip()}\n"
    return text + "".join(f"{indent}{note}\n" for note in table.notes)


def to_csv(rows: Sequence[Row], columns: Sequence[Column] = ()) -> str:
    """Format rows as CSV with raw values, under the columns' keys, or under all keys of the rows."""
    keys = [column.key for column in columns] or list(dict.fromkeys(chain.from_iterable(rows)))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for row in rows:
        writer.writerow([row.get(key) for key in keys])  # None is written as an empty cell
    return text.getvalue()


def aligned_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Format pairs of name and text as aligned lines."""
    width = max(len(name) for name, _ in facts)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in facts)
