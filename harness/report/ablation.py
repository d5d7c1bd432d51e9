"""What each knob of a sweep does by itself: rows that equal the best one in all others. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.report.rows import job_of, shortened
from harness.report.statistics import delta

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
    """One axis of a sweep, with the rows that differ from the best in it alone."""

    name: str
    """As it is typed, without its part of the job: ``tp``."""
    rows: list[Row]
    """With ``knob`` (the value) and ``gain`` (throughput against the best, less one); the best among them."""


def best_of(rows: Sequence[Row]) -> Row | None:
    """The row with the highest throughput of a rank; None where nothing was measured."""
    return max((row for row in rows if row.get(RATE) is not None), key=lambda row: row[RATE], default=None)


def knobs_of(rows: Sequence[Row]) -> dict[str, list[str]]:
    """For everything that was typed and varies, the value in each row, in order.

    What is not typed everywhere has, elsewhere, the value that the row's job resolved to; of a point that no
    job can be made of, ``default``.
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
    """A table for each knob that was turned at the best point; what failed there is a row too."""
    best, knobs = best_of(rows), knobs_of(rows)
    if best is None:
        return []
    place = next(i for i, row in enumerate(rows) if row is best)
    # With the number of ranks given, dp_shard=-1 is what the other degrees leave.
    free = {"parallelism.dp_shard"} if _fills_up(rows, knobs) else set()
    found = []
    for name, values in knobs.items():
        others = [(other, own) for other, own in knobs.items() if other != name and other not in free]
        alike = [
            i
            for i, row in enumerate(rows)
            if all(own[i] == own[place] or _is_idle(other, row) for other, own in others)
        ]
        turned = [{**rows[i], "knob": values[i], "gain": delta(rows[i].get(RATE), best[RATE])} for i in alike]
        if name not in free and len({row["knob"] for row in turned}) > 1:
            turned.sort(key=lambda row: -(row.get(RATE) or 0.0))
            found.append(Knob(shortened(f"{name}=").removesuffix("="), turned))
    return found


def _is_idle(name: str, row: Row) -> bool:
    """Whether a knob does nothing at a point: one of an axis that has a single rank there."""
    axis = next((axis for axis, fields in _OF_AXIS.items() if name.startswith(fields)), None)
    return axis is not None and row.get(f"job.parallelism.{axis}") == 1


def _fills_up(rows: Sequence[Row], knobs: dict[str, list[str]]) -> bool:
    """Whether the number of shards follows from the other degrees."""
    worlds = {row["world_size"] for row in rows if job_of(row) is not None}
    others = [name for name in knobs if name.startswith("parallelism.") and name != "parallelism.dp_shard"]
    return len(worlds) == 1 and bool(others)
