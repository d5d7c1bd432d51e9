"""The run folders of a sweep's points: one for equal jobs, and one for each value of a swept label."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.compose.composer import Composed
from harness.config.fields import leaves
from harness.config.job import Job
from harness.launch.sweep.registry import Point
from harness.util.errors import UserError

OF_THE_COMMAND = tuple(
    f"cluster.{name}" for name in ("confirm_gpu_hours", "dry_run", "max_running", "parsable", "wait")
)
"""Labels that configure the command that starts a sweep, not its runs."""


def unique_points(
    composed: Sequence[Composed], swept: Sequence[str] | None = None
) -> list[tuple[Point, Job]]:
    """Return the points that have a job, one per run folder.

    Args:
        composed: points with jobs.
        swept: labels of which each value has a run of its own; None: those by which alone points differ.

    Raises:
        UserError: points differ in a label that configures the command.
    """
    swept = swept_labels([each.job for each in composed]) if swept is None else swept
    found: dict[Path, tuple[Point, Job]] = {}
    for each in composed:
        job: Job = each.job
        path = run_dir_of(job, swept)
        found.setdefault(path, (Point(job.id, path, each.overrides), job))
    return list(found.values())


def swept_labels(jobs: Sequence[Job]) -> list[str]:
    """Return the labels by which alone some jobs differ: dotted names, of mappings with the key.

    Raises:
        UserError: one of them configures the command.
    """
    first: dict[Path, Job] = {}
    names: set[str] = set()
    for job in jobs:
        other = first.setdefault(job.run_dir, job)
        if job != other:
            names.update(_differing_labels(other, job))
    return check_swept(names)


def check_swept(names: Iterable[str]) -> list[str]:
    """Return labels that are axes, in order.

    Raises:
        UserError: one of them configures the command.
    """
    for name in names:
        if name in OF_THE_COMMAND:
            raise UserError(
                f"{name}: configures the command, not its runs; would work: one value for all points"
            )
    return sorted(names)


def run_dir_of(job: Job, swept: Sequence[str]) -> Path:
    """Return the run folder of a point: that of its job, with a digest of the swept labels added.

    An earlier run of the job that had the same labels, without a sweep over them, keeps its folder.
    """
    if not swept:
        return job.run_dir
    values = [(name, _value(job, name)) for name in swept]
    digest = hashlib.sha256(json.dumps(values).encode()).hexdigest()[:8]
    own = job.run_dir.with_name(f"{job.run_dir.name}-{digest}")
    if not own.exists() and (job.run_dir / "job.json").is_file():
        earlier = Job.read(job.run_dir / "job.json")
        if [(name, _value(earlier, name)) for name in swept] == values:
            return job.run_dir
    return own


def _value(job: Job, name: str) -> Any:
    value: Any = job
    for part in name.split("."):
        value = value.get(part) if isinstance(value, dict) else getattr(value, part, None)
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
