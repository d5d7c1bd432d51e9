"""Short names that distinguish runs, and short lists of fields. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config.fields import leaves
from harness.launch.sweep.registry import Point, labels, sets_label

MOST_FIELDS = 3


def names_of(points: Sequence[Point]) -> list[str]:
    """Name each run by the smallest set of overridden fields that distinguishes the runs, with their values.

    Args:
        points: runs that were started one by one, so their overrides may set different fields.
    """
    if len(points) < 2:
        return labels([point.overrides for point in points])
    columns = _columns(points)
    chosen: list[str] = []
    groups = 1
    while groups < len(points):
        counts = {key: _count([columns[each] for each in (*chosen, key)]) for key in columns}
        # Use labels only if nothing else distinguishes the runs.
        useful = [key for key, count in counts.items() if count > groups]
        best = max(useful, key=lambda key: (not sets_label(key), counts[key]), default=None)
        if best is None:
            break
        chosen.append(best)
        groups = counts[best]
    shown = [key for key in columns if key in chosen]
    named = [
        " ".join(f"{key}={columns[key][index]}" for key in shown if columns[key][index] is not None)
        for index in range(len(points))
    ]
    return [
        name if name and named.count(name) == 1 else f"{name} {point.id}".strip()
        for name, point in zip(named, points, strict=True)
    ]


def _columns(points: Sequence[Point]) -> dict[str, list[str | None]]:
    """Return fields that any run overrides and that differ, with the value in each run; label fields last."""
    typed = [dict(each.lstrip("+").partition("=")[::2] for each in point.overrides) for point in points]
    fields = [{name: str(value) for name, _, value in leaves(point.job)} for point in points]
    keys = sorted(dict.fromkeys(key for each in typed for key in each), key=sets_label)
    columns = {
        # Fields also have a value in runs that do not override them; groups and mapping keys do not.
        key: [own.get(key, given.get(key)) for own, given in zip(fields, typed, strict=True)]
        for key in keys
        if key != "runs_dir"
    }
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def _count(columns: Sequence[Sequence[str | None]]) -> int:
    return len(set(zip(*columns, strict=True)))


def by_part(fields: Sequence[str]) -> dict[str, list[str]]:
    """Group fields by their part of the job."""
    parts: dict[str, list[str]] = {}
    for field in fields:
        parts.setdefault(field.partition(".")[0], []).append(field)
    return parts


def in_short(fields: Sequence[str]) -> str:
    """Return a list of fields as text; a part with many fields is shown by their number."""
    return ", ".join(
        ", ".join(own) if len(own) <= MOST_FIELDS else f"{part} ({len(own)} fields)"
        for part, own in by_part(fields).items()
    )
