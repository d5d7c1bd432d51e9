"""Points as tables: aligned text, Markdown and CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.launch.state import RunState
from harness.launch.sweep.registry import Point, Skipped, command_of, labels
from harness.launch.sweep.study import StudyRecord
from harness.metrics.window import THROUGHPUT
from harness.run.folder import RunFolder
from harness.util.tables import aligned, markdown, shortened

COLUMNS = ("point", "state", "step", "tokens/s", "tokens/s/rank", "MFU", "memory GiB", "loss", "reason")
LONGEST_REASON = 110
# Columns of result.json that COLUMNS has under another name.
SHOWN = ("loss", "window.tokens_per_second", "tokens_per_second_per_rank", "mfu", "memory_gib")


def rows_of(
    points: Sequence[Point],
    seen: Sequence[RunState],
    objective: Sequence[str] = (),
    *,
    full_reasons: bool = False,
) -> list[dict[str, str]]:
    """Return one row of text per point; unknown values are empty.

    Args:
        points: the points.
        seen: their states.
        objective: columns of ``result.json`` that a study optimizes, which are shown too.
        full_reasons: do not shorten reasons.
    """
    names = labels([point.overrides for point in points])
    rows = []
    for name, each in zip(names, seen, strict=True):
        facts = each.facts or {}
        row = RunFolder(each.run_dir).row if set(objective) - set(SHOWN) else {}
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
                **{name: _number(row.get(name), ".6g") for name in objective if name not in SHOWN},
                "reason": each.about if full_reasons else shortened(each.about, LONGEST_REASON),
            }
        )
    return rows


def table_text(rows: Sequence[dict[str, str]]) -> str:
    """Format a table for the terminal; empty without rows."""
    if not rows:
        return ""
    footnote = f"{THROUGHPUT}\n" if any(row["tokens/s"] for row in rows) else ""
    return aligned(rows, left=("point", "state", "reason"), indent="") + footnote


def table_markdown(rows: Sequence[dict[str, str]]) -> str:
    """Format a table as Markdown."""
    columns = rows[0] if rows else COLUMNS
    return f"{markdown(list(columns), [list(row.values()) for row in rows])}\n\n{THROUGHPUT}.\n"


def counted(seen: Sequence[RunState], skipped: Sequence[Skipped]) -> str:
    """Count the points by state, in a line."""
    counts = Counter([*(each.state for each in seen), *(["skipped"] * len(skipped))])
    return f"{', '.join(f'{count} {state}' for state, count in counts.items())}\n"


def best_in_words(record: StudyRecord, points: Sequence[Point]) -> str:
    """Return the best points of a study, each with its value and its command; empty if none completed."""
    names = labels([point.overrides for point in points])
    best = record.best_of(points)
    lines = []
    for point, name in zip(points, names, strict=True):
        if point in best:
            value = record.format(record.values(RunFolder(point.run_dir).row))
            lines.append(f"best ({record.describe()}): {name}: {value}\n")
            lines.append(f"  {command_of(point.overrides)}\n")
    return "".join(lines)


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
