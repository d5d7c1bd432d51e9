"""Resolve a job: derive the fields that follow from others, and check every rule (no torch)."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from harness.compose import rules
from harness.compose.scale import apply_scale
from harness.config.cluster import count_gpus
from harness.config.fields import check_rules
from harness.config.job import Job
from harness.config.scale import ScaleConfig
from harness.config.texts import validate_texts
from harness.model.architecture import resolve_model
from harness.precision.hardware import require_hardware
from harness.precision.linears import sort_linears
from harness.train.objective import objective_of
from harness.util.errors import ConfigError

J = TypeVar("J", bound=Job)


def resolve(job: J, *, launched_ranks: int | None = None, gpus: int | None = None) -> J:
    """Return the job with derived fields set, after a check of every rule.

    Args:
        job: the composed job.
        launched_ranks: number of ranks that torchrun started, if it did.
        gpus: GPUs of this machine; counted when None.

    Raises:
        ConfigError: naming the field, its value, the rule, and what would work.
    """
    validate_texts(job)
    check_rules(job)
    if (scaled := scale(job)) is not job:
        return resolve(scaled, launched_ranks=launched_ranks, gpus=gpus)
    job.validate_folder()
    job.cluster.validate()
    job.schedule.validate_phases()
    if job.feeds_model:
        objective = objective_of(job.model)
        job = dataclasses.replace(job, **objective.resolve(job.training, job.validation, job.model))
    return resolve_layout(job, launched_ranks=launched_ranks, gpus=gpus)


def resolve_layout(job: J, *, launched_ranks: int | None = None, gpus: int | None = None) -> J:
    """The part of ``resolve`` that layout and batch have an effect on, for a job that passed the rest."""
    model = resolve_model(job.model)
    here = job.cluster.is_here
    if gpus is None:
        gpus = count_gpus() if here and job.cluster.device != "cpu" else 0
    default = job.cluster.default_world_size or gpus or None
    layout = job.parallelism.resolve(launched_ranks or job.cluster.world_size, default)
    if launched_ranks is None:
        job.cluster.nodes_for(layout.world_size)
        if here:
            job.cluster.validate_gpus(gpus, layout.world_size)
    job = dataclasses.replace(
        job,
        model=model,
        cluster=job.cluster.resolve(),
        data=job.data.resolve(),
        metrics=job.metrics.resolve(),
        parallelism=layout,
        training=job.training.resolve(layout.data_parallel, [size for _, size in job.schedule.batch_sizes]),
        optimizer=job.optimizer.resolve(job.precision.master_dtype, job.precision.param_dtype),
        schedule=job.schedule.resolve(),
    )
    job = dataclasses.replace(job, training=job.training.with_length(job.sizes))
    schedule = job.scale.warmed_up(job.schedule, job.steps)
    job = dataclasses.replace(job, schedule=schedule, scale=ScaleConfig())
    _check_parts(job)
    on_cpu = job.cluster.device == "cpu" or (here and gpus == 0)
    rules.check_async_tp(job, on_cpu=on_cpu)
    job.training.check_device(on_cpu=on_cpu)
    rules.check_heads_of_flex(job)
    experts = job.precision.linear != "none" and sort_linears(model, job.precision).has_experts
    require_hardware(job.precision, job.cluster, gpus if here else None, experts=experts)
    return job


def scale(job: J) -> J:
    """Return the job with ``scale`` applied, but for the warm-up, which depends on the steps.

    Raises:
        ConfigError: the fields contradict each other or the job, or no model has the size.
    """
    left = ScaleConfig(warmup_ratio=job.scale.warmup_ratio)
    if job.scale == left:
        return job
    model, training, optimizer = apply_scale(job.scale, resolve_model(job.model), job.training, job.optimizer)
    return dataclasses.replace(job, scale=left, model=model, training=training, optimizer=optimizer)


def _check_parts(job: Job) -> None:
    """Check every part, and the rules between parts."""
    if job.training.seq_len > job.model.max_seq_len:
        raise ConfigError(
            "training.seq_len",
            job.training.seq_len,
            f"must not exceed model.max_seq_len={job.model.max_seq_len}",
            f"at most {job.model.max_seq_len}",
        )
    share = job.local_batch_size * job.accumulation_steps
    job.parallelism.validate(job.model, job.training.seq_len, job.local_batch_size, share)
    rules.check_torch(job)
    rules.check_attention(job)
    rules.check_conversations(job)
    rules.check_precision(job)
    job.compile.validate()
    job.activation_checkpoint.validate(job.compile, splits_backward=job.parallelism.splits_backward)
    rules.check_compiled_experts(job)
    rules.check_chunked_loss(job)
    job.data.validate()
    if job.feeds_model:
        rules.check_batches(job)
        objective_of(job.model).check(job)
    job.tokenizer.validate()
    rules.check_tokenizer(job)
    job.optimizer.validate(job.precision.master_dtype)
    rules.check_optimizer_groups(job)
    rules.check_scheduled_sizes(job)
    rules.check_update_in_backward(job)
    job.schedule.validate(job.steps)
    job.checkpoint.validate()
    job.profiling.validate(job.steps, job.world_size)
    rules.check_slow_ranks(job)
    if job.cluster.device == "cpu":
        job.checkpoint.refuse_pinned_memory("cluster.device=cpu")
        job.profiling.refuse_snapshots("cluster.device=cpu")
    if job.validation.interval:
        job.data.require_validation()
    job.evaluation.validate(job.data, job.training.seq_len)
    job.debug.validate(job.parallelism.tp, job.compile.blocks)
