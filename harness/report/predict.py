"""What the plan says of a row's job, on the machine it was measured on or on another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.cluster.hardware import find_accelerator
from harness.job import Job
from harness.metrics.memory import GIB
from harness.plan.constants import Calibration
from harness.report.rows import job_of
from harness.report.statistics import delta

Row = dict[str, Any]
CALIBRATION = "calibration.json"
FIGURES = ("tokens_per_second_per_rank", "memory_gib", "mfu")


def predicted(job: Job, accelerator: str | None = None, calibration: Calibration | None = None) -> Row:
    """Figures of a plan: ``FIGURES``, ``step_seconds`` and ``fits``; None where the plan knows none.

    Args:
        job: the job.
        accelerator: what the nodes are to have, by its name in ``harness/cluster/hardware.py``; None: what
            the job says.
        calibration: constants of a machine other than the defaults; those of hardware that it brings along
            are not for an accelerator that is known.
    """
    from harness.plan.make import make_plan

    if accelerator is not None:
        job = copy.deepcopy(job)
        job.cluster.accelerator = accelerator
    if calibration is not None and calibration.accelerator is not None and accelerator is not None:
        calibration = None
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
    """The rows with ``predicted.*`` for the machine that each was measured on, and ``delta.*`` of that.

    A delta is predicted over measured, less one. Of a row that was not measured the job says the machine.
    """
    return [_with_prediction(row, calibration) for row in rows]


def calibration_of(folder: Path, path: Path | None = None) -> Calibration | None:
    """The constants to predict a folder's measurements with: the given file's, or those beside the rows.

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
    told = {
        f"predicted.{name}": value for name, value in predicted(job, machine_of(row), calibration).items()
    }
    deltas = {
        f"delta.{name}": delta(told[f"predicted.{name}"], row.get(f"measured.{name}")) for name in FIGURES
    }
    return {**row, **told, **deltas}


def machine_of(row: Row) -> str | None:
    """Name of the accelerator that a row was measured on; None if it was on none that is known."""
    accelerator = find_accelerator(row.get("device") or "")
    return None if accelerator is None else accelerator.name
