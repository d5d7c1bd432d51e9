"""What the plan says of a row's job, on the machine it was measured on or on another."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from harness.cluster.hardware import find_accelerator
from harness.job import Job
from harness.metrics.memory import GIB
from harness.report.rows import job_of
from harness.report.statistics import delta

Row = dict[str, Any]
FIGURES = ("tokens_per_second_per_rank", "memory_gib", "mfu")


def predicted(job: Job, accelerator: str | None = None) -> Row:
    """Figures of a plan: ``FIGURES``, ``step_seconds`` and ``fits``; None where the plan knows none.

    Args:
        job: the job.
        accelerator: what the nodes are to have, by its name in ``harness/cluster/hardware.py``; None: what
            the job says.
    """
    from harness.plan.make import make_plan

    if accelerator is not None:
        job = copy.deepcopy(job)
        job.cluster.accelerator = accelerator
    plan = make_plan(job)
    speed = plan.speed
    return {
        "tokens_per_second_per_rank": None if speed is None else speed.tokens_per_second_per_rank,
        "memory_gib": plan.peak / GIB,
        "mfu": None if speed is None else speed.mfu,
        "step_seconds": None if speed is None else speed.step_seconds,
        "fits": plan.fits,
    }


def with_predictions(rows: Sequence[Row]) -> list[Row]:
    """The rows with ``predicted.*`` for the machine that each was measured on, and ``delta.*`` of that.

    A delta is predicted over measured, less one. Of a row that was not measured the job says the machine.
    """
    return [_with_prediction(row) for row in rows]


def _with_prediction(row: Row) -> Row:
    job = job_of(row)
    if job is None:
        return row
    told = {f"predicted.{name}": value for name, value in predicted(job, machine_of(row)).items()}
    deltas = {
        f"delta.{name}": delta(told[f"predicted.{name}"], row.get(f"measured.{name}")) for name in FIGURES
    }
    return {**row, **told, **deltas}


def machine_of(row: Row) -> str | None:
    """Name of the accelerator that a row was measured on; None if it was on none that is known."""
    accelerator = find_accelerator(row.get("device") or "")
    return None if accelerator is None else accelerator.name
