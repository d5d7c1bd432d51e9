"""A report as data: sections of text, a table, a picture; with output as Markdown and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from harness.util import tables
from harness.util.tables import formatted

Row = dict[str, Any]


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """Key in the rows."""
    heading: str
    form: str = ""
    """Format spec of numbers; empty shows the value unchanged."""

    def cell(self, row: Row) -> str:
        """Return the formatted value of a row."""
        return formatted(row.get(self.key), self.form)

    @property
    def is_number(self) -> bool:
        """Whether it has numbers, which are aligned to the right."""
        return bool(self.form)


@dataclass(frozen=True)
class Table:
    """Columns and rows; columns that are empty in all rows are left out."""

    columns: Sequence[Column]
    rows: Sequence[Row]
    marked: str | None = None
    """Value of ``point`` of the row to highlight."""

    @property
    def shown(self) -> list[Column]:
        """Columns that have values."""
        filled = {key for row in self.rows for key, value in row.items() if value not in (None, "")}
        return [each for each in self.columns if each.key in filled]


@dataclass(frozen=True)
class Section:
    """A heading and its content; all parts are optional."""

    title: str
    text: Sequence[str] = ()
    """Paragraphs. Those that begin with ``- `` are list items; words in backticks are code."""
    table: Table | None = None
    picture: str | None = None
    """Name of an image file in the report's folder."""
    level: int = 2
    """Heading level: 2, or 3 for a subsection."""


@dataclass(frozen=True)
class Report:
    """A complete report."""

    title: str
    sections: list[Section] = field(default_factory=list)
    summary: Sequence[str] = ()
    """Lines below the title, also printed on the terminal."""
    rows: Sequence[Row] = ()
    """Rows of ``table.csv``."""
    csv_columns: Sequence[Column] = ()
    """Columns of ``table.csv``; empty means all keys of the rows."""


def markdown(report: Report) -> str:
    """Format the report as Markdown without HTML; pictures are linked."""
    blocks = [f"# {report.title}", _paragraphs(report.summary)]
    for section in report.sections:
        blocks += [f"{'#' * section.level} {section.title}", _paragraphs(section.text)]
        blocks += [table_markdown(section.table)] if section.table is not None else []
        blocks += [f"![{section.title}]({section.picture})"] if section.picture is not None else []
    return tables.without_html("\n\n".join(block for block in blocks if block) + "\n")


def _paragraphs(text: Sequence[str]) -> str:
    joined = ""
    for number, each in enumerate(text):
        in_list = number > 0 and each.startswith("- ") and text[number - 1].startswith("- ")
        joined += ("\n" if in_list else "\n\n") * (number > 0) + each
    return joined


def table_markdown(table: Table) -> str:
    """Format a table as Markdown."""
    columns, rows = table.shown, []
    for row in table.rows:
        cells = [each.cell(row) for each in columns]
        if table.marked is not None and row.get("point") == table.marked:
            cells[0] = f"**{cells[0]}**"
        rows.append(cells)
    right = [index for index, each in enumerate(columns) if each.is_number]
    return tables.markdown([each.heading for each in columns], rows, right)


def as_csv(report: Report) -> str:
    """Format all rows as CSV, with unformatted values."""
    keys = [each.key for each in report.csv_columns]
    keys = keys or list(dict.fromkeys(key for row in report.rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    for row in report.rows:
        writer.writerow(["" if row.get(key) is None else row[key] for key in keys])
    return text.getvalue()
