"""Numbers, layouts and tables as text."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

MISSING = "–"
NOT_MEASURED = "not measured"
GIB = 2**30


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


def aligned_facts(facts: Sequence[tuple[str, str]]) -> str:
    """Format pairs of name and text as aligned lines."""
    width = max(len(name) for name, _ in facts)
    return "".join(f"{name:<{width}}  {text}\n" for name, text in facts)


def aligned(rows: Sequence[Mapping[str, str]], left: Collection[str] = (), *, indent: str = "  ") -> str:
    """Format a table for the terminal; empty columns are left out.

    Args:
        rows: cells as text, all rows with the same columns.
        left: columns to align left; the others are aligned right.
        indent: text before each line.
    """
    columns = [name for name in rows[0] if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}

    def line(cells: Mapping[str, str]) -> str:
        placed = [cells[c].ljust(widths[c]) if c in left else cells[c].rjust(widths[c]) for c in columns]
        return indent + "  ".join(placed).rstrip() + "\n"

    return line({name: name for name in columns}) + "".join(line(row) for row in rows)


def without_html(text: str) -> str:
    """Return Markdown in which names of runs, fields and files are no HTML; ``a < b`` stays."""
    return re.sub(r"<(?=[A-Za-z/!?])", "&lt;", text)


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> str:
    """Format a table as Markdown; columns with an index in ``right`` are aligned right."""
    marks = ["---:" if index in right else "---" for index in range(len(headings))]
    cells = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join(
        [f"| {' | '.join(headings)} |", f"|{'|'.join(marks)}|", *(f"| {' | '.join(row)} |" for row in cells)]
    )


def formatted(value: Any, form: str = "") -> str:
    """Format a value for a table cell; an unknown value is a dash."""
    if value is None or value == "":
        return MISSING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format(value, form) if form and isinstance(value, int | float) else str(value)


def percent(value: float | None) -> str:
    """Format a fraction as a signed percentage."""
    return formatted(value, "+.1%")
