"""The table of a sweep's points on the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.launch.state import RunState
from harness.launch.sweep.registry import Point, Skipped, command_of, labels
from harness.launch.sweep.study import StudyRecord
from harness.metrics.window import THROUGHPUT
from harness.run.folder import RunFolder
from harness.util.tables import Column, Table, shortened

LONGEST_REASON = 110
_COLUMNS = (
    Column("point", "point"),
    Column("state", "state"),
    Column("step", "step", str),
    Column("tokens_per_second", "tokens/s", ",.0f"),
    Column("tokens_per_second_per_rank", "tokens/s/rank", ",.1f"),
    Column("mfu", "MFU", ".1%"),
    Column("memory_gib", "memory GiB", ".2f"),
    Column("loss", "loss", ".4f"),
)
# Columns of result.json that the table has.
SHOWN = ("loss", "window.tokens_per_second", "tokens_per_second_per_rank", "mfu", "memory_gib")


def table_of_states(
    points: Sequence[Point],
    seen: Sequence[RunState],
    objective: Sequence[str] = (),
    *,
    full_reasons: bool = False,
) -> Table:
    """Return a row per point.

    Args:
        objective: columns of ``result.json`` that a study optimizes, which are shown too.
        full_reasons: do not shorten reasons.
    """
    more = [name for name in objective if name not in SHOWN]
    rows: list[dict[str, Any]] = []
    for name, each in zip(labels([point.overrides for point in points]), seen, strict=True):
        result = RunFolder(each.run_dir).row if more else {}
        reason = each.about if full_reasons else shortened(each.about, LONGEST_REASON)
        row = {"point": name, "state": each.state, "step": f"{each.step}/{each.steps}", "reason": reason}
        rows.append({**(each.facts or {}), **{name: result.get(name) for name in more}, **row})
    notes = [THROUGHPUT] if any(row.get("tokens_per_second") is not None for row in rows) else []
    columns = (*_COLUMNS, *(Column(name, name, ".6g") for name in more), Column("reason", "reason"))
    return Table(columns, rows, notes=notes, missing="")


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
