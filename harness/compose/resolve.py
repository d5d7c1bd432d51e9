"""Resolve a job: derive the fields that follow from others, and check the rules between its parts (no torch).

A rule raises ConfigError; the rules of one part are beside its fields.
"""

import dataclasses
import math
from operator import attrgetter
from typing import Any, TypeVar

from harness.compose.length import BATCH, check_length_of_scale, with_length
from harness.config.cluster import count_gpus
from harness.config.data_kinds import DATA_KINDS, check_sets
from harness.config.fields import check_rules
from harness.config.job import Job
from harness.config.optimizer import EIGHT_BIT
from harness.config.texts import validate_texts
from harness.config.training import BACKENDS, ScaleConfig
from harness.model.architecture import (
    architecture_of,
    context_methods,
    limit_of_ring,
    resolve_model,
    with_context_method,
)
from harness.model.decoder_architecture import DecoderArchitecture
from harness.model.spec import tensors
from harness.train.objective import objective_of
from harness.util.errors import ConfigError, as_typed, divisors

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
    job = resolve_layout(resolve_rest(job), launched_ranks=launched_ranks, gpus=gpus)
    job.cluster.check_losses(job.world_size, has_checkpoints=job.checkpoint.enable)
    return job


def resolve_rest(job: J) -> J:
    """The part of ``resolve`` that no layout or batch has an effect on, once the fields keep their rules."""
    job.validate_folder()
    job.cluster.validate()
    job.schedule.validate_phases()
    if job.feeds_model:
        objective = objective_of(job.model)
        job = dataclasses.replace(job, **objective.resolve(job.training, job.validation, job.model))
    return job


def resolve_layout(job: J, *, launched_ranks: int | None = None, gpus: int | None = None) -> J:
    """The part of ``resolve`` that layout and batch have an effect on, for a job that passed the rest."""
    model = resolve_model(job.model)
    here = job.cluster.is_here
    if gpus is None:
        gpus = count_gpus() if here and job.cluster.device != "cpu" else 0
    default = job.cluster.default_world_size or gpus or None
    if not here:
        launched_ranks = None  # a launcher here starts no ranks there
    by_launcher = " by WORLD_SIZE, which a launcher sets" if launched_ranks else ""
    ranks = launched_ranks or job.cluster.world_size
    layout = job.parallelism.resolve(ranks, default, by_launcher)
    if launched_ranks is None:
        job.cluster.nodes_for(layout.world_size)
        if here:
            job.cluster.validate_gpus(gpus, layout.world_size)
    job = dataclasses.replace(
        job,
        model=model,
        cluster=job.cluster.resolve(),
        data=job.data.resolve(),
        validation=job.validation.resolve(),
        metrics=job.metrics.resolve(),
        parallelism=layout,
        training=job.training.resolve(
            layout.data_parallel, [size for _, size in job.schedule.batch_sizes]
        ),
        optimizer=job.optimizer.resolve(job.precision.master_dtype, job.precision.param_dtype),
        schedule=job.schedule.resolve(),
    )
    job = with_context_method(with_length(job))
    _check_parts(job)
    on_cpu = job.cluster.device == "cpu" or (here and gpus == 0)
    check_gpu_options(job, on_cpu=on_cpu)
    check_cuda_graphs(job, on_cpu=on_cpu)
    job.training.check_device(on_cpu=on_cpu)
    check_score_cap(job, on_cpu=on_cpu)
    check_heads_of_flex(job)
    if job.precision.linear != "none":
        from harness.precision.linears import require_hardware, sort_linears

        experts = sort_linears(model, job.precision).has_experts
        require_hardware(job.precision, job.cluster, gpus if here else None, experts=experts)
    return job


def scale(job: J) -> J:
    """Return the job with ``scale`` applied, but for the warm-up, which depends on the steps."""
    left = ScaleConfig(warmup_ratio=job.scale.warmup_ratio)
    if job.scale == left:
        return job
    from harness.model.scale import apply_scale

    check_length_of_scale(job.scale, job.training)
    model, training, optimizer = apply_scale(
        job.scale, resolve_model(job.model), job.training, job.optimizer
    )
    return dataclasses.replace(job, scale=left, model=model, training=training, optimizer=optimizer)


def _check_parts(job: Job) -> None:
    if job.training.seq_len > job.model.max_seq_len:
        rule = f"must not exceed model.max_seq_len={job.model.max_seq_len}"
        raise ConfigError(
            "training.seq_len", job.training.seq_len, rule, f"at most {job.model.max_seq_len}"
        )
    share = job.local_batch_size * job.accumulation_steps
    job.parallelism.validate(job.model, job.training.seq_len, job.local_batch_size, share)
    check_attention(job)
    check_conversations(job)
    check_precision(job)
    job.compile.validate()
    job.activation_checkpoint.validate(job.compile)
    check_chunked_loss(job)
    job.data.validate()
    check_sets(job.data, job.validation.sets)
    if job.feeds_model:
        check_batches(job)
        objective_of(job.model).check(job)
    architecture = architecture_of(job.model)
    if job.metrics.activations and not isinstance(architecture, DecoderArchitecture):
        rule = f"looks at blocks of a decoder, and model.architecture is {job.model.architecture}"
        raise ConfigError("metrics.activations", True, rule, "false")
    job.tokenizer.validate()
    check_tokenizer(job)
    job.optimizer.validate(job.precision.master_dtype)
    check_optimizer_groups(job)
    check_scheduled_sizes(job)
    job.schedule.validate(job.steps)
    job.checkpoint.validate(job.steps)
    job.profiling.validate(job.steps, job.world_size)
    if job.cluster.device == "cpu":
        job.checkpoint.refuse_pinned_memory("cluster.device=cpu")
        job.profiling.refuse_snapshots("cluster.device=cpu")
    if job.validation.interval and not job.validation.sets:
        job.data.require_validation()
    job.evaluation.validate(job.data, job.training.seq_len)
    job.debug.validate(job.parallelism.tp, job.compile.blocks, job.checkpoint.writes)


FLEX_HEAD = 16
"""torch._inductor.kernel.flex: "embedding dimension of the query, key, and value must be at least
16"."""


def check_tokenizer(job: Job) -> None:
    kinds = sorted(kind for kind in job.kinds_of_data if DATA_KINDS[kind].source)
    if job.tokenizer.kind == "none" and kinds:
        rule = f"cannot encode text, and data.kind={kinds[0]} reads text"
        raise ConfigError(
            "tokenizer.kind", "none", rule, "data=tokens, or the tokenizer of the model"
        )


def check_chunked_loss(job: Job) -> None:
    layout = job.parallelism
    if job.training.loss_in_head and layout.tp > 1 and not layout.loss_parallel:
        name, value, off = _of_loss_in_head(job)
        rule = f"shards the vocabulary over parallelism.tp={layout.tp}, and parallelism.loss_parallel=false"
        raise ConfigError(name, value, rule, f"{off}, or parallelism.loss_parallel=true")


def _of_loss_in_head(job: Job) -> tuple[str, float, int]:
    """The field that makes the output projection compute the loss, its value, and the one without effect."""
    if job.training.loss_chunks > 1:
        return "training.loss_chunks", job.training.loss_chunks, 1
    return "training.z_loss", job.training.z_loss, 0


def check_gpu_options(job: Job, *, on_cpu: bool) -> None:
    """Check that options of torch for GPUs would have an effect.

    A row is a case in which a job cannot use a field, which then must have its default. The rule
    of a single off switch is beside its field (``needs``).
    """
    layout = job.parallelism
    is_ring = layout.cp > 1 and layout.cp_method == "ring"
    is_sdpa = job.training.attention == "sdpa" and not is_ring
    ranks_per_node = job.cluster.nodes_for(job.world_size)[1]
    off = "parallelism.async_tp=false"
    varlen = "default, or training.attention=varlen"
    # Field, whether it has no effect, the rule, and what would work.
    rows = [
        (
            "parallelism.async_tp",
            not (job.compile.blocks and job.compile.backend == "inductor"),
            "is a pass of the compiler, and blocks are not compiled by inductor",
            f"compile=on, or {off}",
        ),
        (
            "parallelism.async_tp",
            on_cpu,
            "needs GPUs with symmetric memory, and the ranks compute on CPUs",
            off,
        ),
        (
            "parallelism.async_tp",
            ranks_per_node % layout.tp != 0,
            f"needs tensor-parallel ranks on one node; ranks per node: {ranks_per_node}",
            f"{off}, or a parallelism.tp that divides {ranks_per_node}",
        ),
        (
            "parallelism.fsdp_buffers",
            on_cpu,
            "is memory of GPUs, and the ranks compute on CPUs",
            "default",
        ),
        (
            "parallelism.fsdp_buffers",
            layout.fsdp_buffers == "symmetric" and layout.async_tp,
            "is NCCL's symmetric memory, and parallelism.async_tp uses torch's: a process has one kind",
            f"default, registered, or {off}",
        ),
        (
            "training.flash",
            on_cpu,
            "is a kernel of GPUs, and the ranks compute on CPUs",
            "default",
        ),
        (
            "training.flash",
            job.precision.param_dtype == "float32",
            "needs 16-bit formats, and precision.param_dtype is float32",
            "default, or precision=bf16",
        ),
        (
            "training.flash",
            job.training.attention not in ("sdpa", "varlen"),
            f"training.attention={job.training.attention} has kernels of its own",
            varlen,
        ),
        (
            "training.flash",
            is_sdpa and not job.data.attend_across_documents,
            "sdpa masks documents, which flash attention cannot",
            varlen,
        ),
        (
            "training.flash",
            is_sdpa and job.model.head_width != job.model.value_width,
            f"in sdpa it needs keys and values of one width; {job.model.name} has two",
            varlen,
        ),
        (
            "training.delta_rule",
            not job.model.has_delta,
            "is of layers of Gated DeltaNet, and model.layer_kinds has none",
            "plain",
        ),
        (
            "training.delta_rule",
            on_cpu,
            "has kernels of GPUs, and the ranks compute on CPUs",
            "plain",
        ),
        (
            "training.delta_rule",
            not job.data.attend_across_documents,
            "lets states reach into other documents",
            "plain, or data.attend_across_documents=true",
        ),
        (
            "training.delta_rule",
            job.model.delta.by_channel,
            "has one decay per head, and model.delta.decay is channel",
            "plain",
        ),
        (
            "training.delta_rule",
            job.compile.blocks,
            "has functions that the compiler does not enter, and blocks are compiled as one graph",
            "plain, or compile=off",
        ),
        (
            "compile.mode",
            on_cpu,
            "tunes kernels of GPUs, and the ranks compute on CPUs",
            "default",
        ),
        (
            "compile.mode",
            job.debug.deterministic,
            "chooses kernels by their time, which debug.deterministic=true does not allow",
            "default, or debug.deterministic=false",
        ),
    ]
    for field, has_no_effect, rule, works in rows:
        part, _, name = field.partition(".")
        config = getattr(job, part)
        value = getattr(config, name)
        if has_no_effect and value != getattr(type(config), name):
            raise ConfigError(field, value, rule, works)


# What a field must be in a step that a device repeats without the host, and why.
CAPTURED: tuple[tuple[str, list[Any], str], ...] = (
    ("parallelism.pp", [1], "the host starts the passes of a pipeline"),
    ("parallelism.cpu_offload", [False], "the host updates offloaded parameters"),
    ("parallelism.async_tp", [False], "GPUs signal each other by counts of steps"),
    ("parallelism.fsdp_buffers", ["default"], "NCCL registers buffers outside of graphs"),
    ("schedule.batch_size", [[]], "all steps have one size"),
    ("schedule.seq_len", [[]], "all steps have one size"),
    (
        "optimizer.implementation",
        ["auto", "fused"],
        "the host computes factors of other updates",
    ),
    ("optimizer.qk_clip", [None], "the host starts another pass to measure logits"),
    ("debug.nan", [False], "the host looks at every output"),
    ("debug.anomaly", [False], "the host looks at every gradient"),
    ("debug.spikes", ["off", "log", "skip"], "a checkpoint is not loaded into it"),
    ("profiling.phases", [False], "the host times phases"),
)


def check_cuda_graphs(job: Job, *, on_cpu: bool) -> None:
    """Check that a device can repeat a step without the host, which decides nothing and waits for nothing."""
    if not job.compile.cuda_graphs:
        return
    rows = list(CAPTURED)
    if architecture_of(job.model).batches != "tokens":
        rows.append(("model.architecture", ["decoder"], "the host draws noise"))
    if not job.parallelism.fixes_messages:
        why = (
            "without parallelism.ep_capacity the host waits for the rows of experts on other ranks"
        )
        rows.append(("parallelism.ep", [1], why))
    if job.model.moe.enabled:
        why = "the host multiplies other experts one by one"
        rows.append(("precision.param_dtype", ["bfloat16"], why))
    if not job.data.attend_across_documents or job.model.attention.chunk is not None:
        why = "the host waits for the number of documents"
        rows.append(("training.attention", ["sdpa", "flex"], why))
    if job.compile.enable:
        backends = [name for name in BACKENDS if name != "cudagraphs"]
        rows.append(("compile.backend", backends, "a graph cannot be captured inside of another"))
    if on_cpu:
        rows.append(("cluster.device", ["cuda"], "CPUs have no graphs"))
    for field, values, why in rows:
        value = attrgetter(field)(job)
        if value not in values:
            rule = f"compile.cuda_graphs=true repeats a captured step, and {why}"
            works = [*map(as_typed, values), "compile.cuda_graphs=false"]
            raise ConfigError(field, value, rule, works)


def check_heads_of_flex(job: Job) -> None:
    narrowest = min(job.model.head_width, job.model.value_width)
    if job.training.attention == "flex" and narrowest < FLEX_HEAD:
        rule = f"needs a head dimension of at least {FLEX_HEAD}; model={job.model.name} has {narrowest}"
        raise ConfigError("training.attention", "flex", rule, ["sdpa"])


def check_score_cap(job: Job, *, on_cpu: bool) -> None:
    """Refuse a backend without a soft cap; on GPUs also the one that would have all scores in memory."""
    cap = job.model.attention.score_cap
    backend = job.training.attention
    works = "sdpa" if on_cpu else "flex"
    if cap is not None and backend != works:
        where = "CPUs" if on_cpu else "GPUs"
        rule = f"has no kernel on {where} with model.attention.score_cap={cap:g}"
        raise ConfigError("training.attention", backend, rule, [works])


def check_attention(job: Job) -> None:
    backend = job.training.attention
    layout = job.parallelism
    if backend == "varlen" and job.precision.param_dtype == "float32":
        rule = "flash attention over documents needs 16-bit formats, and precision.param_dtype is float32"
        raise ConfigError("training.attention", backend, rule, "precision=bf16, or sdpa, flex")
    if backend == "varlen" and job.model.attention.sinks:
        rule = f"flash attention does not support sinks, and model={job.model.name} has them"
        raise ConfigError("training.attention", backend, rule, ["sdpa", "flex"])
    if layout.cp == 1:
        return
    across = job.data.attend_across_documents
    if layout.balances_documents and (across or layout.cp_method != "gather"):
        rule = "needs parallelism.cp_method=gather and data.attend_across_documents=false"
        works = "true, or both"
        raise ConfigError("parallelism.cp_load_balance", layout.cp_load_balance, rule, works)
    limit = limit_of_ring(job)
    if layout.cp_method == "ring" and limit is not None:
        rule = f"its kernels support the causal mask of sdpa only, and this job has {limit}"
        raise ConfigError("parallelism.cp_method", "ring", rule, context_methods(job))
    allowed = architecture_of(job.model).context_methods
    if layout.cp_method not in allowed:
        rule = f"is not possible with model.architecture={job.model.architecture}"
        raise ConfigError("parallelism.cp_method", layout.cp_method, rule, allowed)


def _has_conversations(kinds: set[str]) -> bool:
    return any(DATA_KINDS[kind].has_whole for kind in kinds)


def check_conversations(job: Job) -> None:
    """Check that conversations are not cut, and that no layer depends on the position of one in its sample.

    Rotations are relative.
    """
    if not _has_conversations(job.kinds_of_data):
        return
    # Validation sets have the full length.
    if job.schedule.seq_len and _has_conversations(job.data.kinds):
        rule = "shorter sequences are pieces of samples, which would cut the conversations of data.kind=chat"
        raise ConfigError("schedule.seq_len", job.schedule.seq_len, rule, "[]")
    attention = job.model.attention
    most = attention.chunk or job.training.seq_len
    if attention.nope_temperature:
        # Positions 0 to floor - 2 have the same temperature.
        most = min(most, attention.nope_temperature_floor - 1)
    if job.training.seq_len > most:
        rule = (
            "model.attention.chunk and nope_temperature count positions from the beginning of a sample, and "
            "conversations of data.kind=chat begin anywhere"
        )
        raise ConfigError("training.seq_len", job.training.seq_len, rule, f"at most {most}")


def check_precision(job: Job) -> None:
    """Check the formats, and whether the shapes of the linears, after sharding, fit them."""
    job.precision.validate()
    if job.precision.linear == "none":
        return
    from harness.precision.linears import check_layout, sort_linears

    layout = job.parallelism
    linears = sort_linears(job.model, job.precision)
    if job.training.loss_in_head and "output" in linears.converted:
        name, value, off = _of_loss_in_head(job)
        rule = f"multiplies the output projection in param_dtype, not in {job.precision.linear}"
        filters = ",".join([*job.precision.filter_fqns, "output"])
        raise ConfigError(name, value, rule, f"{off}, or precision.filter_fqns=[{filters}]")
    check_layout(
        linears,
        job.model,
        job.precision,
        layout.tp,
        job.microbatch_size,
        job.training.seq_len // layout.cp,
        splits_experts=layout.splits_experts,
    )


def check_scheduled_sizes(job: Job) -> None:
    """Check that every size of schedule.batch_size and schedule.seq_len fits the data, layout and formats."""
    length = job.training.seq_len
    batch = job.global_batch_size
    unit = job.parallelism.sequence_unit
    for _, size in job.schedule.batch_sizes:
        if size > batch:
            rule = f"must not exceed training.global_batch_size={batch}, which applies after all phases"
            raise ConfigError("schedule.batch_size", size, rule, f"at most {batch}")
    block = 1 if job.precision.linear in ("none", "float8_rowwise_hp") else job.precision.block
    # Tokens that a linear takes at once: microbatch_size pieces, of one rank.
    unit = math.lcm(unit, job.parallelism.cp * block // math.gcd(block, job.microbatch_size))
    for _, size in job.schedule.seq_lens:
        if length % size or size % unit:
            rule = f"must divide training.seq_len={length}"
            if size % unit:
                rule += f" and be a multiple of {unit}, as the layout and precision.linear need"
            works = [divisor for divisor in divisors(length) if divisor % unit == 0]
            raise ConfigError("schedule.seq_len", size, rule, works)


def check_optimizer_groups(job: Job) -> None:
    if job.optimizer.state_dtype == EIGHT_BIT:
        from harness.optimizer.settings import check_blocks

        check_blocks(job.optimizer, tensors(job.model).values(), job.parallelism)
    if job.optimizer.groups:
        from harness.optimizer.settings import check_groups

        check_groups(job.optimizer, tensors(job.model))
    if job.optimizer.qk_clip is not None:
        from harness.optimizer.settings import check_qk_clip

        check_qk_clip(job.optimizer, job.model)
    if job.model.mup.base_dim is not None:
        from harness.optimizer.settings import check_mup

        check_mup(job.optimizer, job.model.mup.base_dim, tensors(job.model).values())


def check_batches(job: Job) -> None:
    wanted = architecture_of(job.model).batches
    kind_of = f"model={job.model.name} is a {job.model.architecture}"
    if job.validation.sets and wanted != "tokens":
        rule = f"{kind_of}, whose validation reads no sets"
        raise ConfigError(
            "validation.sets", ",".join(job.validation.sets), rule, "validation.sets={}"
        )
    kinds = [("data.kind", kind) for kind in sorted(job.data.kinds - {"mixture"})]
    kinds += [
        (f"validation.sets.{name}.kind", own.kind) for name, own in job.validation.sets.items()
    ]
    for field, kind in kinds:
        if DATA_KINDS[kind].batches != wanted:
            works = [name for name in DATA_KINDS if DATA_KINDS[name].batches == wanted]
            rule = f"{kind_of}, which does not train on this data"
            raise ConfigError(field, kind, rule, works)
    if wanted != "tokens" and job.empty_in_words is not None:
        unit = job.local_batch_size * job.parallelism.data_parallel
        rule = f"{kind_of}, whose batches have no empty rows, and here are {job.empty_in_words}"
        raise ConfigError(BATCH, job.global_batch_size, rule, f"multiples of {unit}")
