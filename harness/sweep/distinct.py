"""Remove duplicate points of a sweep, and refuse points that differ in labels only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.compose import Composed
from harness.config import leaves
from harness.errors import UserError
from harness.job import Job
from harness.sweep.registry import Point


def unique_points(composed: Sequence[Composed]) -> list[tuple[Point, Job]]:
    """Return the points that have a job, one per run folder.

    Raises:
        UserError: points differ in labels only, so they would share a run folder.
    """
    found: dict[Path, tuple[Point, Job]] = {}
    for each in composed:
        job: Job = each.job
        if job.run_dir not in found:
            found[job.run_dir] = Point(job.id, job.run_dir, each.overrides), job
        elif job != found[job.run_dir][1]:
            _refuse(found[job.run_dir], job, each.overrides)
    return list(found.values())


def _refuse(first: tuple[Point, Job], second: Job, overrides: Sequence[str]) -> NoReturn:
    point, job = first
    differing = _differing_labels(job, second)
    typed = " and ".join(
        " ".join(each.lstrip("+") for each in own if each not in other) or "the same without it"
        for own, other in ((point.overrides, overrides), (overrides, point.overrides))
    )
    field = next((name for name in differing if not isinstance(_value(second, name), list)), None)
    works = f"'name={job.name}-${{{field}}}', a folder for each" if field else "another name for each point"
    raise UserError(
        f"{', '.join(differing)}: labels do not change the run folder, so {typed} would share "
        f"{job.run_dir}; would work: {works}"
    )


def _value(job: Job, name: str) -> Any:
    value: Any = job
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part)
    return value


def _differing_labels(first: Job, second: Job) -> list[str]:
    """Return the dotted names of fields that differ; for mappings, of their keys."""
    names = []
    # Both jobs have the same fields: a run folder has one set of data.sources.
    for (name, _, left), (_, _, right) in zip(leaves(first), leaves(second), strict=True):
        if isinstance(left, dict) and isinstance(right, dict):
            names += [f"{name}.{key}" for key in {**left, **right} if left.get(key) != right.get(key)]
        elif left != right:
            names.append(name)
    return names
