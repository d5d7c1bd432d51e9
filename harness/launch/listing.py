"""The list of runs: a row for each, with its state. ``harness runs`` and the end of a sweep show it."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from harness.launch.state import RunState
from harness.launch.sweep.folder import Point, Skipped, names_of
from harness.metrics.window import THROUGHPUT
from harness.run.folder import RunFolder
from harness.util.tables import Column, Table, columns_of
from harness.util.words import shortened

LONGEST_REASON = 110
GOODPUT_SECONDS = 600.0
"""Goodput of less time is that of starting."""
COLUMNS = columns_of("""
    run                         run
    age                         age
    state                       state
    progress                    step           s
    tokens_per_second           tokens/s       ,.0f
    tokens_per_second_per_rank  tokens/s/rank  ,.1f
    mfu                         MFU            .1%
    memory_gib                  memory GiB     .2f
    loss                        loss           .4f
""")
# Columns of result.json that every list has.
_SHOWN = ("loss", "window.tokens_per_second", "tokens_per_second_per_rank", "mfu", "memory_gib")

Row = dict[str, Any]


def rows_of(
    points: Sequence[Point], seen: Sequence[RunState], objective: str | None = None
) -> list[Row]:
    """Return a row for each run, named by the overrides that not all of them share.

    ``objective`` is the column of ``result.json`` that a study optimizes.
    """
    rows = []
    for name, point, run in zip(names_of(points), points, seen, strict=True):
        row: Row = {
            "run": name,
            "run_dir": run.run_dir,
            "overrides": point.overrides,
            "state": run.state,
            "step": run.step,
            "steps": run.steps,
            "kind": run.kind,
            "reason": run.reason,
            "about": run.about,
            **(run.facts or {}),
        }
        if run.slow:
            row["slow"] = [asdict(rank) for rank in run.slow]
        if objective is not None and objective not in _SHOWN:
            row[objective] = RunFolder(run.run_dir).row.get(objective)
        rows.append(row)
    return rows


def table_of(rows: Sequence[Row], objective: str | None = None) -> Table:
    """Return the rows as a table."""
    columns = list(COLUMNS)
    if objective is not None and objective not in _SHOWN:
        columns.append(Column(objective, objective, ".6g"))
    columns += [Column("tagged", "tags"), Column("said", "about")]
    shown = []
    for row in rows:
        said = shortened(row.get("notes") or row["about"], LONGEST_REASON)
        progress = f"{row['step']}/{row['steps']}"
        shown.append(
            {**row, "progress": progress, "tagged": ", ".join(row.get("tags", ())), "said": said}
        )
    notes = [THROUGHPUT] if any(row.get("tokens_per_second") is not None for row in rows) else []
    return Table(columns, shown, notes=notes, missing="")


def counted(seen: Sequence[RunState], skipped: Sequence[Skipped]) -> str:
    """Count the runs by state, in a line."""
    counts = Counter([run.state for run in seen])
    if skipped:
        counts["skipped"] = len(skipped)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    goodput = goodput_in_words([run.facts or {} for run in seen])
    return f"{states}; {goodput}\n" if goodput else f"{states}\n"


def goodput_in_words(rows: Sequence[Row]) -> str:
    """Say which share of the runs' time made steps that count; empty below ``GOODPUT_SECONDS``."""
    known = [
        row for row in rows if row.get("wall_seconds") and row.get("train_seconds") is not None
    ]
    wall = sum(row["wall_seconds"] for row in known)
    if wall < GOODPUT_SECONDS:
        return ""
    trained = sum(row["train_seconds"] for row in known)
    return f"goodput {trained / wall:.1%} of {wall / 3600:,.1f} hours"
