"""What the plan predicts for measured runs, and how far off it is."""

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.config.cluster import ClusterConfig
from harness.config.job import Job
from harness.launch.rows import Row, job_of
from harness.tools.plan.constants import Calibration
from harness.util.errors import MissingPackageError
from harness.util.words import GIB, plural

CALIBRATION = "calibration.json"
RATE = "tokens_per_second_per_rank"
MEMORY = "memory_gib"
METRICS = (RATE, MEMORY, "mfu")


def delta(value: float | None, reference: float | None) -> float | None:
    """Return ``value / reference - 1``; None if either is unknown or the reference is 0."""
    return None if value is None or not reference else value / reference - 1


def predicted(
    job: Job, cluster: ClusterConfig | None = None, calibration: Calibration | None = None
) -> Row:
    """Return a plan's ``METRICS``, ``step_seconds`` and ``fits``; None where the plan has no value.

    Args:
        cluster: has the accelerator of the nodes; None means the job's.
    """
    from harness.tools.plan.make import make_plan

    plan = make_plan(job if cluster is None else job.on_accelerator_of(cluster), calibration)
    of_speed = {name: getattr(plan.speed, name, None) for name in (RATE, "mfu", "step_seconds")}
    return {**of_speed, MEMORY: plan.peak / GIB, "fits": plan.fits}


def machine_of(row: Row) -> ClusterConfig | None:
    """Return a cluster with the accelerator that a row was measured on; None if it is unknown."""
    job = job_of(row)
    cluster = ClusterConfig() if job is None else job.cluster
    return cluster.with_device(row.get("device") or "")


def calibration_of(folder: Path, path: Path | None = None) -> Calibration | None:
    """Return the constants for predicting a folder's measurements: from ``path``, or from the folder."""
    beside = folder / CALIBRATION
    if path is None and beside.is_file():
        path = beside
    return None if path is None else Calibration.read(str(path))


def with_predictions(rows: Sequence[Row], calibration: Calibration | None = None) -> list[Row]:
    """Add ``predicted.*`` for the machine that each row was measured on, and ``delta.*``.

    A delta is predicted over measured, minus 1. The machine of a row without measurement is its
    job's.
    """
    made = []
    for row in rows:
        job = job_of(row)
        values: Row = {}
        if job is not None:
            try:
                values = predicted(job, machine_of(row), calibration)
            except MissingPackageError as error:
                sys.stderr.write(f"WARNING {row.get('run_dir')}: no prediction: {error}\n")
        added = {f"predicted.{name}": value for name, value in values.items()}
        if values:
            added |= {
                f"delta.{name}": delta(values[name], row.get(f"measured.{name}"))
                for name in METRICS
            }
        made.append(row | added)
    return made


def errors_of(rows: Sequence[Row], key: str) -> list[float]:
    """Return the known errors under ``key`` without their signs."""
    return [abs(row[key]) for row in rows if row.get(key) is not None]


def errors_in_words(rows: Sequence[Row], key: str) -> str:
    """Format the median and worst of the errors under ``key``; empty if none is known."""
    known = errors_of(rows, key)
    if not known:
        return ""
    median = statistics.median(known)
    return f"median error {median:.1%}, worst {max(known):.1%} ({plural(len(known), 'row')})"
