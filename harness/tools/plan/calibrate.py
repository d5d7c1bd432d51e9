"""Fit the plan's constants to measured steps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.config.cluster import ClusterConfig
from harness.config.job import Job
from harness.config.parallelism import degrees_in_words
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.machine import machine_of
from harness.tools.plan.step_time import StepModel
from harness.util.errors import UserError

# Constants that a fit changes, and the start of the fit of the defaults. The other constants come from data
# sheets and papers: rows of one cluster seldom determine them.
FITTED: tuple[str, ...] = ("matmul", "float8")
START = replace(Constants(), matmul=0.78, float8=0.78)
# Expected deviation of constants from their start, and of predictions from rows, as standard deviations of
# the logarithm. A constant on which no row depends keeps its start.
PRIOR, NOISE = 0.25, 0.02


@dataclass(frozen=True)
class Measured:
    """A job and its measured speed."""

    job: Job
    tokens_per_second_per_rank: float
    device: str = ""
    """Name that the driver reports."""


def predicted_rate(job: Job, calibration: Calibration) -> float:
    """Tokens per second per rank that the plan predicts for a job."""
    machine = machine_of(job, calibration)
    assert machine is not None, "rows of unknown hardware are left out before"
    return StepModel(job, machine).speed()[0].tokens_per_second_per_rank


def fit(rows: Sequence[Measured], start: Calibration) -> Calibration:
    """Fit the constants ``FITTED`` to measured rows; the others keep their values.

    Minimizes the sum over rows of (log(predicted / measured) / ``NOISE``)^2 plus the sum over constants of
    (log(constant / start) / ``PRIOR``)^2, a maximum a posteriori estimate.
    """

    def cost_of(logs: dict[str, float]) -> float:
        calibration = scale_constants(start, logs)
        misses = sum(
            math.log(predicted_rate(row.job, calibration) / row.tokens_per_second_per_rank) ** 2
            for row in rows
        )
        return misses / NOISE**2 + sum(log**2 for log in logs.values()) / PRIOR**2

    return scale_constants(start, descend(cost_of, FITTED))


def descend(cost_of: Callable[[dict[str, float]], float], names: Sequence[str]) -> dict[str, float]:
    """Minimize the cost of logarithms of constants, relative to their start, by coordinate descent.

    The step is halved when no coordinate improves.
    """
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
    return logs


def scale_constants(start: Calibration, logs: dict[str, float]) -> Calibration:
    """Multiply constants, which are fractions, by the exponentials of ``logs``."""
    values = {name: min(getattr(start.constants, name) * math.exp(log), 1.0) for name, log in logs.items()}
    return replace(start, constants=replace(start.constants, **values))


def render_fit(calibration: Calibration, rows: Sequence[Measured]) -> str:
    """Format the constants, and the prediction error of each run."""
    lines = [f"constants of {calibration.source}"]
    lines += [f"  {name:<10} {value:.3g}" for name, value in asdict(calibration.constants).items()]
    lines += ["", f"  {'measured':>10} {'planned':>10} {'error':>7}  tokens/s a rank"]
    errors = []
    for row in rows:
        planned = predicted_rate(row.job, calibration)
        errors.append(planned / row.tokens_per_second_per_rank - 1)
        axes = degrees_in_words(row.job.parallelism.degrees, none="single")
        words = f"{axes}, {row.job.parallelism.pp_schedule}" if row.job.parallelism.pp > 1 else axes
        measured = row.tokens_per_second_per_rank
        lines.append(f"  {measured:>10,.1f} {planned:>10,.1f} {errors[-1]:>+7.1%}  {words}")
    amounts = [abs(error) for error in errors]
    lines.append(f"median error {statistics.median(amounts):.1%}, worst {max(amounts):.1%}")
    return "\n".join(lines)


def calibrate(
    measured: Sequence[Measured], folder: Path, cluster: ClusterConfig | None = None
) -> tuple[Calibration, list[Measured]]:
    """Fit constants to the runs of a folder; also returns the runs, on nodes with their hardware.

    ``cluster`` may describe their accelerator; else their own clusters do, or harness/util/hardware.py.

    Raises:
        UserError: there is no run, runs are from several devices, or their device is unknown.
    """
    devices = {one.device for one in measured}
    if not measured:
        raise UserError(f"calibrate={folder}: no completed run with a throughput")
    if len(devices) > 1:
        raise UserError(f"calibrate={folder}: runs are from several devices: {', '.join(sorted(devices))}")
    [device] = devices
    source = f"{len(measured)} runs of {folder}, {device}"
    described = None if cluster is None else cluster.with_device(device)
    known = [described or one.job.cluster.with_device(device) for one in measured]
    if "CPU" in device:
        rule = "of which the plan has no times; would work: runs on GPUs"
        raise UserError(f"calibrate={folder}: runs are from {device}, {rule}")
    on_known = [
        replace(one, job=one.job.on_accelerator_of(own))
        for one, own in zip(measured, known, strict=True)
        if own is not None
    ]
    if len(on_known) < len(measured):
        raise UserError(
            f"calibrate={folder}: runs are from {device}, which is unknown hardware; would work: a cluster "
            f"with its numbers and cluster.hardware.device_name='{device}'"
        )
    return fit(on_known, Calibration(START, source=source)), on_known
