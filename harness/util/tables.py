"""Numbers as text, and tables and documents as text, Markdown, CSV and HTML.

A document is a list of blocks: paragraphs, tables and figures. Cells keep raw values until they are written:
files of numbers get the values themselves, and only the others get formatted text.
"""

from __future__ import annotations

import base64
import csv
import html
import io
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.util.files import write_atomically

MISSING = "–"
NOT_MEASURED = "not measured"
GIB = 2**30
Row = Mapping[str, Any]


def seconds(value: float | None) -> str:
    """Format a time with three digits; empty if unknown, ``-`` if zero."""
    if value is None:
        return ""
    if value == 0:
        return "-"
    # A value that would round to 1000 of a unit is shown as 1 of the next.
    unit, size = next(((u, s) for u, s in (("s", 1.0), ("ms", 1e-3)) if value >= 0.9995 * s), ("us", 1e-6))
    amount = value / size
    digits = 0 if amount >= 99.95 else 1 if amount >= 9.995 else 2
    return f"{amount:,.{digits}f} {unit}"


def counted(value: float) -> str:
    """Format a count: ``405.9 B``, ``999``."""
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if value >= size:
            return f"{value / size:.4g} {unit}"
    return f"{value:,.0f}"


def plural(count: int, noun: str) -> str:
    """Format a number of things: ``1 row``, ``2 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def gib(value: float) -> str:
    """Format bytes in GiB with two decimals; zero is ``-``."""
    return "-" if value == 0 else f"{value / GIB:,.2f}" if value >= 0.005 * GIB else f"{value / GIB:.1g}"


def figure(value: float) -> str:
    """Format a rate or an amount: an integer from 100 on, three digits below."""
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.3g}"


def dollars(value: float) -> str:
    """Format a price: ``$1,048``; with cents below 100."""
    return f"${value:,.0f}" if value >= 99.995 else f"${value:.2f}"


def summed(values: Iterable[float | None]) -> float | None:
    """Add up values; None if one is unknown."""
    known = list(values)
    return None if None in known else sum(value for value in known if value is not None)


def shortened(text: str, length: int) -> str:
    """Cut a text to ``length`` characters; the last one shows that it was cut."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def formatted(value: Any, form: str | Callable[[Any], str] = "", missing: str = MISSING) -> str:
    """Format a value for a cell. A form is a format spec, or a function of the value."""
    if value is None or value == "":
        return missing
    if callable(form):
        return form(value)
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form) if form and isinstance(value, int | float) else str(value)


@dataclass(frozen=True)
class Column:
    """One column of a table."""

    key: str
    """Key in the rows."""
    heading: str
    form: str | Callable[[Any], str] = ""
    """Form of its numbers, which are aligned to the right; empty: text."""


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

    @classmethod
    def of_cells(
        cls, headings: Sequence[str], cells: Iterable[Sequence[Any]], right: Collection[int] = ()
    ) -> Table:
        """Make a table of lists; the columns with an index in ``right`` are aligned to the right."""
        # A heading may occur twice.
        keys = [name if headings.index(name) == n else f"{name} {n}" for n, name in enumerate(headings)]
        columns = [
            Column(key, name, str if n in right else "")
            for n, (key, name) in enumerate(zip(keys, headings, strict=True))
        ]
        return cls(columns, [dict(zip(keys, row, strict=True)) for row in cells], missing="")

    @property
    def shown(self) -> list[Column]:
        """Columns that have values."""
        filled = {key for row in self.rows for key, value in row.items() if value not in (None, "")}
        return [each for each in self.columns if each.key in filled] if self.rows else list(self.columns)

    def cells(self) -> list[list[str]]:
        """Return the text of all rows, in the shown columns."""
        columns = self.shown
        return [[formatted(row.get(c.key), c.form, self.missing) for c in columns] for row in self.rows]

    def is_marked(self, row: Row) -> bool:
        """Whether a row is highlighted."""
        return self.marked is not None and row.get(self.columns[0].key) == self.marked


@dataclass(frozen=True)
class Figure:
    """A picture in a document, by its path relative to the document."""

    path: str
    alt: str


Block = str | Table | Figure
"""A part of a document. A text is a paragraph, a list if it begins with ``- ``, a heading if with ``## ``;
words in backticks are code."""


@dataclass(frozen=True)
class Document:
    """A title, a summary that is also printed on the terminal, blocks, and the numbers behind them."""

    title: str
    summary: Sequence[str]
    blocks: Sequence[Block]
    rows: Sequence[Row]
    columns: Sequence[Column] = ()
    """Columns of the CSV file; empty: all keys of the rows."""

    def write(self, folder: Path, markdown: str, table: str, page: str) -> list[str]:
        """Write Markdown, CSV and HTML under these names; return the paths, with those of its pictures."""
        blocks = ["\n".join(f"- {line}" for line in self.summary), *self.blocks]
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / markdown, to_markdown(f"# {self.title}", *blocks).encode())
        write_atomically(folder / table, to_csv(self.rows, self.columns).encode())
        write_atomically(folder / page, to_html(self.title, blocks, folder).encode())
        pictures = [each.path for each in self.blocks if isinstance(each, Figure)]
        return [str(folder / name) for name in (markdown, table, page, *pictures)]


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


def to_markdown(*blocks: Block) -> str:
    """Format blocks as Markdown in which names of runs, fields and files are no HTML; ``a < b`` stays."""
    parts: list[str] = []
    for each in blocks:
        if isinstance(each, str):
            parts.append(each)
        elif isinstance(each, Figure):
            parts.append(f"![{each.alt}]({each.path})")
        else:
            parts += [f"## {each.title}" if each.title else "", *each.notes, _grid(each)]
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", "\n\n".join(part for part in parts if part) + "\n")


def _grid(table: Table) -> str:
    columns = table.shown
    lines = [[each.heading for each in columns], ["---:" if each.form else "---" for each in columns]]
    for row, texts in zip(table.rows, table.cells(), strict=True):
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in texts]
        lines.append([f"**{cells[0]}**", *cells[1:]] if table.is_marked(row) else cells)
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], f"|{'|'.join(lines[1])}|", *rows[2:]])


def to_csv(rows: Sequence[Row], columns: Sequence[Column] = ()) -> str:
    """Format rows as CSV with raw values, under the columns' keys, or under all keys of the rows."""
    keys = [each.key for each in columns] or list(dict.fromkeys(key for row in rows for key in row))
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(keys)
    writer.writerows([row.get(key) for key in keys] for row in rows)  # None is written as an empty cell
    return text.getvalue()


_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 76rem; padding: 0 1.5rem; }}
h2 {{ margin-top: 2.5rem; border-bottom: 1px solid #8888; }}
code {{ font: 0.85em ui-monospace, monospace; overflow-wrap: anywhere; }}
.scroll {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 0.3rem 0.7rem; text-align: left; vertical-align: top; border-bottom: 1px solid #8884; }}
th {{ cursor: pointer; }}
.number {{ text-align: right; white-space: nowrap; }}
.marked {{ font-weight: 600; background: #ffaa0022; }}
img {{ max-width: 100%; min-width: 40rem; margin: 1rem 0; border-radius: 4px; background: #fff; }}
@media (prefers-color-scheme: dark) {{ img {{ filter: invert(0.93) hue-rotate(180deg); }} }}
</style>
</head>
<body>
{body}
<script>
for (const head of document.querySelectorAll("th")) head.addEventListener("click", () => {{
  const body = head.closest("table").tBodies[0], column = head.cellIndex, down = head.dataset.down ^= 1;
  const value = row => row.cells[column].dataset.value;
  const compare = (a, b) => {{
    const [x, y] = [value(a), value(b)];
    if (x === "" || y === "") return (x === "") - (y === "");
    const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", {{numeric: true}}) : x - y;
    return down ? order : -order;
  }};
  body.append(...[...body.rows].sort(compare));
}});
</script>
</body>
</html>
"""


def to_html(title: str, blocks: Sequence[Block], folder: Path) -> str:
    """Format blocks as a page that fetches nothing; a click on a heading of a column sorts by its values.

    Args:
        folder: folder of the pictures, which become part of the page.
    """
    parts = [f"<h1>{html.escape(title)}</h1>"]
    for each in blocks:
        if isinstance(each, str):
            parts.append(_paragraph(each))
        elif isinstance(each, Figure):
            data = base64.b64encode((folder / each.path).read_bytes()).decode()
            image = f'<img alt="{html.escape(each.alt)}" src="data:image/png;base64,{data}">'
            parts.append(f'<div class="scroll">{image}</div>')
        else:
            parts += [_paragraph(f"## {each.title}") if each.title else "", *map(_paragraph, each.notes)]
            parts.append(_html_table(each))
    return _PAGE.format(title=html.escape(title), body="\n".join(part for part in parts if part))


def _paragraph(text: str) -> str:
    if text.startswith("## "):
        return f"<h2>{html.escape(text[3:])}</h2>"
    if text.startswith("- "):
        return f"<ul>{''.join(f'<li>{_code(line[2:])}</li>' for line in text.splitlines())}</ul>"
    return f"<p>{_code(text)}</p>" if text else ""


def _code(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _html_table(table: Table) -> str:
    columns = table.shown
    kinds = [' class="number"' if each.form else "" for each in columns]
    heads = [f"<th{kind}>{html.escape(each.heading)}</th>" for each, kind in zip(columns, kinds, strict=True)]
    lines = [f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"]
    for row, texts in zip(table.rows, table.cells(), strict=True):
        values = ["" if (value := row.get(each.key)) is None else value for each in columns]
        cells = "".join(
            f'<td{kind} data-value="{html.escape(str(value))}">{_code(cell)}</td>'
            for kind, value, cell in zip(kinds, values, texts, strict=True)
        )
        lines.append(f'<tr class="marked">{cells}</tr>' if table.is_marked(row) else f"<tr>{cells}</tr>")
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</tbody></table></div>"


def aligned_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Format pairs of name and text as aligned lines."""
    width = max(len(name) for name, _ in facts)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in facts)


def aligned(rows: Sequence[Mapping[str, str]], left: Collection[str] = (), *, indent: str = "  ") -> str:
    """Format cells of text for the terminal: equal columns in all rows, those in ``left`` to the left."""
    columns = [Column(name, name, "" if name in left else str) for name in rows[0]]
    return to_text(Table(columns, rows, missing=""), indent)
