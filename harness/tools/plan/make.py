"""Make the plan of a job."""

from __future__ import annotations

from dataclasses import replace

from harness.config.job import Job
from harness.model.accounting import account
from harness.precision.linears import warning_of_eager
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration
from harness.tools.plan.machine import Machine, device_of, machine_of
from harness.tools.plan.memory import memory_limit, rank_memory
from harness.tools.plan.parameters import parameters_of_ranks
from harness.tools.plan.plan import Plan, PlannedPhase
from harness.tools.plan.step_time import StepModel


def calibration_of(job: PlanJob) -> Calibration | None:
    """Return the constants to plan with; None for the defaults."""
    return None if job.calibration is None else Calibration.read(job.calibration)


def make_plan(job: Job, calibration: Calibration | None = None) -> Plan:
    """Predict memory, traffic and speed of a resolved job, with the default constants or others."""
    return with_speed(plan_memory(job, calibration), calibration)


def with_speed(plan: Plan, calibration: Calibration | None = None) -> Plan:
    """Return a plan of memory with traffic and speed, which take longer to predict."""
    machine = machine_of(plan.job, calibration)
    if machine is None:
        return plan
    speed, traffic = StepModel(plan.job, machine).speed()
    return replace(plan, speed=speed, traffic=traffic, phases=_phases(plan.job, machine))


def plan_memory(job: Job, calibration: Calibration | None = None) -> Plan:
    """Predict only the memory of a job."""
    device, parameters = device_of(job), parameters_of_ranks(job)
    return Plan(
        job=job,
        accounting=account(job.model, job.training.seq_len),
        parameters_per_rank=[rank.held for rank in parameters],
        memory=rank_memory(job, parameters, None if calibration is None else calibration.software),
        memory_limit=memory_limit(job, device),
        traffic=[],
        speed=None,
        accelerator=device,
        notes=_notes(job),
        phases=_phases(job, None),
        is_calibrated=calibration is not None,
    )


def _phases(job: Job, machine: Machine | None) -> list[PlannedPhase]:
    phases = job.sizes.phases
    if len(phases) == 1:
        return []
    unscheduled = replace(job, schedule=replace(job.schedule, batch_size=[], seq_len=[]))
    planned = []
    for phase in phases:
        training = replace(job.training, global_batch_size=phase.batch_size, seq_len=phase.seq_len)
        of_phase = replace(unscheduled, training=training)
        time = None if machine is None else StepModel(of_phase, machine).speed()[0].step_seconds
        steps = phase.steps_until(job.steps)
        planned.append(PlannedPhase(phase.first_step, steps, phase.batch_size, phase.seq_len, time))
    return [each for each in planned if each.steps]


def _notes(job: Job) -> list[str]:
    notes = []
    if job.model.moe.enabled and not job.model.moe.force_balance:
        notes.append("memory is that of evenly loaded experts")
    if not job.data.attend_across_documents:
        notes.append("assumes attention across documents")
    if len(job.sizes.phases) > 1:
        notes.append("speed and memory are those of the full batch size and sequence length")
    if job.parallelism.cpu_offload:
        notes.append("the time of copies from and to the host, and of the update there, is not counted")
    casts = warning_of_eager(job.precision, compiled=job.compile.blocks)
    return notes if casts is None else [*notes, casts]
