"""Effect of each knob of a sweep: rows that differ from the best row in that knob only. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.launch.rows import job_of, shortened
from harness.tools.report.statistics import delta

Row = dict[str, Any]
DEFAULT = "default"
RATE = "measured.tokens_per_second_per_rank"
_OF_AXIS = {
    "pp": ("parallelism.pp_",),
    "cp": ("parallelism.cp_",),
    "tp": ("parallelism.async_tp", "parallelism.sequence_parallel", "parallelism.loss_parallel"),
}


@dataclass(frozen=True)
class Knob:
    """One axis of a sweep, with the rows that differ from the best row in this axis only."""

    name: str
    """The field's name without its part of the job: ``tp``."""
    rows: list[Row]
    """Rows with ``knob`` (the value) and ``gain`` (throughput over the best, minus 1), including the best."""


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the row with the highest throughput per rank; None if nothing was measured."""
    return max((row for row in rows if row.get(RATE) is not None), key=lambda row: row[RATE], default=None)


def knobs_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return every overridden field whose value varies, with its value in each row, in order.

    A row that does not override the field has the value of its resolved job, or ``default`` if the point is
    not a valid job.
    """
    typed = [dict(_typed(each) for each in row.get("overrides", [])) for row in rows]
    names = list(dict.fromkeys(name for each in typed for name in each))
    values = {
        name: [_value(name, own, row) for own, row in zip(typed, rows, strict=True)]
        for name in names
        if name not in ("name", "runs_dir")
    }
    return {name: own for name, own in values.items() if len(set(own)) > 1}


def _typed(override: str) -> tuple[str, str]:
    name, _, value = override.lstrip("+~").partition("=")
    return name, value.strip("'\"")


def _value(name: str, typed: dict[str, str], row: Row) -> str:
    if name in typed:
        return typed[name]
    resolved = row.get(f"job.{name}")
    return DEFAULT if resolved is None else str(resolved)


def ablation(rows: Sequence[Row]) -> list[Knob]:
    """Return a table for each knob that varies at the best point; failed points are rows too."""
    best, knobs = best_of(rows), knobs_of(rows)
    if best is None:
        return []
    best_index = next(i for i, row in enumerate(rows) if row is best)
    # With a fixed number of ranks, dp_shard follows from the other degrees.
    free = {"parallelism.dp_shard"} if _fills_up(rows, knobs) else set()
    found = []
    for name, values in knobs.items():
        others = [(other, own) for other, own in knobs.items() if other != name and other not in free]
        alike = [
            i
            for i, row in enumerate(rows)
            if all(own[i] == own[best_index] or _is_idle(other, row) for other, own in others)
        ]
        turned = [{**rows[i], "knob": values[i], "gain": delta(rows[i].get(RATE), best[RATE])} for i in alike]
        if name not in free and len({row["knob"] for row in turned}) > 1:
            turned.sort(key=lambda row: -(row.get(RATE) or 0.0))
            found.append(Knob(shortened(f"{name}=").removesuffix("="), turned))
    return found


def _is_idle(name: str, row: Row) -> bool:
    """Whether a knob has no effect at a point, because its axis has a single rank there."""
    axis = next((axis for axis, fields in _OF_AXIS.items() if name.startswith(fields)), None)
    return axis is not None and row.get(f"job.parallelism.{axis}") == 1


def _fills_up(rows: Sequence[Row], knobs: dict[str, list[str]]) -> bool:
    """Whether ``dp_shard`` follows from the other degrees, because all jobs have the same number of ranks."""
    worlds = {row["world_size"] for row in rows if job_of(row) is not None}
    others = [name for name in knobs if name.startswith("parallelism.") and name != "parallelism.dp_shard"]
    return len(worlds) == 1 and bool(others)
