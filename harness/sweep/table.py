"""Points as tables: aligned text, Markdown and CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.metrics.window import THROUGHPUT
from harness.sweep.registry import labels
from harness.sweep.state import PointState

COLUMNS = ("point", "state", "step", "tokens/s", "tokens/s/rank", "MFU", "memory GiB", "loss", "reason")
LONGEST_REASON = 110


def rows_of(seen: Sequence[PointState], *, full_reasons: bool = False) -> list[dict[str, str]]:
    """Return one row of text per point; unknown values are empty.

    Args:
        seen: states of the points.
        full_reasons: do not shorten reasons.
    """
    names = labels([each.point.overrides for each in seen])
    rows = []
    for name, each in zip(names, seen, strict=True):
        facts = each.facts or {}
        reason = each.about
        if not full_reasons and len(reason) > LONGEST_REASON:
            reason = reason[: LONGEST_REASON - 1] + "…"
        rows.append(
            {
                "point": name,
                "state": each.state,
                "step": f"{each.step}/{each.steps}",
                "tokens/s": _number(facts.get("tokens_per_second"), ",.0f"),
                "tokens/s/rank": _number(facts.get("tokens_per_second_per_rank"), ",.1f"),
                "MFU": _number(facts.get("mfu"), ".1%"),
                "memory GiB": _number(facts.get("memory_gib"), ".2f"),
                "loss": _number(facts.get("loss"), ".4f"),
                "reason": reason,
            }
        )
    return rows


def aligned(rows: Sequence[dict[str, str]]) -> str:
    """Format a table for the terminal, without columns that are empty in all rows."""
    columns = [name for name in COLUMNS if any(row[name] for row in rows)]
    widths = {name: max(len(name), *(len(row[name]) for row in rows)) for name in columns}
    numbers = {name for name in columns if name not in ("point", "state", "reason")}

    def line(values: dict[str, str]) -> str:
        cells = [
            values[name].rjust(widths[name]) if name in numbers else values[name].ljust(widths[name])
            for name in columns
        ]
        return "  ".join(cells).rstrip() + "\n"

    footnote = f"{THROUGHPUT}\n" if "tokens/s" in columns else ""
    return line({name: name for name in columns}) + "".join(line(row) for row in rows) + footnote


def markdown(rows: Sequence[dict[str, str]]) -> str:
    """Format a table as Markdown."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(row[name].replace('|', chr(92) + '|') for name in COLUMNS)} |" for row in rows]
    return "\n".join([*lines, "", f"{THROUGHPUT}."]) + "\n"


def write_csv(path: Path, seen: Sequence[PointState], results: Sequence[dict[str, Any]]) -> None:
    """Write all fields of the results: one row per point, one column per field."""
    names = labels([each.point.overrides for each in seen])
    known = list(dict.fromkeys(key for result in results for key in result))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "state", "kind", *known])
        for name, each, result in zip(names, seen, results, strict=True):
            writer.writerow([name, each.state, each.kind or "", *(_plain(result.get(key)) for key in known)])


def _number(value: float | None, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""


def _plain(value: Any) -> Any:
    return "" if value is None else value
