"""A report as one self-contained HTML file, with styles, a script for sorting, and pictures."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Sequence
from pathlib import Path

from harness.util.document import Report, Section, Table

_STYLE = """
:root { --ink: #1b1f24; --dim: #57606a; --line: #d8dee4; --shade: #f6f8fa; --mark: #fff4e5;
  --paper: #ffffff; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --dim: #9198a1; --line: #3d444d; --shade: #161b22; --mark: #3a2a14;
    --paper: #0d1117; }
  img { background: #ffffff; border-radius: 4px; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); margin: 2rem auto;
  max-width: 76rem; padding: 0 1.5rem; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.2rem; margin-top: 2.5rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin-top: 1.5rem; }
code { font: 0.85em ui-monospace, monospace; background: var(--shade); padding: 0.1em 0.3em;
  border-radius: 3px; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.86rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
th { background: var(--shade); cursor: pointer; user-select: none; vertical-align: bottom; }
th::after { content: ""; display: inline-block; width: 0.9em; }
th[aria-sort=ascending]::after { content: "\\2191"; } th[aria-sort=descending]::after { content: "\\2193"; }
.number { text-align: right; white-space: nowrap; } .marked td { background: var(--mark); font-weight: 600; }
img { max-width: 100%; height: auto; margin: 1rem 0; } nav a { margin-right: 1rem; } a { color: #0072b2; }
footer { color: var(--dim); font-size: 0.85rem; margin: 3rem 0 1rem; }
"""
_SCRIPT = """
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  heads.forEach((head, column) => head.addEventListener("click", () => {
    const down = head.getAttribute("aria-sort") === "ascending";
    heads.forEach(each => each.removeAttribute("aria-sort"));
    head.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = row => row.cells[column].dataset.value;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y, "en", {numeric: true}) : x - y;
      return down ? -order : order;
    };
    body.append(...[...body.rows].sort(compare));
  }));
}
"""


def page(report: Report, folder: Path) -> str:
    """Format the report as an HTML page.

    Args:
        report: the report.
        folder: folder of its pictures.
    """
    links = [
        f'<a href="#{_anchor(each.title)}">{html.escape(each.title)}</a>'
        for each in report.sections
        if each.level == 2
    ]
    body = [
        f"<h1>{html.escape(report.title)}</h1>",
        _text(report.summary),
        f"<nav>{''.join(links)}</nav>" if len(links) > 1 else "",
        *(_section(each, folder) for each in report.sections),
        "<footer>Click on a column's heading to sort by it.</footer>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(report.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + f"\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _section(section: Section, folder: Path) -> str:
    heading, anchor = f"h{section.level}", _anchor(section.title)
    parts = [f'<{heading} id="{anchor}">{html.escape(section.title)}</{heading}>']
    parts.append(_text(section.text))
    if section.table is not None:
        parts.append(_table(section.table))
    if section.picture is not None:
        data = base64.b64encode((folder / section.picture).read_bytes()).decode()
        parts.append(f'<img alt="{html.escape(section.title)}" src="data:image/png;base64,{data}">')
    return "\n".join(part for part in parts if part)


def _anchor(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _text(paragraphs: Sequence[str]) -> str:
    parts: list[str] = []
    for each in paragraphs:
        if not each.startswith("- "):
            parts.append(f"<p>{_inline(each)}</p>")
        elif parts and parts[-1].endswith("</ul>"):
            parts[-1] = f"{parts[-1].removesuffix('</ul>')}<li>{_inline(each[2:])}</li></ul>"
        else:
            parts.append(f"<ul><li>{_inline(each[2:])}</li></ul>")
    return "\n".join(parts)


def _inline(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(text))


def _table(table: Table) -> str:
    columns = table.shown
    heads = "".join(
        f'<th scope="col"{_number(each.is_number)}>{html.escape(each.heading)}</th>' for each in columns
    )
    lines = []
    for row in table.rows:
        marked = ' class="marked"' if table.marked is not None and row.get("point") == table.marked else ""
        cells = ""
        for each in columns:
            value = row.get(each.key)
            sort = "" if value is None else html.escape(str(value))
            cells += f'<td{_number(each.is_number)} data-value="{sort}">{_inline(each.cell(row))}</td>'
        lines.append(f"<tr{marked}>{cells}</tr>")
    return (
        f'<div class="scroll"><table>\n<thead><tr>{heads}</tr></thead>\n<tbody>\n'
        + "\n".join(lines)
        + "\n</tbody>\n</table></div>"
    )


def _number(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
