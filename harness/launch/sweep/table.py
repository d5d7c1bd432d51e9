"""The table of a sweep's points on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from harness.launch.state import RunState
from harness.launch.sweep.registry import Point, Skipped, command_of, labels
from harness.launch.sweep.study import StudyRecord
from harness.metrics.window import THROUGHPUT
from harness.run.folder import RunFolder
from harness.util.tables import Table, shortened, to_text

LONGEST_REASON = 110
# Columns of result.json that the table has under another name.
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
    right = [number for number, name in enumerate(rows[0]) if name not in ("point", "state", "reason")]
    notes = [THROUGHPUT] if any(row["tokens/s"] for row in rows) else []
    table = Table.of_cells(list(rows[0]), [list(row.values()) for row in rows], right)
    return to_text(replace(table, notes=notes))


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


def _number(value: float | None, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else ""
