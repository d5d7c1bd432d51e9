"""A job built on a fake process group, and a step without values, against closed forms and by hand."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from math import prod
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from tiers import rest_is_thorough
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.pipeline import SCHEDULES
from harness.data.loader import Batch
from harness.launch.pool import RankPool
from harness.model.accounting import account
from harness.model.decoder import Decoder
from harness.model.spec import parameter_shapes
from harness.tools.plan import verify as module
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.fake import fake_process_group
from harness.tools.plan.fake_step import Cycle, cycle_of, extrapolated, fake_steps, statistics_of
from harness.tools.plan.machine import machine_of
from harness.tools.plan.memory import rank_memory
from harness.tools.plan.plan import Plan
from harness.tools.plan.step_time import StepModel
from harness.tools.plan.verify import Verified, render_verified, verify
from harness.util.errors import UserError
from harness.util.hardware import H100_SXM

module_lay_out = module.build_on_meta

SMALL = ("data=synthetic", "tokenizer=bytes", "training.seq_len=64", "training.global_batch_size=8")


def job_of(model: str, *overrides: str) -> Job:
    return compose_job([f"model={model}", *SMALL, *overrides])


def layout_of(degrees: str) -> list[str]:
    return [f"parallelism.{degree}" for degree in degrees.split()]


def plan_of(job: Job) -> Plan:
    """A plan with the fields that verifying needs: the job and its memory."""
    return Plan(job, account(job.model, job.training.seq_len), [], rank_memory(job), None, [], None, None)


def verified(model: str, degrees: str, *overrides: str, step: bool = False) -> Verified:
    return verify(plan_of(job_of(model, *layout_of(degrees), *overrides)), step=step)


LAYOUTS = [
    ("llama3_tiny", ""),
    ("llama3_tiny", "dp_replicate=2 dp_shard=2"),
    ("llama3_tiny", "dp_shard=2 tp=2 pp=2"),
    ("llama3_tiny", "dp_shard=3 cp=2 dp_replicate=1"),
    ("qwen3_moe_debug", "dp_shard=2 tp=2 pp=2 ep=2 expert_tensor_parallel=true"),
    ("deepseek_v3_debug", "dp_shard=4 tp=2 ep=8"),
    ("gpt_oss_debug", "dp_shard=8 ep=2"),
]


@pytest.mark.parametrize("case", rest_is_thorough(LAYOUTS, *LAYOUTS[2:5]), ids="-".join)
def test_what_is_built_is_what_is_planned(case: tuple[str, str]) -> None:
    model, degrees = case
    batch = ["training.global_batch_size=24"]
    job = job_of(model, *layout_of(degrees), *batch)
    result = verify(plan_of(job))
    assert result.problems == [] and len(result.ranks) == job.parallelism.pp
    parameters = sum(rank.parameter_bytes for rank in result.ranks)
    whole = 4 * account(job.model, job.training.seq_len).parameters
    shares = job.parallelism.parameter_shards * job.parallelism.tp
    # Some are replicated on tensor-parallel ranks, and the first rank has the largest of uneven shards.
    assert whole / shares <= parameters <= (whole if shares == 1 else 1.3 * whole / shares)
    assert sum(rank.gradient_bytes for rank in result.ranks) == parameters
    tensors = len(parameter_shapes(job.model))
    assert sum(rank.optimizer_bytes for rank in result.ranks) == 2 * parameters + 4 * tensors
    assert sum(rank.dtensors for rank in result.ranks) == (0 if job.world_size == 1 else tensors)
    assert not dist.is_initialized()


def spoilt(change: Callable[[list[Decoder]], None]) -> Any:
    """A ``build_on_meta`` that changes its result."""

    def build_on_meta(job: Job, mesh: Any, device: torch.device) -> list[Decoder]:
        parts = module_lay_out(job, mesh, device)
        change(parts)
        return parts

    return build_on_meta


def other_dimension(parts: list[Decoder]) -> None:
    wo = parts[0].layers["0"].attention.wo
    weight = DTensor.from_local(
        wo.weight.to_local(),
        wo.weight.device_mesh,
        (Shard(1),),
        run_check=False,
        shape=wo.weight.shape,
        stride=wo.weight.stride(),
    )
    wo.weight = nn.Parameter(weight)


def other_format(parts: list[Decoder]) -> None:
    parts[0].layers["1"].ffn_norm.to(torch.bfloat16)


def no_layer(parts: list[Decoder]) -> None:
    del parts[0].layers["2"]


def not_placed(parts: list[Decoder]) -> None:
    parts[0].norm.weight = nn.Parameter(torch.empty(64, device="meta"))


SPOILT = {
    other_dimension: "layers.0.attention.wo.weight: ranks and dimension of every axis is {'shard': (4, 1)}, "
    "expected {'shard': (4, 0)}",
    other_format: "layers.1.ffn_norm.weight: format is bfloat16, expected float32",
    no_layer: "layers.2.attention_norm.weight: 0 stages hold it, the model has 1",
    not_placed: "norm.weight: ranks and dimension of every axis is {}, expected {'tp': (2, None)}",
}


@pytest.mark.parametrize("change", SPOILT)
def test_other_shardings_and_dtypes_are_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[list[Decoder]], None]
) -> None:
    monkeypatch.setattr(module, "build_on_meta", spoilt(change))
    found = verified("llama3_tiny", "tp=2" if change is not_placed else "dp_shard=4").problems
    assert any(problem.endswith(SPOILT[change]) for problem in found), found


def test_stages_of_another_plan_are_found() -> None:
    job = job_of("llama3_tiny", *layout_of("pp=2 dp_shard=2"))
    plan = plan_of(job)
    other = replace(plan, memory=[replace(rank, stages=(7,)) for rank in plan.memory])
    problem = "pipeline rank 1: holds stages (1,), the plan says (7,)"
    assert problem in verify(other).problems and len(verify(other).problems) == 2


def test_bytes_of_another_plan_are_found() -> None:
    plan = plan_of(job_of("llama3_tiny", *layout_of("dp_shard=2")))
    kinds = plan.memory[0].kinds
    other = kinds | {"parameters": kinds["parameters"] * 2, "optimizer": kinds["optimizer"] + 1}
    found = verify(replace(plan, memory=[replace(plan.memory[0], kinds=other)])).problems
    assert len(found) == 2 and all("the plan's memory has" in problem for problem in found)


def test_a_rank_cannot_verify() -> None:
    with fake_process_group(0, 2), pytest.raises(UserError, match="is already in a process group"):
        verified("llama3_tiny", "")
    assert not dist.is_initialized()


def test_nothing_is_left_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("in the middle")

    monkeypatch.setattr(module, "_optimizer_state", fail)
    before = sys.excepthook
    with pytest.raises(RuntimeError, match="in the middle"):
        verified("llama3_tiny", "dp_shard=2")
    assert not dist.is_initialized() and sys.excepthook is before


FOR_GPUS = [
    ("llama3_debug", "tp=2 async_tp=true", "compile=on", "precision=float8_tensorwise", "model.n_layers=1"),
    ("llama3_debug", "dp_shard=8", "training.attention=flex", "training.loss_chunks=4"),
    ("llama3_debug", "dp_shard=8", "precision=float8_rowwise", "activation_checkpoint=selective_op"),
    (
        "gpt_oss_debug",
        "dp_shard=8 ep=8",
        "training.attention=flex",
        "precision=bf16_full",
        "model.n_layers=2",
    ),
]


@pytest.mark.parametrize("job", rest_is_thorough(FOR_GPUS, FOR_GPUS[0], FOR_GPUS[3]), ids=lambda job: job[0])
def test_jobs_for_gpus_are_built_without(job: tuple[str, ...]) -> None:
    model, degrees, *rest = job
    result = verified(model, degrees, "cluster=slurm_h100", *rest, step=True)
    assert result.problems == []
    notes = " ".join(result.notes)
    for typed, note in (("async", "async_tp"), ("float8", "emulated"), ("compile", "compiled")):
        assert (typed in " ".join(job)) == (note in notes), notes


# A step without values.


def flops_of(job: Job) -> float:
    """The closed form for all ranks, with full attention; norms have no matrix products."""
    norms = sum(shape[0] for shape in parameter_shapes(job.model).values() if len(shape) == 1)
    return (account(job.model, job.training.seq_len).flops_per_token_full - 6.0 * norms) * tokens_of(job)


def tokens_of(job: Job) -> int:
    return job.global_batch_size * job.training.seq_len


FLOPS = ["", "dp_shard=4", "tp=2", "dp_shard=2 tp=2", "pp=2 dp_shard=2", "cp=2", "cp=2 cp_method=ulysses"]


@pytest.mark.parametrize("degrees", rest_is_thorough(FLOPS, "tp=2", "pp=2 dp_shard=2", "cp=2"))
def test_flops_are_the_ranks_share_of_the_closed_form(degrees: str) -> None:
    job = job_of("llama3_tiny", *layout_of(degrees), "training.local_batch_size=2", "model.n_layers=2")
    in_stage = job.world_size // job.parallelism.pp
    assert sum(step.flops for step in fake_steps(job)) * in_stage == pytest.approx(flops_of(job), rel=1e-9)


def test_flops_of_experts_and_latents() -> None:
    """In addition to the closed form, a matrix product weighs the outputs of a token's experts."""
    job = job_of("deepseek_v3_debug", *layout_of("dp_shard=4 ep=4"), "model.n_layers=2")
    weighing = 2.0 * job.model.moe.top_k * job.model.dim * len(job.model.expert_layers) * tokens_of(job)
    [step] = fake_steps(job)
    assert step.flops * 4 == pytest.approx(flops_of(job) + weighing, rel=1e-9)


def test_recomputation_counts() -> None:
    """A block's forward pass without its last product, whose result backward does not need."""
    job = job_of("llama3_tiny", "activation_checkpoint=full", "model.n_layers=2")
    model, tokens = job.model, tokens_of(job)
    head = 6.0 * model.vocab_size * model.dim * tokens
    last = 2.0 * model.dim * model.ffn_hidden_dim * model.n_layers * tokens
    [step] = fake_steps(job)
    assert step.flops == pytest.approx(head + (flops_of(job) - head) * 4 / 3 - last, rel=1e-9)


SUMS = 4 * 8
"""Bytes that a step sums over the world: tokens and stop requests, the loss and the square of the norm."""


def test_bytes_that_fsdp_sends() -> None:
    """Blocks and embedding are gathered in both passes, norm and head once; gradients are scattered.

    ``SUMS`` are reduced over the same ranks.
    """
    job = job_of(
        "llama3_tiny",
        *layout_of("dp_shard=4"),
        "precision=bf16",
        "training.local_batch_size=1",
        "model.n_layers=2",
    )
    shapes = {name: prod(shape) for name, shape in parameter_shapes(job.model).items()}
    head = shapes["norm.weight"] + shapes["output.weight"]
    rest = sum(shapes.values()) - head
    passes, of_others, sums = job.accumulation_steps, 3 / 4, 2 * 3 / 4 * SUMS
    gathered, scattered = 2 * (2 * rest + head), 4 * (rest + head)
    [step] = fake_steps(job)
    assert passes == 2 and step.sent == {"dp": of_others * (gathered + scattered) * passes + sums}


def test_bytes_that_tensor_parallel_sends() -> None:
    job = job_of("llama3_tiny", *layout_of("tp=2"), "model.n_layers=2")
    model, tokens, of_others = job.model, tokens_of(job), 1 / 2
    stream = 4 * tokens * model.dim
    # Into and out of attention and feed-forward; out of the embedding, into the head; and all in backward.
    of_blocks, of_ends = 4 * model.n_layers, 2
    # The loss reduces the maximum, the sum, and the label's logit; its gradient sends nothing.
    of_loss = 3 * 4 * tokens
    norms = 4 * model.dim * (2 * model.n_layers + 1)
    whole = 2 * (of_blocks + of_ends) * stream + 2 * (of_loss + norms + SUMS)
    [step] = fake_steps(job)
    assert step.sent == {"tp": of_others * whole}


def test_bytes_between_stages_and_to_experts() -> None:
    job = job_of(
        "qwen3_moe_debug",
        *layout_of("pp=2 dp_shard=4 ep=2"),
        "training.local_batch_size=2",
        "model.n_layers=2",
    )
    rows = 2 * job.training.seq_len
    for step in fake_steps(job):
        assert step.sent["pp"] == 4 * rows * job.model.dim
        # In the stage's block rows go to the experts and back, and so do their gradients.
        counts = 8 * job.model.moe.num_experts * 2
        assert step.sent["ep"] == (4 * 4 * rows * job.model.moe.top_k * job.model.dim + counts) / 2


FREEING = [f"{name} {reshard}" for name in SCHEDULES for reshard in ("always", "never")]


def gathers_of(job_json: str) -> int:
    """Number of FSDP's all-gathers in a real step."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group

    from harness.train.engine import Engine

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    tokens = torch.zeros(len(engine.rows), job.training.seq_len, dtype=torch.int64)
    gather = _fsdp_param_group.foreach_all_gather
    with mock.patch.object(_fsdp_param_group, "foreach_all_gather", side_effect=gather) as counted:
        engine.gradients(Batch(tokens, tokens))
    return counted.call_count


@pytest.mark.parametrize(
    "row", rest_is_thorough(FREEING, "1F1B always", "InterleavedZeroBubble always", "DualPipeV never")
)
def test_parameters_are_gathered_as_often_as_planned(pool: RankPool, row: str) -> None:
    """In the plan, in the step without values, and on ranks that train."""
    schedule, reshard = row.split()
    degrees = f"pp=2 dp_shard=2 pp_schedule={schedule} reshard_after_forward={reshard}"
    job = job_of("llama3_tiny", *layout_of(degrees), "cluster.device=cpu", "training.seq_len=16")
    machine = machine_of(job, Calibration(Constants(), H100_SXM))
    assert machine is not None
    model = StepModel(job, machine)
    moved = [[(each, n) for each, n in model._rank(rank, 0.0)[1] if each.axis == "dp"] for rank in (0, 1)]
    planned = [sum(n for each, n in of if each.collective == "all_gather") for of in moved]
    real = pool.run(4, gathers_of, job.to_json())
    assert planned == [real[0], real[2]]
    # The plan leaves out norms, a few hundred bytes per block, and the all-reduce of the gradient norm.
    sent = [sum(each.bytes / 2 * n for each, n in of) for of in moved]
    assert [step.sent["dp"] for step in fake_steps(job)] == pytest.approx(sent, rel=0.01)


DEEP = [
    ("llama3_tiny", "dp_shard=4", "model.n_layers=8"),
    ("llama3_tiny", "dp_shard=2 tp=2", "model.n_layers=8", "activation_checkpoint=full", "precision=bf16"),
    ("llama3_tiny", "", "model.n_layers=9", "activation_checkpoint=selective_layer"),
    ("deepseek_v3_debug", "dp_shard=4 ep=4", "model.n_layers=6", "activation_checkpoint=full"),
    ("qwen3_moe_debug", "dp_shard=4 ep=4", "model.n_layers=6", "model.moe.first_dense_layers=1"),
    ("gpt_oss_debug", "dp_shard=4", "model.n_layers=9"),
    ("llama3_tiny", "pp=2 dp_shard=2 pp_schedule=Interleaved1F1B", "model.n_layers=18"),
]


@pytest.mark.parametrize("case", rest_is_thorough(DEEP, DEEP[4]), ids="-".join)
def test_extrapolation_from_few_blocks(case: tuple[str, ...]) -> None:
    model, degrees, *rest = case
    job = job_of(model, *layout_of(degrees), *rest, "training.local_batch_size=2")
    found, expected = extrapolated(job, 0), statistics_of(job, 0)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=0.01 if key[0] in ("peak", "kept") else 1e-9), key


def test_cycles() -> None:
    assert cycle_of("aaaa") == Cycle(0, 1, 4)
    assert cycle_of("dddmmmm") == Cycle(3, 1, 7)
    assert cycle_of("ababa") == Cycle(0, 2, 5)
    assert cycle_of("abc") == Cycle(0, 3, 3)
    assert cycle_of("") == Cycle(0, 1, 0)
    assert [cycle_of("ab" * 10 + "a" * over).least for over in (0, 1)] == [4, 5]
    assert (cycle_of("m" * 61).least, cycle_of("m" * 61).more) == (3, 58)


PEAKS = [
    ("llama3_debug", ""),
    ("llama3_debug", "dp_shard=4", "precision=bf16", "activation_checkpoint=full", "model.n_layers=4"),
    ("llama3_debug", "tp=4"),
    (
        "llama3_debug",
        "tp=4",
        "model.vocab_size=65536",
        "model.dim=2048",
        "model.n_layers=2",
        "training.global_batch_size=1",
    ),
    ("llama3_debug", "pp=2 dp_shard=2"),
    ("deepseek_v3_debug", "dp_shard=4 ep=4"),
]


@pytest.mark.parametrize("case", rest_is_thorough(PEAKS, PEAKS[1], PEAKS[3]), ids="-".join)
def test_peaks_are_those_of_the_plans_memory(case: tuple[str, ...]) -> None:
    """The plan's closed form without the runtime, against the tensors of the step."""
    model, degrees, *rest = case
    job = job_of(model, *layout_of(degrees), *rest, "cluster.device=cpu", "training.seq_len=256")
    for step, planned in zip(fake_steps(job), rank_memory(job), strict=True):
        assert step.peak == pytest.approx(planned.allocated, rel=0.06)


# Sizes of real training runs. Each must be built within a minute and 8 GiB, and stepped within three minutes.

BIG = {
    "llama3_8b on 8": ("llama3_8b", "dp_shard=8", 1),
    "llama3_70b on 256": ("llama3_70b", "dp_shard=32 tp=8", 1),
    "llama3_405b on 512": ("llama3_405b", "dp_shard=8 tp=8 pp=8", 16),
    "llama3_405b on 2048": ("llama3_405b", "dp_shard=16 tp=8 pp=16 pp_schedule=Interleaved1F1B", 16),
    "deepseek_v3_671b on 1024": ("deepseek_v3_671b", "dp_shard=1024 ep=64", 1),
}


@pytest.mark.parametrize("name", rest_is_thorough(BIG))
def test_big(name: str) -> None:
    model, degrees, batch = BIG[name]
    job = compose_job(
        [
            *(f"model={model}", *layout_of(degrees), "cluster=slurm_h100", "precision=bf16"),
            *(
                "training.seq_len=4096",
                f"training.local_batch_size={batch}",
                "training.global_batch_size=null",
            ),
            "activation_checkpoint=full",
        ]
    )
    start = time.process_time()
    built = verify(plan_of(job))
    assert built.problems == [] and time.process_time() - start < 60 and built.memory < 8 * 2**30
    stepped = verify(plan_of(job), step=True)
    assert stepped.problems == [] and time.process_time() - start < 180
    flops = sum(rank.step.flops for rank in stepped.ranks if rank.step) * job.world_size / job.parallelism.pp
    # Recomputation adds a third, except for the head and the last product of a block.
    assert 1.15 < flops / flops_of(job) < 1.34
    lines = render_verified(stepped, plan_of(job))
    assert "agrees with the plan" in lines[0] and len(lines) >= 3 + len(stepped.ranks)
