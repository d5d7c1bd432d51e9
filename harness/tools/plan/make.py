"""Make the plan of a job, and fit the constants of plans to measured steps."""

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.config.cluster import ClusterConfig
from harness.config.job import Job
from harness.config.parallelism import degrees_in_words
from harness.model.accounting import account
from harness.model.architecture import context_methods, method_in_words
from harness.precision.linears import warning_of_eager
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import DEFAULTS, Calibration, Constants
from harness.tools.plan.evidence import RESOLUTION
from harness.tools.plan.loads import known_imbalance, rows_by_rank
from harness.tools.plan.machine import Machine, device_of, machine_of
from harness.tools.plan.memory import memory_limit, rank_memory
from harness.tools.plan.parameters import parameters_of
from harness.tools.plan.plan import Plan, PlannedPhase, RankMemory, Traffic
from harness.tools.plan.step_time import StepModel
from harness.util.errors import UserError
from harness.util.words import gib, plural

# Constants that a fit changes, and the start of the fit of the defaults. The other constants come
# from data sheets and papers: rows of one cluster seldom determine them.
FITTED: tuple[str, ...] = ("matmul", "float8")
START = replace(Constants(), matmul=0.78, float8=0.78)
# Expected deviation of constants from their start, and of predictions from rows, as standard
# deviations of the logarithm. A constant on which no row depends keeps its start.
PRIOR = 0.25
NOISE = 0.02


def calibration_of(job: PlanJob) -> Calibration:
    """Return the constants to plan with, and measured loads of experts."""
    known = DEFAULTS if job.calibration is None else Calibration.read(job.calibration)
    if job.expert_imbalance is None:
        return known
    return replace(known, software=replace(known.software, expert_imbalance=job.expert_imbalance))


def make_plan(
    job: Job, calibration: Calibration | None = None, memory: list[RankMemory] | None = None
) -> Plan:
    """Predict memory, traffic and speed of a resolved job, with the default constants or others.

    ``memory`` is that of its pipeline ranks, if it is known.
    """
    device = device_of(job)
    known = calibration or DEFAULTS
    machine = machine_of(job, known)
    if memory is None:
        memory = rank_memory(job, known.software)
    imbalance = known_imbalance(job, known.software)
    notes = _notes(job, imbalance)
    speed = None
    traffic = list[Traffic]()
    if machine is not None:
        model = StepModel(job, machine)
        speed, traffic = model.speed()
        if imbalance is None:
            least = f"the busiest rank has {model.worker.busiest:.2f} times its share of rows"
            notes.append(
                f"time assumes a router near balance: {least}; one far from balance can halve the speed"
            )
    return Plan(
        job=job,
        accounting=account(job.model, job.training.seq_len),
        parameters_per_rank=[parameters_of(job, rank).held for rank in range(job.parallelism.pp)],
        memory=memory,
        memory_limit=memory_limit(job, device),
        traffic=traffic,
        speed=speed,
        accelerator=device,
        notes=notes,
        phases=_phases(job, machine),
        is_calibrated=known.source != "",
    )


def _phases(job: Job, machine: Machine | None) -> list[PlannedPhase]:
    phases = job.sizes.phases
    if len(phases) == 1:
        return []
    unscheduled = replace(job, schedule=replace(job.schedule, batch_size=[], seq_len=[]))
    planned = []
    for phase in phases:
        steps = phase.steps_until(job.steps)
        if not steps:
            continue
        rows = job.rows_per_rank(phase) * job.parallelism.data_parallel
        training = replace(job.training, global_batch_size=rows, seq_len=phase.seq_len)
        of_phase = replace(unscheduled, training=training)
        time = None if machine is None else StepModel(of_phase, machine).speed()[0].step_seconds
        planned.append(PlannedPhase(phase.first_step, steps, phase.batch_size, phase.seq_len, time))
    return planned


def _notes(job: Job, imbalance: float | None) -> list[str]:
    notes = [job.empty_in_words, method_in_words(job)]
    if imbalance is None:
        notes.append("memory is that of evenly loaded experts")
    if job.debug.routing is not None and job.parallelism.ep > 1:
        layer = job.model.expert_layers[0]
        received = rows_by_rank(job, layer).sum(1)
        rows = f"{int(received.min()):,} to {int(received.max()):,} rows of a microbatch"
        notes.append(f"ranks of experts get {rows} in layer {layer} by debug.routing in step 1")
    if not job.data.attend_across_documents:
        notes.append("assumes attention across documents")
    if len(job.sizes.phases) > 1:
        notes.append("speed and memory are those of the full batch size and sequence length")
    if job.model.has_delta and job.training.delta_rule == "plain":
        notes.append(
            "time assumes a kernel of Gated DeltaNet; here it is plain torch, many launches of the host"
        )
    elif job.model.has_delta:
        notes.append("memory counts what Gated DeltaNet saves in plain torch, not in fla's kernels")
    if job.parallelism.cpu_offload:
        notes.append(
            "the time of copies from and to the host, and of the update there, is not counted"
        )
    notes.append(warning_of_eager(job.precision, compiled=job.compile.blocks))
    return [note for note in notes if note]


def faster_method(plan: Plan, calibration: Calibration) -> str | None:
    """Name another method of context parallel with which the job is faster by more than the plan's error."""
    job = plan.job
    if job.parallelism.cp == 1 or plan.speed is None:
        return None
    found = []
    for method in context_methods(job):
        layout = replace(job.parallelism, cp_method=method)
        other = make_plan(replace(job, parallelism=layout), calibration)
        assert other.speed is not None, "the hardware is the same"
        found.append((plan.speed.step_seconds / other.speed.step_seconds - 1, other.peak, method))
    gain, peak, method = max(found)
    if gain <= RESOLUTION.off:
        return None
    return f"parallelism.cp_method={method}: planned {gain:.0%} faster, with {gib(peak)} GiB"


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

    Minimizes the sum over rows of (log(predicted / measured) / ``NOISE``)^2 plus the sum over
    constants of (log(constant / start) / ``PRIOR``)^2, a maximum a posteriori estimate.
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
                    logs = tried
                    cost = new
                    improved = True
                    break
        if not improved:
            step /= 2
    return logs


def scale_constants(start: Calibration, logs: dict[str, float]) -> Calibration:
    """Multiply constants, which are fractions, by the exponentials of ``logs``."""
    values = {
        name: min(getattr(start.constants, name) * math.exp(log), 1.0) for name, log in logs.items()
    }
    return replace(start, constants=replace(start.constants, **values))


def render_fit(calibration: Calibration, rows: Sequence[Measured]) -> str:
    """Format the constants, and the prediction error of each run."""
    lines = [f"constants of {calibration.source}"]
    lines += [f"  {name:<10} {value:.3g}" for name, value in asdict(calibration.constants).items()]
    lines += ["", f"  {'measured':>10} {'planned':>10} {'error':>7}  tokens/s per rank"]
    errors = []
    for row in rows:
        measured = row.tokens_per_second_per_rank
        planned = predicted_rate(row.job, calibration)
        error = planned / measured - 1
        errors.append(abs(error))
        axes = degrees_in_words(row.job.parallelism.degrees, none="single")
        words = f"{axes}, {row.job.parallelism.pp_schedule}" if row.job.parallelism.pp > 1 else axes
        lines.append(f"  {measured:>10,.1f} {planned:>10,.1f} {error:>+7.1%}  {words}")
    lines.append(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    return "\n".join(lines)


def calibrate(
    measured: Sequence[Measured], folder: Path, cluster: ClusterConfig | None = None
) -> tuple[Calibration, list[Measured]]:
    """Fit constants to the runs of a folder; also returns the runs, on nodes with their hardware.

    ``cluster`` may describe their accelerator; else their own clusters do, or
    harness/util/hardware.py.

    Raises:
        UserError: there is no run, runs are from several devices, or their device is unknown.
    """
    devices = {one.device for one in measured}
    if not measured:
        raise UserError(f"calibrate={folder}: no completed run with a throughput")
    if len(devices) > 1:
        raise UserError(
            f"calibrate={folder}: runs are from several devices: {', '.join(sorted(devices))}"
        )
    [device] = devices
    source = f"{plural(len(measured), 'run')} of {folder}, {device}"
    if "CPU" in device:
        rule = "of which the plan has no times; would work: runs on GPUs"
        raise UserError(f"calibrate={folder}: runs are from {device}, {rule}")
    described = None if cluster is None else cluster.with_device(device)
    on_known = []
    for one in measured:
        if own := described or one.job.cluster.with_device(device):
            on_known.append(replace(one, job=one.job.on_accelerator_of(own)))
    if len(on_known) < len(measured):
        raise UserError(
            f"calibrate={folder}: runs are from {device}, which is unknown hardware; would work: a cluster "
            f"with its numbers and cluster.hardware.device_name='{device}'"
        )
    return fit(on_known, Calibration(START, source=source)), on_known
