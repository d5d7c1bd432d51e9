"""Render a plan as text, and as plain containers for JSON."""

import dataclasses
from itertools import groupby
from typing import Any

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig, degrees_in_words
from harness.config.pipeline import num_stages
from harness.model.scale import count
from harness.tools.plan.costs import costs_of
from harness.tools.plan.evidence import bands_of
from harness.tools.plan.plan import KINDS, PARTS, Plan, RankMemory
from harness.util.tables import Column, Table, aligned_facts, columns_of, to_text
from harness.util.words import counted, dollars, figure, gib, plural, seconds

_WORDS = {"compute": "computing", "bubble": "pipeline bubble", "optimizer": "update"}
_TRAFFIC = columns_of("""
    axis             axis
    collective       collective
    ranks            ranks            d
    link             link
    count            count            ,
    bytes            GiB              gib
    seconds          time             seconds
    exposed_seconds  exposed          seconds
""")
_PHASES = columns_of("""
    steps            steps            s
    batch_size       sequences        ,
    seq_len          tokens each      ,
    tokens           tokens per step  counted
    step_seconds     a step           seconds
""")


def render(plan: Plan) -> str:
    """Format a plan as ``harness plan`` prints it."""
    blocks = [
        aligned_facts(_facts(plan)),
        "memory at its peak, GiB on each rank\n" + to_text(_memory(plan), "  "),
    ]
    if plan.traffic:
        rows = [dataclasses.asdict(each) for each in plan.traffic]
        table = to_text(Table(_TRAFFIC, rows, missing=""), "  ")
        blocks.append(f"communication in a step, of the busiest rank\n{table}")
    if plan.speed is not None:
        total = plan.speed.step_seconds
        parts = plan.speed.parts
        facts = [
            (f"  {part_name(part)}", f"{seconds(parts[part]):>8}  {parts[part] / total:>6.1%}")
            for part in PARTS
            if parts[part] > 0
        ]
        blocks.append(f"a step, predicted: {seconds(total)}\n{aligned_facts(facts)}")
    if plan.phases:
        rows = [
            dataclasses.asdict(each)
            | {
                "steps": f"{each.first_step:,}-{each.first_step + each.steps - 1:,}",
                "tokens": each.batch_size * each.seq_len,
            }
            for each in plan.phases
        ]
        blocks.append("phases\n" + to_text(Table(_PHASES, rows, missing=""), "  "))
    blocks.append(aligned_facts(_verdict(plan)))
    if plan.notes:
        blocks.append("notes\n" + "".join(f"  {note}\n" for note in plan.notes))
    return "\n".join(blocks)


def in_short(plan: Plan) -> dict[str, Any]:
    """The figures by which plans are compared, and what all steps cost; None if unknown."""
    tokens = tokens_of(plan.job)
    of_speed = ("step_seconds", "tokens_per_second_per_rank", "mfu")
    return {
        "fits": plan.fits,
        "memory_peak": plan.peak,
        **{name: getattr(plan.speed, name, None) for name in of_speed},
        "parameters": plan.accounting.parameters,
        "non_embedding_parameters": count(plan.job.model, "non_embedding"),
        "tokens": tokens,
        "flops": plan.accounting.flops_per_token_full * tokens,
        "gpu_hours": plan.gpu_hours,
        "dollars": plan.dollars,
    }


def figure_columns(rate: str) -> list[Column]:
    """Columns of ``in_short`` in every table of plans; ``rate`` is the heading of tokens per second."""
    return columns_of(f"""
        memory_peak                 GiB     gib
        step_seconds                step    seconds
        tokens_per_second_per_rank  {rate}  figure
        mfu                         MFU     .1%
    """)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain containers for JSON; units are bytes, seconds and FLOPs."""
    job = plan.job
    speed = None
    if plan.speed is not None:
        speed = dataclasses.asdict(dataclasses.replace(plan.speed, timeline=[]))
        speed["timeline"] = [[action._asdict() for action in rank] for rank in plan.speed.timeline]
    return {
        "legal": True,
        "job": {"id": job.id, **job.to_dict()},
        "world_size": job.world_size,
        "mesh": job.parallelism.degrees | {"ep": job.parallelism.ep},
        "batch": {
            "global": job.global_batch_size,
            "local": job.local_batch_size,
            "accumulation_steps": job.accumulation_steps,
            "microbatches": job.microbatches,
        },
        **dataclasses.asdict(plan.accounting),
        "parameters_per_rank": plan.parameters_per_rank,
        "memory": [dataclasses.asdict(rank) | {"peak": rank.peak} for rank in plan.memory],
        "memory_peak": plan.peak,
        "memory_limit": plan.memory_limit,
        "fits": plan.fits,
        "traffic": [dataclasses.asdict(each) for each in plan.traffic],
        "speed": speed,
        "accelerator": None if plan.accelerator is None else plan.accelerator.name,
        "budget": {
            "steps": job.steps,
            "tokens": tokens_of(job),
            "gpu_hours": plan.gpu_hours,
            "dollars": plan.dollars,
        },
        "bands": {of: band and band._asdict() for of, band in bands_of(plan).items()},
        "phases": [dataclasses.asdict(phase) for phase in plan.phases],
        "notes": plan.notes,
    }


def tokens_of(job: Job) -> int:
    """Tokens of all steps of the job."""
    return job.sizes.tokens(job.steps)


def batch_in_words(job: Job) -> str:
    """Sequences, their length, and tokens of one optimizer step of full size."""
    tokens = counted(job.global_batch_size * job.training.seq_len)
    return f"{job.global_batch_size:,} x {job.training.seq_len:,} = {tokens} tokens per step"


def devices(plan: Plan) -> str:
    """The devices of the job: ``8 x H100 SXM`` or ``2 ranks``."""
    count = plan.job.world_size
    if plan.accelerator is not None:
        return f"{count} x {plan.accelerator.name}"
    return plural(count, "rank")


def nodes_in_words(job: Job) -> str:
    """``, 64 nodes of 8``; empty on one node."""
    nodes, per_node = job.cluster.nodes_for(job.world_size)
    return f", {nodes} nodes of {per_node}" if nodes > 1 else ""


def mesh_of(layout: ParallelismConfig) -> str:
    """Degrees above 1, outermost first: ``pp 8 x dp_shard 8 x tp 8``."""
    experts = f", experts over ep {layout.ep}" if layout.ep > 1 else ""
    method = f", {layout.cp_method}" if layout.cp > 1 else ""
    return degrees_in_words(layout.degrees, none="1 rank") + method + experts


def schedule_of(job: Job) -> str:
    """The pipeline schedule and its stages: ``Interleaved1F1B, 16 stages (2 on each rank)``."""
    layout = job.parallelism
    stages = num_stages(layout, job.model.n_layers)
    each = (
        f" ({stages // layout.pp} on each rank)"
        if stages % layout.pp == 0 and stages > layout.pp
        else ""
    )
    return f"{layout.pp_schedule_csv or layout.pp_schedule}, {stages} stages{each}"


def part_name(part: str) -> str:
    """Display name of one of ``PARTS``."""
    return _WORDS.get(part, f"{part} communication, exposed")


def cost_in_words(plan: Plan) -> str:
    """Price of all steps with the assumption; empty if it is unknown."""
    if plan.dollars is None:
        return ""
    return f"{dollars(plan.dollars)} at ${plan.job.cluster.dollars_per_gpu_hour:g} per GPU-hour"


def _facts(plan: Plan) -> list[tuple[str, str]]:
    job = plan.job
    counts = plan.accounting
    where = nodes_in_words(job)
    if job.cluster.link_nodes > 1 and where and plan.accelerator is not None:
        where += f", {plan.accelerator.link} joins {job.cluster.link_nodes} nodes"
    times = job.accumulation_steps
    share = job.local_batch_size * times
    batch = f"{batch_in_words(job)}; {share} on each data-parallel rank"
    if times > 1:
        batch += f", {times} passes of {job.local_batch_size}"
    if job.parallelism.pp > 1:
        batch += f", as {job.microbatches} microbatches of {job.parallelism.pp_microbatch_size}"
    facts = [
        ("job", f"{job.name} on {devices(plan)}{where}: legal"),
        ("mesh", mesh_of(job.parallelism)),
        ("batch", batch),
    ]
    if job.parallelism.pp > 1:
        facts.append(("schedule", schedule_of(job)))
    linear = job.precision.linear
    compiled = "compiled" if job.compile.blocks else "eager"
    values = job.precision.param_dtype if linear == "none" else f"linears in {linear}"
    least, most = (counted(end(plan.parameters_per_rank)) for end in (min, max))
    held = most if most == least else f"{least} to {most}"
    flops = (
        f"{counts.flops_per_token_full / 1e9:,.4g} GFLOP per token (full attention), "
        f"{counts.flops_per_token_causal / 1e9:,.4g} (causal half)"
    )
    if sample := costs_of(job.model).sample:
        flops += (
            f"; {counts.flops_per_token_full * job.training.seq_len / 1e12:,.4g} TFLOP an {sample}"
        )
    execution = f"activation checkpointing {job.activation_checkpoint.mode}, {compiled}, {values}"
    parameters = f"{counted(counts.parameters)} in all, {counted(counts.active_parameters)} active"
    return [
        *facts,
        ("execution", execution),
        ("parameters", f"{parameters}, {held} per rank"),
        ("FLOPs", flops),
    ]


def _memory(plan: Plan) -> Table:
    """The kinds that some rank has; one row for neighbouring pipeline ranks that look the same."""
    kinds = [kind for kind in KINDS if any(rank.kinds[kind] > 0 for rank in plan.memory)]

    def shown(rank: RankMemory) -> tuple[object, ...]:
        return len(rank.stages), *(gib(rank.kinds[kind]) for kind in kinds), gib(rank.peak)

    rows = []
    for _, group in groupby(plan.memory, key=shown):
        alike = list(group)
        first = alike[0]
        # Stages chunk by chunk: 1-6, 9-14.
        chunks = zip(*(rank.stages for rank in alike), strict=True)
        spans = [_span(min(chunk), max(chunk)) for chunk in chunks]
        where = {"ranks": "all"}
        if len(plan.memory) > 1:
            ranks = _span(first.pp_rank, alike[-1].pp_rank)
            where = {"ranks": f"pp {ranks}", "stages": ", ".join(spans)}
        rows.append({**where, **first.kinds, "peak": first.peak})
    columns = [Column("ranks", "ranks"), Column("stages", "stages")]
    columns += [Column(name, name, gib) for name in [*kinds, "peak"]]
    return Table(columns, rows, missing="")


def _span(first: int, last: int) -> str:
    return f"{first}" if first == last else f"{first}-{last}"


def _verdict(plan: Plan) -> list[tuple[str, str]]:
    job = plan.job
    speed = plan.speed
    bands = bands_of(plan)
    facts = []
    if speed is None and (plan.accelerator is not None or plan.memory_limit is not None):
        what = "cluster.network_gbps, e.g. 400 (Gbit/s for each device)"
        facts.append(("time", f"unknown network between nodes; set {what}"))
    elif speed is None and job.cluster.device == "cpu":
        facts.append(("time", "unknown: the plan has no times of CPUs"))
    elif speed is None:
        works = "cluster=slurm_h100, or cluster.accelerator='H100 SXM'"
        facts.append(("time", f"unknown hardware; would work: {works}"))
    else:
        rate = speed.tokens_per_second_per_rank
        in_all = rate * job.world_size
        sample = costs_of(job.model).sample
        also = f", {figure(in_all / job.training.seq_len)} {sample}s/s" if sample else ""
        facts.append(
            ("throughput", f"{figure(rate)} tokens/s per GPU, {figure(in_all)} in all{also}")
        )
        if band := bands["throughput"]:
            facts.append(("", band.in_words(figure, "tokens/s per GPU")))
        mfu = "unknown" if speed.mfu is None else f"{speed.mfu:.1%}"
        model = rate * plan.accounting.flops_per_token_full
        facts.append(("MFU", f"{mfu}, {model / 1e12:,.4g} TFLOP/s per GPU (full attention)"))
    used = f"the fullest rank takes {gib(plan.peak)}"
    if plan.memory_limit is None:
        facts.append(("fits", f"unknown hardware; {used} GiB"))
    else:
        room = plan.memory_limit - plan.peak
        used = f"{used} of {gib(plan.memory_limit)} GiB"
        fits = (
            f"yes: {used}, {gib(room)} GiB left"
            if room >= 0
            else f"NO: {used}, {gib(-room)} GiB too many"
        )
        facts.append(("fits", fits))
    if band := bands["memory"]:
        doubt = ""
        limit = plan.memory_limit
        if limit and band.low and band.high and band.low <= limit < band.high:
            doubt = "; it may not fit" if plan.fits else "; it may fit"
        facts.append(("", band.in_words(gib, "GiB") + doubt))
    total = f"{plural(job.steps, 'step')}, {counted(tokens_of(job))} tokens"
    if plan.gpu_hours is not None:
        hours = plan.gpu_hours / job.world_size
        took = f"{hours / 24:,.1f} days" if hours >= 48 else f"{hours:,.1f} h"
        took = took if hours >= 1 else seconds(hours * 3600)
        total += f": {figure(plan.gpu_hours)} GPU-hours, {took} on {devices(plan)}"
    facts.append(("budget", total))
    if cost := cost_in_words(plan):
        facts.append(("", cost))
    return facts
