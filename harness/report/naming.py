"""Short names that tell runs apart, and differences of jobs in few words. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence

from harness.config import leaves
from harness.sweep.registry import Point, labels, sets_label

MOST_FIELDS = 3


def names_of(points: Sequence[Point]) -> list[str]:
    """A name for each run: the fewest of the typed fields that tell the runs apart, with their values.

    Args:
        points: runs that were started one by one, so that their overrides need not be alike.
    """
    if len(points) < 2:
        return labels([point.overrides for point in points])
    columns = _columns(points)
    chosen: list[str] = []
    groups = 1
    while groups < len(points):
        counts = {key: _count([columns[each] for each in (*chosen, key)]) for key in columns}
        # Labels only where nothing else tells runs apart.
        telling = [key for key, count in counts.items() if count > groups]
        best = max(telling, key=lambda key: (not sets_label(key), counts[key]), default=None)
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
    """What was typed in any of the runs and differs: the value in each run, label fields last."""
    typed = [dict(each.lstrip("+").partition("=")[::2] for each in point.overrides) for point in points]
    fields = [{name: str(value) for name, _, value in leaves(point.job)} for point in points]
    keys = sorted(dict.fromkeys(key for each in typed for key in each), key=sets_label)
    columns = {
        # A field has a value where it is not typed as well; a group and a key of a mapping have none.
        key: [own.get(key, given.get(key)) for own, given in zip(fields, typed, strict=True)]
        for key in keys
        if key != "runs_dir"
    }
    return {key: values for key, values in columns.items() if len(set(values)) > 1}


def _count(columns: Sequence[Sequence[str | None]]) -> int:
    return len(set(zip(*columns, strict=True)))


def by_part(fields: Sequence[str]) -> dict[str, list[str]]:
    """Fields by the part of the job that they belong to."""
    parts: dict[str, list[str]] = {}
    for field in fields:
        parts.setdefault(field.partition(".")[0], []).append(field)
    return parts


def in_short(fields: Sequence[str]) -> str:
    """Fields in words, those of one part counted where they are many."""
    return ", ".join(
        ", ".join(own) if len(own) <= MOST_FIELDS else f"{part} ({len(own)} fields)"
        for part, own in by_part(fields).items()
    )
