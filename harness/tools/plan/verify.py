"""Build the job on a fake process group and compare every pipeline rank's shards with the plan.

The layout, optimizer and schedule are those of training, without values. Only the first rank of each pipeline
rank is built, and the last if shards are uneven; others have the same shards.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config.job import Job
from harness.config.optimizer import KINDS
from harness.config.pipeline import stages_of_rank
from harness.metrics.memory import peak_memory_gib
from harness.model.part import ModelPart
from harness.model.spec import parameter_shapes, tensors
from harness.optimizer.build import build_optimizer
from harness.optimizer.settings import exchanges, kind_of
from harness.parallelism.loss import TokenLoss
from harness.parallelism.materialize import allocate
from harness.parallelism.mesh import EXPERT, EXPERT_SHARD, EXPERT_TENSOR, SHARD, Mesh, build_mesh, stage_group
from harness.parallelism.parallelize import build_on_meta
from harness.parallelism.pipeline import build_schedule
from harness.precision.swap import plain
from harness.tools.plan.fake import CPU, cpu_version, fake_process_group, fake_tensors, stages_in
from harness.tools.plan.fake_step import FakeStep, fake_steps
from harness.tools.plan.meter import WORLD, Meter
from harness.tools.plan.parameters import HeldTensor, RankParameters, parameters_of
from harness.tools.plan.plan import Plan
from harness.tools.plan.update import planned_update
from harness.train.setup import silence_known_noise
from harness.util.tables import GIB, aligned

UPDATE_TOLERANCE = 1.1
"""How many times what the plan says the first rank may exchange and compute in an update."""


@dataclass(frozen=True)
class VerifiedRank:
    """The first rank of a pipeline rank, as it was built."""

    pp_rank: int
    stages: tuple[int, ...]
    parameter_bytes: int
    """Bytes of its parameter shards."""
    buffer_bytes: int
    """Bytes of its buffers: rotation tables, positions, balancing biases of experts."""
    gradient_bytes: int
    """Bytes of all gradients."""
    optimizer_bytes: int
    """Bytes of the optimizer's state."""
    dtensors: int
    """Number of parameters that are DTensors; the others are replicated."""
    problems: list[str] = field(default_factory=list)
    """Differences from the plan."""
    step: FakeStep | None = None
    """Measurements of a step, if one was run."""


@dataclass(frozen=True)
class Verified:
    """The result of building a job."""

    ranks: list[VerifiedRank]
    """One for each pipeline rank."""
    problems: list[str]
    """All differences from the plan; empty when everything agrees."""
    notes: list[str]
    """What was left out or replaced because there is no GPU."""
    seconds: float
    """Time it took."""
    memory: float
    """Peak of this process's resident memory, bytes."""


def verify(plan: Plan, *, step: bool = False) -> Verified:
    """Build the ranks of a plan's job and compare them with the plan.

    Args:
        plan: the plan.
        step: whether to also run a step of each pipeline rank on fake tensors.

    Raises:
        UserError: this process already is a rank.
        ConfigError: the job cannot be built.
    """
    start = time.perf_counter()
    silence_known_noise()
    job, notes = cpu_version(plan.job)
    if step and not plan.job.data.attend_across_documents:
        notes.append("the step's sequences are single documents: ends of documents are unknown without data")
    ranks, names = [], Counter[str]()
    for pp_rank in range(job.parallelism.pp):
        rank, held = _build(job, pp_rank)
        names.update(held)
        ranks.append(rank)
    problems = [f"pipeline rank {rank.pp_rank}: {problem}" for rank in ranks for problem in rank.problems]
    problems += [*_held_once(job, names), *_against_memory(plan, ranks)]
    if step:
        ranks = [replace(rank, step=of_rank) for rank, of_rank in zip(ranks, fake_steps(job), strict=True)]
    return Verified(ranks, problems, notes, time.perf_counter() - start, peak_memory_gib("cpu") * GIB)


def render_verified(verified: Verified, plan: Plan) -> list[str]:
    """The result of building a job, as lines of text."""
    dtensors = sum(rank.dtensors for rank in verified.ranks)
    count = f"{len(verified.ranks)} of {plan.job.world_size} ranks"
    used = f"{verified.seconds:.0f} s, {verified.memory / GIB:.1f} GiB of this process"
    agrees = f"{len(verified.problems)} problems" if verified.problems else "agrees with the plan"
    lines = [f"really built, without values: {count}, {dtensors:,} DTensors; {agrees} ({used})"]
    lines += [f"  problem: {problem}" for problem in verified.problems]
    axes = sorted({axis for rank in verified.ranks if rank.step for axis in rank.step.sent} - {WORLD})
    header = ["pipeline rank", "stages", "parameters", "gradients", "optimizer"]
    if any(rank.step for rank in verified.ranks):
        header += ["between steps", "peak alive", "planned", "TFLOPs"]
        header += [f"{axis} sent" for axis in axes]
    rows = [_row(rank, said.allocated, axes) for rank, said in zip(verified.ranks, plan.memory, strict=True)]
    lines += aligned([dict(zip(header, row, strict=True)) for row in rows]).splitlines()
    if axes:
        lines.append(
            "  a step on fake tensors; memory at its peak, above, has what an allocator adds to planned"
        )
    return [*lines, "  in GiB", *(f"  note: {note}" for note in verified.notes)]


def _row(rank: VerifiedRank, planned_peak: float, axes: list[str]) -> list[str]:
    sizes = [rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes]
    row = [str(rank.pp_rank), ",".join(map(str, rank.stages)), *map(_gib, sizes)]
    if rank.step is None:
        return row
    row += map(_gib, (rank.step.rest, rank.step.peak, planned_peak))
    return [*row, f"{rank.step.flops / 1e12:,.4g}", *(_gib(rank.step.sent.get(axis, 0.0)) for axis in axes)]


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}"


def _held_once(job: Job, names: Counter[str]) -> Iterator[str]:
    """Yield parameters that are in no stage or in several, or that the model does not have."""
    of_model = parameter_shapes(job.model)
    for name in [*of_model, *(name for name in names if name not in of_model)]:
        if names[name] != 1 or name not in of_model:
            yield f"{name}: {names[name]} stages hold it, the model has {int(name in of_model)}"


def _against_memory(plan: Plan, ranks: Sequence[VerifiedRank]) -> Iterator[str]:
    """Problems of the plan's memory: stages of each rank, and memory between steps."""
    for said, built in zip(plan.memory, ranks, strict=True):
        where = f"pipeline rank {built.pp_rank}"
        if said.stages != built.stages:
            yield f"{where}: holds stages {built.stages}, the plan says {said.stages}"
        if plan.job.parallelism.cpu_offload:
            continue  # offloaded to host memory
        if built.problems:
            continue  # they are more specific
        planned, least = said.kinds["parameters"], built.parameter_bytes
        if not least <= planned <= least + built.buffer_bytes:
            most = f"{least:,} bytes, and {built.buffer_bytes:,} of buffers"
            yield f"{where}: parameters are {most}; the plan's memory has {planned:,.0f}"
        planned, least = said.kinds["optimizer"], built.optimizer_bytes
        if planned != least:
            yield f"{where}: optimizer state is {least:,} bytes; the plan's memory has {planned:,.0f}"


def _build(job: Job, pp_rank: int) -> tuple[VerifiedRank, list[str]]:
    """Build the first rank of a pipeline rank, and the last if shards are uneven; also returns names."""
    said, in_stage = parameters_of(job, pp_rank), job.world_size // job.parallelism.pp
    first = pp_rank * in_stage
    with fake_process_group(first, job.world_size):
        mesh = build_mesh(job.parallelism, CPU, has_experts=job.model.moe.enabled)
        parts = build_on_meta(job, mesh, CPU)
        named = [pair for part in parts for pair in part.named_parameters()]
        problems = list(_layout_problems(job, mesh, named, said))
        if job.parallelism.pp > 1:
            problems += _schedule_problems(job, mesh, parts)
        # With a wrong layout the optimizer may fail.
        built: tuple[int, int, list[str]] = (0, 0, [])
        if not problems:
            built = _optimizer_state(job, mesh, parts, said)
        rank = VerifiedRank(
            pp_rank,
            tuple(stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)),
            parameter_bytes=sum(_bytes(parameter) for _, parameter in named),
            buffer_bytes=sum(_bytes(buffer) for part in parts for buffer in part.buffers()),
            gradient_bytes=built[1],
            optimizer_bytes=built[0],
            dtensors=sum(isinstance(parameter, DTensor) for _, parameter in named),
            problems=[*problems, *built[2]],
        )
    if not problems:
        rank.problems.extend(_byte_problems(rank, said))
    if in_stage > 1 and any(_is_uneven(parameter) for _, parameter in named):
        with fake_process_group(first + in_stage - 1, job.world_size):
            mesh = build_mesh(job.parallelism, CPU, has_experts=job.model.moe.enabled)
            last = [pair for part in build_on_meta(job, mesh, CPU) for pair in part.named_parameters()]
            rank.problems.extend(f"last rank: {found}" for found in _layout_problems(job, mesh, last, said))
    return rank, [name for name, _ in named]


def _is_uneven(parameter: Tensor) -> bool:
    """Whether other ranks have smaller shards of the parameter."""
    if not isinstance(parameter, DTensor):
        return False
    pieces = prod(
        size
        for placement, size in zip(parameter.placements, parameter.device_mesh.shape, strict=True)
        if not placement.is_replicate()
    )
    return parameter.to_local().numel() * pieces != parameter.numel()


def _layout_problems(
    job: Job, mesh: Mesh, named: Sequence[tuple[str, Tensor]], said: RankParameters
) -> Iterator[str]:
    """Problems of shapes, placements and formats."""
    tensors = {tensor.name: tensor for tensor in said.tensors if not tensor.is_buffer}
    for name in tensors.keys() - {name for name, _ in named}:
        yield f"{name}: is not there"
    for name, parameter in named:
        if name not in tensors:
            yield f"{name}: is not the stage's"
            continue
        for what, built, expected in _compared(job, mesh, parameter, tensors[name]):
            if built != expected:
                yield f"{name}: {what} is {built}, expected {expected}"


def _compared(
    job: Job, mesh: Mesh, parameter: Tensor, tensor: HeldTensor
) -> Iterator[tuple[str, object, object]]:
    """Properties of a parameter: name, actual value, expected value."""
    yield "format", str(parameter.dtype).removeprefix("torch."), job.precision.master_dtype
    yield "shape", tuple(parameter.shape), tensor.spec.shape
    expected = _splits(job, mesh, tensor)
    built: dict[str, tuple[int, int | None]] = {}
    places: dict[str, int] = {}
    if isinstance(parameter, DTensor):
        axes, on = parameter.device_mesh.mesh_dim_names or (), parameter.device_mesh
        dims = [getattr(placement, "dim", None) for placement in parameter.placements]
        built = dict(zip(axes, zip(on.shape, dims, strict=True), strict=True))
        places = dict(zip(axes, on.get_coordinate() or (), strict=True))
        parameter = parameter.to_local()
    yield "ranks and dimension of every axis", built, expected
    if built == expected:
        yield "shape here", tuple(parameter.shape), _own_shape(tensor.spec.shape, expected, places)
        if not any(places.values()):
            yield "shape on the first rank", tuple(parameter.shape), tensor.sharded


def _splits(job: Job, mesh: Mesh, tensor: HeldTensor) -> dict[str, tuple[int, int | None]]:
    """Size of every mesh axis of a parameter, and the dimension that it splits, if any.

    In the order of the mesh: replicas, FSDP, then tensor or expert parallel.
    """
    layout, axes = job.parallelism, dict[str, tuple[int, int | None]]()
    sharded, split_dim = job.uses_fsdp, tensor.spec.split_dim
    if sharded and layout.dp_replicate > 1:
        axes["dp_replicate"] = layout.dp_replicate, None
    if tensor.spec.is_expert and layout.has_expert_mesh:
        if sharded:
            axes[EXPERT_SHARD] = layout.expert_shards, tensor.shard_dim
        if layout.ep > 1:
            axes[EXPERT] = layout.ep, 0
        if layout.splits_experts:
            axes[EXPERT_TENSOR] = layout.tp, split_dim
        return axes
    if sharded:
        axes[SHARD] = layout.parameter_shards, tensor.shard_dim
    if layout.tp > 1:
        axes["tp"] = layout.tp, split_dim
    return axes


def _own_shape(
    whole: tuple[int, ...], axes: dict[str, tuple[int, int | None]], places: dict[str, int]
) -> tuple[int, ...]:
    """The shape of a rank's shard: FSDP, the outer axis, splits after the inner ones."""
    shape = list(whole)
    for axis, (ranks, dim) in reversed(axes.items()):
        if dim is not None:
            # As torch.chunk: pieces of equal length, then a shorter one, then empty ones.
            longest = -(-shape[dim] // ranks)
            shape[dim] = max(0, min(longest, shape[dim] - longest * places[axis]))
    return tuple(shape)


def _schedule_problems(job: Job, mesh: Mesh, parts: list[ModelPart]) -> list[str]:
    """Build torch's schedule, which validates itself, and compare its stages."""
    schedule = build_schedule(job, mesh, parts, TokenLoss(job.model.vocab_size, None), CPU)
    built = [stage.stage_index for stage in stages_in(schedule)]
    expected = stages_of_rank(job.parallelism, job.model.n_layers, mesh.rank("pp"))
    return [] if built == expected else [f"torch's schedule has stages {built}, expected {expected}"]


def _optimizer_state(
    job: Job, mesh: Mesh, parts: list[ModelPart], said: RankParameters
) -> tuple[int, int, list[str]]:
    """Let the optimizer create its state, from gradients as FSDP produces them.

    Returns:
        Bytes of the state, bytes of the gradients, and problems.
    """
    problems = []
    with fake_tensors(), Meter(mesh) as meter:
        for part in parts:
            allocate(part, CPU, CPU)
        named = [pair for part in parts for pair in part.named_parameters()]
        specs = tensors(job.model)
        group = stage_group(mesh) if exchanges(job.optimizer, specs.values()) else None
        optimizer = build_optimizer(job.optimizer, named, specs, group)
        for _, parameter in named:
            parameter.grad = torch.empty_like(plain(parameter))
        gradient_bytes = sum(_bytes(p.grad) for _, p in named if p.grad is not None)
        optimizer.step()
        dtype, state_bytes = getattr(torch, job.optimizer.state_dtype or "float32"), 0
        for name, parameter in named:
            state = optimizer.state[parameter]
            state_bytes += sum(map(_bytes, state.values()))
            for key in KINDS[kind_of(job.optimizer, specs[name])].state:
                if key not in state:
                    problems.append(f"{name}: the optimizer has made no {key}")
                elif _is_like(state[key], parameter) != (True, dtype):
                    problems.append(f"{name}: {key} is not placed as the parameter is, or not {dtype}")
        if group is not None:
            problems += _update_problems(job, said, optimizer, meter)
    return state_bytes, gradient_bytes, problems


def _update_problems(
    job: Job, said: RankParameters, optimizer: torch.optim.Optimizer, meter: Meter
) -> Iterator[str]:
    """Run another update, and compare its buffers, FLOPs and sent bytes with the plan's."""
    planned, before = planned_update(job, said), meter.live
    assert planned is not None, "the optimizer exchanges nothing"
    meter.reset()
    optimizer.step()
    for what, built, expected in (
        ("FLOPs", meter.flops, planned.flops),
        ("bytes sent", meter.sent["optimizer"], planned.sent),
        ("bytes of buffers", max(meter.peaks.values()) - before, planned.buffers),
    ):
        # The plan is that of the busiest rank; shards may have different sizes.
        if built > UPDATE_TOLERANCE * expected:
            yield f"an update has {built:,.0f} {what}, the plan says {expected:,.0f}"


def _is_like(state: Tensor, parameter: Tensor) -> tuple[bool, torch.dtype]:
    """Whether it has a parameter's shape and placements, and its dtype."""
    like = state.shape == parameter.shape and isinstance(state, DTensor) == isinstance(parameter, DTensor)
    if like and isinstance(state, DTensor) and isinstance(parameter, DTensor):
        like = state.placements == parameter.placements and state.device_mesh == parameter.device_mesh
        like = like and state.to_local().shape == parameter.to_local().shape
    return like, state.dtype


def _byte_problems(rank: VerifiedRank, said: RankParameters) -> Iterator[str]:
    """Problems of the total bytes."""
    for what, built, planned in (
        ("parameters", rank.parameter_bytes, said.parameter_bytes),
        ("gradients", rank.gradient_bytes, said.gradient_bytes),
        ("optimizer state", rank.optimizer_bytes, said.optimizer_bytes),
    ):
        if built != planned:
            yield f"{what} are {built:,} bytes, the plan says {planned:,}"


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()
