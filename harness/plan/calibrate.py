"""Fits the plan's constants to measured steps."""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from harness.cluster.hardware import find_accelerator
from harness.errors import UserError
from harness.job import Job
from harness.plan.constants import Calibration, Constants
from harness.plan.cpu import measure_cpu
from harness.plan.machine import machine_of
from harness.plan.speed import StepModel

# Which constants a fit moves, and where that of the defaults started. The others come from sheets and papers:
# rows of one cluster's tables seldom tell them from the rest.
FITTED: tuple[str, ...] = ("matmul", "float8")
START = replace(Constants(), matmul=0.6, float8=0.5)
# Ranks on a CPU share its cores, wait for Python at every operation, and send through its memory.
CPU_FITTED: tuple[str, ...] = ("matmul", "attention", "memory", "launch", "latency", "link")
CPU_START = Constants(matmul=0.8, attention=0.3, memory=0.5, link=0.2, latency=500e-6, launch=30e-6)
# How far a constant may be from where it starts, and how well rows are expected to be met, both as the
# standard deviation of a logarithm: a constant that no row speaks of stays where it is.
PRIOR, NOISE = 0.25, 0.02
CPU_PRIOR, CPU_NOISE = 1.0, 0.05
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
    rows: Sequence[Measured],
    start: Calibration,
    names: Sequence[str] = FITTED,
    prior: float = PRIOR,
    noise: float = NOISE,
) -> Calibration:
    """Constants with which the plan meets measured rows best.

    Minimises the squared logarithms of predicted over measured, and of the constants over where they start
    (a maximum a posteriori estimate), one constant at a time with steps that shrink when none helps.

    Args:
        rows: what was measured.
        start: where to start; what is not named stays.
        names: the constants to be fitted.
        prior: how far they are expected to be from where they start.
        noise: how far rows are expected to be from the plan.
    """

    def cost_of(logs: dict[str, float]) -> float:
        calibration = _moved(start, logs)
        misses = sum(
            math.log(predicted_rate(row.job, calibration) / row.tokens_per_second_per_rank) ** 2
            for row in rows
        )
        return misses / noise**2 + sum(log**2 for log in logs.values()) / prior**2

    logs = dict.fromkeys(names, 0.0)
    cost = cost_of(logs)
    step = 0.2
    while step > 0.002:
        improved = False
        for name in names:
            for direction in (step, -step):
                tried = {**logs, name: logs[name] + direction}
                new = cost_of(tried)
                if new < cost:
                    logs, cost, improved = tried, new, True
                    break
        if not improved:
            step /= 2
    return _moved(start, logs)


def _moved(start: Calibration, logs: dict[str, float]) -> Calibration:
    values = {
        name: min(getattr(start.constants, name) * math.exp(log), MOST.get(name, math.inf))
        for name, log in logs.items()
    }
    return replace(start, constants=replace(start.constants, **values))


def render_fit(calibration: Calibration, rows: Sequence[Measured]) -> str:
    """The constants, and how the plan meets each run with them."""
    lines = [f"constants of {calibration.source}"]
    for field in fields(calibration.constants):
        value = getattr(calibration.constants, field.name)
        if value is not None:
            lines.append(f"  {field.name:<10} {value:.3g}")
    errors = []
    lines += ["", f"  {'measured':>10} {'planned':>10} {'error':>7}  tokens/s a rank"]
    for row in rows:
        planned = predicted_rate(row.job, calibration)
        errors.append(planned / row.tokens_per_second_per_rank - 1)
        axes = " x ".join(f"{a} {d}" for a, d in row.job.parallelism.degrees.items() if d > 1) or "single"
        words = f"{axes}, {row.job.parallelism.pp_schedule}" if row.job.parallelism.pp > 1 else axes
        measured = row.tokens_per_second_per_rank
        lines.append(f"  {measured:>10,.1f} {planned:>10,.1f} {errors[-1]:>+7.1%}  {words}")
    amounts = [abs(error) for error in errors]
    lines.append(f"median error {statistics.median(amounts):.1%}, worst {max(amounts):.1%}")
    return "\n".join(lines)


def calibrate(folder: Path) -> tuple[Calibration, list[Measured], str]:
    """Fits constants to the completed runs of a folder.

    Of runs on CPUs the cores of this machine are measured first (``cpu.py``): they have to be the same.

    Args:
        folder: runs, or a sweep of runs.

    Returns:
        the constants and their hardware; the runs that they were fitted to; what of them was left out, in
        words.

    Raises:
        UserError: no run of known hardware is there, or they are of several kinds.
    """
    from harness.report.rows import job_of, load

    measured: list[Measured] = []
    devices: set[str] = set()
    rows = load(folder)
    for row in rows:
        job, rate = job_of(row), row.get("measured.tokens_per_second_per_rank")
        if job is None or rate is None:
            continue
        devices.add(row["device"])
        measured.append(Measured(job, rate))
    if not measured:
        raise UserError(f"calibrate={folder}: no completed run with a throughput is there")
    if len(devices) > 1:
        raise UserError(f"calibrate={folder}: runs are of several devices: {', '.join(sorted(devices))}")
    [device] = devices
    source = f"{len(measured)} runs of {folder}, {device}"
    left_out = f"{len(rows) - len(measured)} rows without a throughput left out"
    known = find_accelerator(device)
    if known is not None:
        for one in measured:
            one.job.cluster.accelerator = known.name
        start, names, expected = Calibration(START, source=source), FITTED, (PRIOR, NOISE)
    elif "CPU" in device:
        on_cores = replace(CPU_START, cores=len(os.sched_getaffinity(0)))
        start, names = Calibration(on_cores, measure_cpu(), source=source), CPU_FITTED
        expected = (CPU_PRIOR, CPU_NOISE)
    else:
        raise UserError(f"calibrate={folder}: runs are of {device}, of which nothing is known")
    return fit(measured, start, names, *expected), measured, left_out
