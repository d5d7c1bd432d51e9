"""Documents of paragraphs, tables and figures, as Markdown and HTML.

Cells keep raw values until they are written: files of numbers get the values themselves, and only
the others get formatted text.
"""

import base64
import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.util.files import write_atomically
from harness.util.tables import Column, Row, Table, to_csv


@dataclass(frozen=True)
class Figure:
    """A picture in a document, by its path relative to the document."""

    path: str
    alt: str


@dataclass(frozen=True)
class Markup:
    """A part of a page as HTML, in which all names are escaped, with a text for Markdown."""

    html: str
    text: str


Block = str | Table | Figure | Markup
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


def to_markdown(*blocks: Block) -> str:
    """Format blocks as Markdown in which names of runs, fields and files are no HTML; ``a < b`` stays."""
    parts: list[str] = []
    for each in blocks:
        if isinstance(each, str):
            parts.append(each)
        elif isinstance(each, Figure):
            parts.append(f"![{each.alt}]({each.path})")
        elif isinstance(each, Markup):
            parts.append(each.text)
        else:
            parts += [f"## {each.title}" if each.title else "", *each.notes, _grid(each)]
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", "\n\n".join(part for part in parts if part) + "\n")


def _grid(table: Table) -> str:
    columns = table.shown
    lines = [
        [each.heading for each in columns],
        ["---:" if each.form else "---" for each in columns],
    ]
    for row, texts in zip(table.rows, table.cells(), strict=True):
        cells = [text.replace("|", "\\|").replace("\n", " ") for text in texts]
        lines.append([f"**{cells[0]}**", *cells[1:]] if table.is_marked(row) else cells)
    rows = [f"| {' | '.join(line)} |" for line in lines]
    return "\n".join([rows[0], f"|{'|'.join(lines[1])}|", *rows[2:]])


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
td:first-child, td:last-child {{ min-width: 7rem; }}
td[style] {{ background: linear-gradient(#2f93cf 0 0) no-repeat 0 100% / var(--share) 3px; }}
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
        elif isinstance(each, Markup):
            parts.append(each.html)
        else:
            parts += [
                _paragraph(f"## {each.title}") if each.title else "",
                *map(_paragraph, each.notes),
            ]
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
    heads = [
        f"<th{kind}>{html.escape(each.heading)}</th>"
        for each, kind in zip(columns, kinds, strict=True)
    ]
    lines = [f"<thead><tr>{''.join(heads)}</tr></thead>\n<tbody>"]
    largest = {}
    for column in columns:
        if column.key in table.bars:
            largest[column.key] = max((row.get(column.key) or 0 for row in table.rows), default=0)
    for row, texts in zip(table.rows, table.cells(), strict=True):
        cells = ""
        for column, kind, text in zip(columns, kinds, texts, strict=True):
            value = row.get(column.key)
            bar = ""
            if column.key in table.bars and value:
                bar = f' style="--share: {value / largest[column.key]:.0%}"'
            data = "" if value is None else html.escape(str(value))
            cells += f'<td{kind}{bar} data-value="{data}">{_code(text)}</td>'
        lines.append(
            f'<tr class="marked">{cells}</tr>' if table.is_marked(row) else f"<tr>{cells}</tr>"
        )
    return '<div class="scroll"><table>\n' + "\n".join(lines) + "\n</tbody></table></div>"
