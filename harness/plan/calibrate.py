"""Fits the plan's constants to measured steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.job import Job
from harness.plan.constants import Calibration, Constants
from harness.plan.machine import machine_of
from harness.plan.speed import StepModel

# Which constants a fit moves, and where that of the defaults started. The others come from sheets and papers:
# rows of one cluster's tables seldom tell them from the rest.
FITTED = ("matmul", "float8", "pipeline")
START = replace(Constants(), matmul=0.6, float8=0.5, pipeline=0.01)
# How far a constant may be from where it starts, and how well rows are expected to be met, both as the
# standard deviation of a logarithm: a constant that no row speaks of stays where it is.
PRIOR, NOISE = 0.25, 0.02
# Shares cannot be more than all.
MOST = {"matmul": 1.0, "float8": 1.0, "attention": 1.0, "memory": 1.0}


@dataclass(frozen=True)
class Measured:
    """A job and how fast it was."""

    job: Job
    tokens_per_second_per_rank: float


def predicted_rate(job: Job, calibration: Calibration) -> float:
    """Tokens per second and rank that the plan expects of a job."""
    machine = machine_of(job, calibration)
    assert machine is not None, "rows of unknown hardware are left out before"
    return StepModel(job, machine).speed()[0].tokens_per_second_per_rank


def fit(
    rows: Sequence[Measured], start: Calibration, names: Sequence[str] = FITTED, sweeps: int = 40
) -> Calibration:
    """Constants with which the plan meets measured rows best.

    Minimises the squared logarithms of predicted over measured, and of the constants over where they start
    (a maximum a posteriori estimate), one constant at a time with steps that shrink when none helps.

    Args:
        rows: what was measured.
        start: where to start; what is not named stays.
        names: the constants to be fitted.
        sweeps: how often each is tried at most.
    """
    logs = dict.fromkeys(names, 0.0)
    cost = _cost(rows, start, logs)
    step = 0.2
    for _ in range(sweeps):
        improved = False
        for name in names:
            for direction in (step, -step):
                tried = {**logs, name: logs[name] + direction}
                new = _cost(rows, start, tried)
                if new < cost:
                    logs, cost, improved = tried, new, True
                    break
        if not improved:
            step /= 2
            if step < 0.002:
                break
    return _moved(start, logs)


def _moved(start: Calibration, logs: dict[str, float]) -> Calibration:
    values = {
        name: min(getattr(start.constants, name) * math.exp(log), MOST.get(name, math.inf))
        for name, log in logs.items()
    }
    return replace(start, constants=replace(start.constants, **values))


def _cost(rows: Sequence[Measured], start: Calibration, logs: dict[str, float]) -> float:
    calibration = _moved(start, logs)
    misses = sum(
        math.log(predicted_rate(row.job, calibration) / row.tokens_per_second_per_rank) ** 2 for row in rows
    )
    return misses / NOISE**2 + sum(log**2 for log in logs.values()) / PRIOR**2
