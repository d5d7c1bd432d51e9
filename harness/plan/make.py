"""Make the plan of a job."""

from __future__ import annotations

from harness.job import Job
from harness.model.accounting import account
from harness.plan.constants import Calibration
from harness.plan.machine import device_of, machine_of
from harness.plan.memory import memory_limit, rank_memory
from harness.plan.memory_activations import on_cpu
from harness.plan.parameters import parameters_of_ranks
from harness.plan.plan import Plan
from harness.plan.speed import StepModel
from harness.precision.linears import warning_of_eager


def make_plan(job: Job, calibration: Calibration | None = None) -> Plan:
    """Predict memory, traffic and speed of a job.

    Args:
        job: the resolved job.
        calibration: constants other than the defaults, and measured hardware.
    """
    machine, device = machine_of(job, calibration), device_of(job, calibration)
    speed, traffic = (None, []) if machine is None else StepModel(job, machine).speed()
    parameters = parameters_of_ranks(job)
    return Plan(
        job=job,
        accounting=account(job.model, job.training.seq_len),
        parameters_per_rank=[rank.held for rank in parameters],
        memory=rank_memory(job, parameters),
        memory_limit=memory_limit(job, device),
        traffic=traffic,
        speed=speed,
        accelerator=None if device is None or on_cpu(job) else device,
        notes=_notes(job),
    )


def _notes(job: Job) -> list[str]:
    """What the predictions leave out, and what is known to be slow."""
    notes = []
    if job.model.moe.enabled and not job.model.moe.force_balance:
        notes.append("assumes evenly loaded experts")
    if not job.data.attend_across_documents:
        notes.append("assumes attention across documents")
    casts = warning_of_eager(job.precision, compiled=job.compile.blocks)
    return notes if casts is None else [*notes, casts]
