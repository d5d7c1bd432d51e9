"""Render a plan as text, and as plain containers for JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig, degrees_in_words
from harness.config.pipeline import num_stages
from harness.model.architecture import architecture_of
from harness.tools.plan import bands
from harness.tools.plan.cost import cost_in_words
from harness.tools.plan.plan import KINDS, PARTS, Plan, RankMemory, Speed, Traffic
from harness.util.hardware import ACCELERATORS
from harness.util.tables import aligned, aligned_facts, counted, figure, gib, seconds

_WORDS = {"compute": "computing", "bubble": "pipeline bubble", "optimizer": "update"}


def render(plan: Plan) -> str:
    """Format a plan as ``harness plan`` prints it."""
    blocks = [
        aligned_facts(_facts(plan)),
        "memory at its peak, GiB on each rank\n" + aligned(_memory(plan), left={"ranks", "stages"}),
    ]
    if plan.traffic:
        title = "communication in a step, of the busiest rank\n"
        blocks.append(title + aligned(_traffic(plan.traffic), left={"axis", "collective", "link"}))
    if plan.speed is not None:
        blocks.append(
            f"a step, predicted: {seconds(plan.speed.step_seconds)}\n" + aligned_facts(_parts(plan))
        )
    if plan.phases:
        blocks.append("phases\n" + aligned(_phases(plan)))
    blocks.append(aligned_facts(_verdict(plan)))
    if plan.notes:
        blocks.append("notes\n" + "".join(f"  {note}\n" for note in plan.notes))
    return "\n".join(blocks)


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as plain containers for JSON; units are bytes, seconds and FLOPs."""
    job = plan.job
    return {
        "legal": True,
        "job": {"id": job.id, **job.to_dict()},
        "world_size": job.world_size,
        "mesh": job.parallelism.degrees | {"ep": job.parallelism.ep},
        "batch": {
            "global": job.global_batch_size,
            "local": job.local_batch_size,
            "accumulation_steps": job.accumulation_steps,
            "microbatches": _microbatches(job),
        },
        **dataclasses.asdict(plan.accounting),
        "parameters_per_rank": plan.parameters_per_rank,
        "memory": [dataclasses.asdict(rank) | {"peak": rank.peak} for rank in plan.memory],
        "memory_peak": plan.peak,
        "memory_limit": plan.memory_limit,
        "fits": plan.fits,
        "traffic": [dataclasses.asdict(each) for each in plan.traffic],
        "speed": None if plan.speed is None else _speed_as_dict(plan.speed),
        "accelerator": None if plan.accelerator is None else plan.accelerator.name,
        "budget": {
            "steps": job.steps,
            "tokens": tokens_of(job),
            "gpu_hours": plan.gpu_hours,
            "dollars": plan.dollars,
            "kwh": plan.kwh,
        },
        "bands": bands.as_dict(plan),
        "phases": [dataclasses.asdict(phase) for phase in plan.phases],
        "notes": plan.notes,
    }


def _speed_as_dict(speed: Speed) -> dict[str, Any]:
    own = dataclasses.asdict(dataclasses.replace(speed, timeline=[]))
    return own | {"timeline": [[action._asdict() for action in rank] for rank in speed.timeline]}


def tokens_of(job: Job) -> int:
    """Tokens of all steps of the job."""
    return job.sizes.tokens(job.steps)


def tokens_per_step(job: Job) -> int:
    """Tokens of one optimizer step of full size."""
    return job.global_batch_size * job.training.seq_len


def devices(plan: Plan, count: int) -> str:
    """Format a number of devices: ``8 x H100 SXM`` or ``2 ranks``."""
    if plan.accelerator is not None:
        return f"{count} x {plan.accelerator.name}"
    return f"{count} rank{'' if count == 1 else 's'}"


def mesh_of(layout: ParallelismConfig) -> str:
    """Degrees above 1, outermost first: ``pp 8 x dp_shard 8 x tp 8``."""
    experts = f", experts over ep {layout.ep}" if layout.ep > 1 else ""
    return degrees_in_words(layout.degrees, none="1 rank") + experts


def schedule_of(job: Job) -> str:
    """The pipeline schedule and its stages: ``Interleaved1F1B, 16 stages (2 on each rank)``."""
    layout = job.parallelism
    stages = num_stages(layout, job.model.n_layers)
    each = f" ({stages // layout.pp} on each rank)" if stages % layout.pp == 0 and stages > layout.pp else ""
    return f"{layout.pp_schedule_csv or layout.pp_schedule}, {stages} stages{each}"


def part_name(part: str) -> str:
    """Display name of one of ``PARTS``."""
    return _WORDS.get(part, f"{part} communication, exposed")


def _facts(plan: Plan) -> list[tuple[str, str]]:
    job, counts = plan.job, plan.accounting
    nodes, per_node = job.cluster.nodes_for(job.world_size)
    where = f", {nodes} nodes of {per_node}" if nodes > 1 else ""
    if job.cluster.link_nodes > 1 and nodes > 1 and plan.accelerator is not None:
        where += f", {plan.accelerator.link} joins {job.cluster.link_nodes} nodes"
    active = counts.active_parameters
    most, least = max(plan.parameters_per_rank), min(plan.parameters_per_rank)
    held = counted(most) if counted(most) == counted(least) else f"{counted(least)} to {counted(most)}"
    recompute = job.activation_checkpoint.mode
    facts = [
        ("job", f"{job.name} on {devices(plan, job.world_size)}{where}: legal"),
        ("mesh", mesh_of(job.parallelism)),
        ("batch", _batch(job)),
    ]
    if job.parallelism.pp > 1:
        facts.append(("schedule", schedule_of(job)))
    how = [f"activation checkpointing {recompute}", "compiled" if job.compile.blocks else "eager"]
    linear = job.precision.linear
    how.append(job.precision.param_dtype if linear == "none" else f"linears in {linear}")
    has_images = architecture_of(job.model).batches != "tokens"
    image = f"; {counts.flops_per_token_full * job.training.seq_len / 1e12:,.4g} TFLOP an image"
    facts += [
        ("execution", ", ".join(how)),
        ("parameters", f"{counted(counts.parameters)} in all, {counted(active)} active, {held} a rank"),
        (
            "FLOPs",
            f"{counts.flops_per_token_full / 1e9:,.4g} GFLOP a token (full attention), "
            f"{counts.flops_per_token_causal / 1e9:,.4g} (causal half){image if has_images else ''}",
        ),
    ]
    return facts


def _batch(job: Job) -> str:
    share, times = job.local_batch_size * job.accumulation_steps, job.accumulation_steps
    tokens = counted(tokens_per_step(job))
    text = f"{job.global_batch_size:,} x {job.training.seq_len:,} = {tokens} tokens a step"
    text += f"; {share} on each data-parallel rank"
    text += f", {times} passes of {job.local_batch_size}" if times > 1 else ""
    if job.parallelism.pp > 1:
        text += f", as {_microbatches(job)} microbatches of {job.parallelism.pp_microbatch_size}"
    return text


def _microbatches(job: Job) -> int:
    """Microbatches of one pass over a local batch."""
    return job.local_batch_size // job.parallelism.pp_microbatch_size if job.parallelism.pp > 1 else 1


def _memory(plan: Plan) -> list[dict[str, str]]:
    rows = []
    for group in _alike(plan.memory):
        first, last = group[0], group[-1]
        kinds = {kind: gib(first.kinds.get(kind, 0)) for kind in KINDS}
        rows.append(
            {
                "ranks": _span("pp", first.pp_rank, last.pp_rank) if len(plan.memory) > 1 else "all",
                "stages": _stages(group) if len(plan.memory) > 1 else "",
                **{kind: text if _appears(plan, kind) else "" for kind, text in kinds.items()},
                "peak": gib(first.peak),
            }
        )
    return rows


def _appears(plan: Plan, kind: str) -> bool:
    return any(rank.kinds.get(kind, 0) > 0 for rank in plan.memory)


def _alike(memory: Sequence[RankMemory]) -> list[list[RankMemory]]:
    """Group neighbouring pipeline ranks whose rows look the same."""
    groups: list[list[RankMemory]] = []
    for rank in memory:
        if groups and _shown(groups[-1][0]) == _shown(rank):
            groups[-1].append(rank)
        else:
            groups.append([rank])
    return groups


def _shown(rank: RankMemory) -> tuple[str, ...]:
    return (len(rank.stages) * ".", *(gib(rank.kinds.get(kind, 0)) for kind in KINDS), gib(rank.peak))


def _span(word: str, first: int, last: int) -> str:
    return f"{word} {first}" if first == last else f"{word} {first}-{last}"


def _stages(group: Sequence[RankMemory]) -> str:
    """Stages of neighbouring ranks, chunk by chunk: ``1-6, 9-14``."""
    spans = []
    for chunk in zip(*(rank.stages for rank in group), strict=True):
        low, high = min(chunk), max(chunk)
        spans.append(f"{low}" if low == high else f"{low}-{high}")
    return ", ".join(spans)


def _traffic(traffic: Sequence[Traffic]) -> list[dict[str, str]]:
    return [
        {
            "axis": each.axis,
            "collective": each.collective,
            "ranks": f"{each.ranks}",
            "link": each.link,
            "count": f"{each.count:,}",
            "GiB": gib(each.bytes),
            "time": seconds(each.seconds),
            "exposed": seconds(each.exposed_seconds),
        }
        for each in traffic
    ]


def _phases(plan: Plan) -> list[dict[str, str]]:
    return [
        {
            "steps": f"{phase.first_step:,}-{phase.first_step + phase.steps - 1:,}",
            "sequences": f"{phase.batch_size:,}",
            "tokens each": f"{phase.seq_len:,}",
            "tokens a step": counted(phase.batch_size * phase.seq_len),
            "a step": seconds(phase.step_seconds),
        }
        for phase in plan.phases
    ]


def _parts(plan: Plan) -> list[tuple[str, str]]:
    assert plan.speed is not None
    total = plan.speed.step_seconds
    shown = [(part, plan.speed.parts.get(part, 0.0)) for part in PARTS]
    return [
        (f"  {part_name(part)}", f"{seconds(value):>8}  {value / total:>6.1%}")
        for part, value in shown
        if value > 0
    ]


def _verdict(plan: Plan) -> list[tuple[str, str]]:
    """Speed, whether it fits, and the cost of all steps."""
    job, speed = plan.job, plan.speed
    unit = "GPU" if plan.accelerator is not None else "rank"
    facts = []
    if speed is None:
        facts.append(("time", _what_to_set(plan)))
    else:
        rate = speed.tokens_per_second_per_rank
        model = rate * plan.accounting.flops_per_token_full
        images = figure(rate * job.world_size / job.training.seq_len)
        also = f", {images} images/s" if architecture_of(job.model).batches != "tokens" else ""
        facts.append(
            ("throughput", f"{figure(rate)} tokens/s a {unit}, {figure(rate * job.world_size)} in all{also}")
        )
        if (band := bands.throughput_band(plan)) is not None:
            facts.append(("", band))
        mfu = "unknown" if speed.mfu is None else f"{speed.mfu:.1%}"
        facts.append(("MFU", f"{mfu}, {model / 1e12:,.4g} TFLOP/s a {unit} (full attention)"))
    facts.append(("fits", _fits(plan)))
    if (band := bands.memory_band(plan)) is not None:
        facts.append(("", band))
    total = f"{job.steps:,} steps, {counted(tokens_of(job))} tokens"
    if plan.gpu_hours is not None:
        hours = plan.gpu_hours / job.world_size
        took = (
            f"{hours / 24:,.1f} days"
            if hours >= 48
            else f"{hours:,.1f} h"
            if hours >= 1
            else seconds(hours * 3600)
        )
        total += f": {figure(plan.gpu_hours)} {unit}-hours, {took} on {devices(plan, job.world_size)}"
    facts.append(("budget", total))
    if cost := cost_in_words(plan):
        facts.append(("", cost))
    return facts


def _what_to_set(plan: Plan) -> str:
    if plan.accelerator is not None or plan.memory_limit is not None:
        return "unknown network between nodes; set cluster.network_gbps, e.g. 400 (Gbit/s for each device)"
    if plan.job.cluster.device == "cpu":
        return "unknown: the plan has no times of CPUs"
    known = ", ".join(ACCELERATORS)
    return (
        f"unknown hardware; set cluster.accelerator to one of {known}, or to a new name with the numbers of "
        "cluster.hardware"
    )


def _fits(plan: Plan) -> str:
    if plan.memory_limit is None:
        return f"unknown hardware; the fullest rank takes {gib(plan.peak)} GiB"
    room = plan.memory_limit - plan.peak
    usage = f"the fullest rank takes {gib(plan.peak)} of {gib(plan.memory_limit)} GiB"
    return f"yes: {usage}, {gib(room)} GiB left" if room >= 0 else f"NO: {usage}, {gib(-room)} GiB too many"
