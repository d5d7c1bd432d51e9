"""Points as tables: aligned text, Markdown and CSV."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.metrics.window import THROUGHPUT
from harness.run.state import RunState
from harness.sweep.registry import Point, labels
from harness.tables import aligned, markdown, shortened

COLUMNS = ("point", "state", "step", "tokens/s", "tokens/s/rank", "MFU", "memory GiB", "loss", "reason")
LONGEST_REASON = 110


def rows_of(
    points: Sequence[Point], seen: Sequence[RunState], *, full_reasons: bool = False
) -> list[dict[str, str]]:
    """Return one row of text per point; unknown values are empty.

    Args:
        points: the points.
        seen: their states.
        full_reasons: do not shorten reasons.
    """
    names = labels([point.overrides for point in points])
    rows = []
    for name, each in zip(names, seen, strict=True):
        facts = each.facts or {}
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
                "reason": each.about if full_reasons else shortened(each.about, LONGEST_REASON),
            }
        )
    return rows


def table_text(rows: Sequence[dict[str, str]]) -> str:
    """Format a table for the terminal."""
    footnote = f"{THROUGHPUT}\n" if any(row["tokens/s"] for row in rows) else ""
    return aligned(rows, left=("point", "state", "reason"), indent="") + footnote


def table_markdown(rows: Sequence[dict[str, str]]) -> str:
    """Format a table as Markdown."""
    return f"{markdown(COLUMNS, [list(row.values()) for row in rows])}\n\n{THROUGHPUT}.\n"


def write_csv(
    path: Path, points: Sequence[Point], seen: Sequence[RunState], results: Sequence[dict[str, Any]]
) -> None:
    """Write all fields of the results: one row per point, one column per field."""
    names = labels([point.overrides for point in points])
    known = list(dict.fromkeys(key for result in results for key in result))
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["point", "state", "kind", *known])
        for name, each, result in zip(names, seen, results, strict=True):
            # The writer writes None as an empty cell.
            writer.writerow([name, each.state, each.kind, *(result.get(key) for key in known)])


def _number(value: float | None, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""
