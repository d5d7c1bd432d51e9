"""Plan a row's job, for the machine it was measured on or for another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.cluster import ClusterConfig
from harness.config.job import Job
from harness.config.registry import MissingPackageError
from harness.launch.rows import job_of
from harness.tools.plan.constants import Calibration
from harness.util.tables import GIB

Row = dict[str, Any]
CALIBRATION = "calibration.json"
METRICS = ("tokens_per_second_per_rank", "memory_gib", "mfu")


def delta(value: float | None, reference: float | None) -> float | None:
    """Return ``value / reference - 1``; None if either is unknown or the reference is 0."""
    return None if value is None or not reference else value / reference - 1


def predicted(job: Job, cluster: ClusterConfig | None = None, calibration: Calibration | None = None) -> Row:
    """Return a plan's ``METRICS``, ``step_seconds`` and ``fits``; None where the plan has no value.

    Args:
        job: the job.
        cluster: has the accelerator of the nodes; None means the job's.
        calibration: calibrated constants in place of the defaults.
    """
    from harness.tools.plan.make import make_plan

    if cluster is not None:
        job = job.on_accelerator_of(cluster)
    plan = make_plan(job, calibration)
    speed = plan.speed
    return {
        "tokens_per_second_per_rank": None if speed is None else speed.tokens_per_second_per_rank,
        "memory_gib": plan.peak / GIB,
        "mfu": None if speed is None else speed.mfu,
        "step_seconds": None if speed is None else speed.step_seconds,
        "fits": plan.fits,
    }


def with_predictions(rows: Sequence[Row], calibration: Calibration | None = None) -> list[Row]:
    """Add ``predicted.*`` for the machine that each row was measured on, and ``delta.*``.

    A delta is predicted over measured, minus 1. The machine of a row without measurement is its job's.
    """
    return [_with_prediction(row, calibration) for row in rows]


def calibration_of(folder: Path, path: Path | None = None) -> Calibration | None:
    """Return the constants for predicting a folder's measurements: from ``path``, or from the folder.

    Raises:
        UserError: the file cannot be read.
    """
    beside = folder / CALIBRATION
    path = path or (beside if beside.is_file() else None)
    return None if path is None else Calibration.read(str(path))


def _with_prediction(row: Row, calibration: Calibration | None) -> Row:
    job = job_of(row)
    if job is None:
        return row
    try:
        plan = predicted(job, machine_of(row), calibration)
    except MissingPackageError as error:
        sys.stderr.write(f"WARNING {row.get('run_dir')}: no prediction: {error}\n")
        return row
    values = {f"predicted.{name}": value for name, value in plan.items()}
    deltas = {
        f"delta.{name}": delta(values[f"predicted.{name}"], row.get(f"measured.{name}")) for name in METRICS
    }
    return {**row, **values, **deltas}


def machine_of(row: Row) -> ClusterConfig | None:
    """Return a cluster with the accelerator that a row was measured on; None if it is unknown."""
    job = job_of(row)
    cluster = ClusterConfig() if job is None else job.cluster
    return cluster.with_device(row.get("device") or "")
