"""What training builds on a rank of a fake process group, against the parameters and memory of the plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from math import prod
from typing import Any

import pytest
import torch
from fake_world import fake_process_group
from tiers import rest_is_thorough
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.optimizer import KINDS
from harness.config.pipeline import stages_of_rank
from harness.model.part import ModelPart
from harness.model.spec import parameter_shapes, tensors
from harness.optimizer.build import build_optimizer
from harness.optimizer.settings import exchanges, kind_of
from harness.parallelism.loss import TokenLoss
from harness.parallelism.materialize import allocate
from harness.parallelism.mesh import EXPERT, EXPERT_SHARD, EXPERT_TENSOR, SHARD, build_mesh, stage_group
from harness.parallelism.parallelize import build_on_meta
from harness.parallelism.pipeline import build_schedule
from harness.precision.swap import plain
from harness.tools.plan.memory import rank_memory
from harness.tools.plan.parameters import HeldTensor, parameters_of
from harness.tools.plan.plan import RankMemory

CPU = torch.device("cpu")
SMALL = ("data=synthetic", "tokenizer=bytes", "training.seq_len=64", "training.global_batch_size=24")
Change = Callable[[list[ModelPart]], None]


def job_of(model: str, degrees: str, *overrides: str) -> Job:
    layout = [f"parallelism.{degree}" for degree in degrees.split()]
    return compose_job([f"model={model}", *SMALL, *layout, *overrides])


def problems_of(
    job: Job, memory: list[RankMemory] | None = None, change: Change | None = None, *, updates: bool = True
) -> list[str]:
    """Build the first rank of every pipeline rank, and the last; differences from the plan.

    Args:
        memory: the memory of the plan.
        change: something to do to what is built.
        updates: whether to allocate the model and let the optimizer create its state.
    """
    problems, names = [], Counter[str]()
    for planned in memory or rank_memory(job):
        in_stage = job.world_size // job.parallelism.pp
        for place in {0, in_stage - 1}:
            with fake_process_group(planned.pp_rank * in_stage + place, job.world_size):
                problems += _problems_of_rank(job, planned, names, change, first=place == 0, updates=updates)
    known = parameter_shapes(job.model)
    wrong = [name for name in {*names, *known} if (names[name], name in known) != (1, True)]
    return problems + [f"{name}: {names[name]} stages hold it" for name in wrong]


def _problems_of_rank(
    job: Job, planned: RankMemory, names: Counter[str], change: Change | None, *, first: bool, updates: bool
) -> Iterator[str]:
    held = parameters_of(job, planned.pp_rank)
    mesh = build_mesh(job.parallelism, CPU, has_experts=job.model.moe.enabled)
    parts = build_on_meta(job, mesh, CPU)
    if change is not None:
        change(parts)
    named = [pair for part in parts for pair in part.named_parameters()]
    by_name = {tensor.name: tensor for tensor in held.tensors if not tensor.spec.is_buffer}
    for name, parameter in named:
        for what, built, expected in _compared(job, parameter, by_name[name]):
            if built != expected:
                yield f"{name}: {what} is {built}, expected {expected}"
    stages = stages_of_rank(job.parallelism, job.model.n_layers, planned.pp_rank)
    if tuple(stages) != planned.stages:
        yield f"holds stages {stages}, the plan says {planned.stages}"
    if not first:
        return
    names.update(name for name, _ in named)
    if job.parallelism.pp > 1:
        schedule: Any = build_schedule(job, mesh, parts, TokenLoss(job.model.vocab_size, None), CPU)
        built = [stage.stage_index for stage in getattr(schedule, "_stages", None) or [schedule._stage]]
        if built != list(stages):
            yield f"torch's schedule has stages {built}, expected {stages}"
    buffers = sum(_bytes(buffer) for part in parts for buffer in part.buffers())
    least = sum(_bytes(parameter) for _, parameter in named)
    if least != held.parameter_bytes or not least <= planned.kinds["parameters"] <= least + buffers:
        yield f"parameters have {least} bytes, the plan {held.parameter_bytes}, {planned.kinds['parameters']}"
    if updates:
        group = stage_group(mesh) if exchanges(job.optimizer, tensors(job.model).values()) else None
        yield from _problems_of_state(job, parts, planned, group)


def _compared(job: Job, parameter: Tensor, tensor: HeldTensor) -> Iterator[tuple[str, object, object]]:
    """Properties of a parameter: name, actual value, expected value."""
    yield "format", str(parameter.dtype).removeprefix("torch."), job.precision.master_dtype
    yield "shape", tuple(parameter.shape), tensor.spec.shape
    expected = _splits(job, tensor)
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


def _splits(job: Job, tensor: HeldTensor) -> dict[str, tuple[int, int | None]]:
    """Size of every mesh axis of a parameter, and the dimension that it splits, if any: replicas, FSDP, then
    tensor or expert parallel."""
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


def _problems_of_state(job: Job, parts: list[ModelPart], planned: RankMemory, group: Any) -> Iterator[str]:
    """Let the optimizer create its state, from gradients as FSDP produces them."""
    for part in parts:
        allocate(part, CPU, CPU)
    named, specs = [pair for part in parts for pair in part.named_parameters()], tensors(job.model)
    optimizer = build_optimizer(job.optimizer, named, specs, group)
    for _, parameter in named:
        parameter.grad = torch.zeros_like(plain(parameter))
    optimizer.step()
    size, dtype = 0, getattr(torch, job.optimizer.state_dtype or "float32")
    for name, parameter in named:
        state = optimizer.state[parameter]
        size += sum(map(_bytes, state.values()))
        for key in KINDS[kind_of(job.optimizer, specs[name])].state:
            if key not in state or state[key].dtype != dtype or _place(state[key]) != _place(parameter):
                yield f"{name}: {key} is not there, not placed as the parameter is, or not {dtype}"
    if size != planned.kinds["optimizer"]:
        yield f"optimizer state has {size} bytes, the plan {planned.kinds['optimizer']}"


def _place(tensor: Tensor) -> object:
    if not isinstance(tensor, DTensor):
        return tensor.shape
    return tensor.shape, tensor.placements, tensor.device_mesh, tensor.to_local().shape


def _bytes(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


LAYOUTS = [
    ("llama3_tiny", ""),
    ("llama3_tiny", "dp_replicate=2 dp_shard=2"),
    ("llama3_tiny", "dp_shard=2 tp=2 pp=2"),
    ("llama3_tiny", "dp_shard=3 cp=2 dp_replicate=1"),
    ("llama3_tiny", "pp=2 dp_shard=2 pp_schedule=Interleaved1F1B", "model.n_layers=6"),
    ("llama3_tiny", "dp_replicate=2 dp_shard=2 tp=2", "optimizer=muon"),
    ("llama3_tiny", "dp_shard=2", "optimizer.state_dtype=bfloat16"),
    ("qwen3_moe_debug", "dp_shard=2 tp=2 pp=2 ep=2 expert_tensor_parallel=true"),
    ("qwen3_moe_debug", "dp_shard=2 tp=2 ep=2 expert_tensor_parallel=true dp_replicate=2", "optimizer=muon"),
    ("deepseek_v3_debug", "dp_shard=4 tp=2 ep=8", "training.global_batch_size=32"),
    ("gpt_oss_debug", "dp_shard=8 ep=2", "precision=bf16_full"),
    ("llama3_debug", "dp_shard=8", "precision=float8_rowwise", "precision.emulate=true"),
    ("flux_debug", "dp_shard=4", "data=latents_synthetic", "training.seq_len=80", "optimizer.ema_decay=0.9"),
]  # fmt: skip
QUICK = (2, 3, 4, 5, 7, 8, 9, 12)


@pytest.mark.parametrize("case", rest_is_thorough(LAYOUTS, *(LAYOUTS[i] for i in QUICK)), ids="-".join)
def test_what_is_built_is_what_is_planned(case: tuple[str, ...]) -> None:
    job = job_of(*case)
    assert problems_of(job) == []


BIG = [
    ("llama3_70b", "dp_shard=32 tp=8"),
    ("llama3_405b", "dp_shard=16 tp=8 pp=16 pp_schedule=Interleaved1F1B", "training.local_batch_size=16"),
    ("deepseek_v3_671b", "dp_shard=1024 ep=64"),
]


@pytest.mark.parametrize("case", rest_is_thorough(BIG), ids="-".join)
def test_placements_of_big_models(case: tuple[str, ...]) -> None:
    typed = (
        "cluster=slurm_h100",
        "precision=bf16",
        "training.seq_len=4096",
        "training.global_batch_size=null",
    )
    assert problems_of(job_of(*case, *typed), updates=False) == []


def other_dimension(parts: list[Any]) -> None:
    wo = parts[0].layers["0"].attention.wo
    old = wo.weight
    local, placed = old.to_local(), {"run_check": False, "shape": old.shape, "stride": old.stride()}
    wo.weight = nn.Parameter(DTensor.from_local(local, old.device_mesh, (Shard(1),), **placed))


def other_format(parts: list[Any]) -> None:
    parts[0].layers["1"].ffn_norm.to(torch.bfloat16)


def no_layer(parts: list[Any]) -> None:
    del parts[0].layers["2"]


def not_placed(parts: list[Any]) -> None:
    parts[0].norm.weight = nn.Parameter(torch.empty(64, device="meta"))


SPOILT: dict[Change, tuple[str, str]] = {
    other_dimension: (
        "dp_shard=4",
        "layers.0.attention.wo.weight: ranks and dimension of every axis is {'shard': (4, 1)}, "
        "expected {'shard': (4, 0)}",
    ),
    other_format: ("dp_shard=4", "layers.1.ffn_norm.weight: format is bfloat16, expected float32"),
    no_layer: ("dp_shard=4", "layers.2.attention_norm.weight: 0 stages hold it"),
    not_placed: ("tp=2", "norm.weight: ranks and dimension of every axis is {}, expected {'tp': (2, None)}"),
}


@pytest.mark.parametrize("change", SPOILT)
def test_other_shardings_and_dtypes_are_found(change: Change) -> None:
    degrees, problem = SPOILT[change]
    assert problem in problems_of(job_of("llama3_tiny", degrees), change=change, updates=False)


def test_other_plans_are_found() -> None:
    job = job_of("llama3_tiny", "pp=2 dp_shard=2")
    memory = rank_memory(job)
    other = [replace(rank, stages=(7,)) for rank in memory]
    assert "holds stages [1], the plan says (7,)" in problems_of(job, other)
    kinds = [
        replace(rank, kinds=rank.kinds | {kind: rank.kinds[kind] + prod(rank.stages) + 2**20})
        for rank, kind in zip(memory, ("parameters", "optimizer"), strict=True)
    ]
    first, second = problems_of(job, kinds)
    assert first.startswith("parameters have") and second.startswith("optimizer state has")
