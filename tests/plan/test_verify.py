"""A job built on a pretended world, and a step of it without values, against closed forms and sums by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.tiers import rest_is_thorough
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor

from harness.compose import compose_job
from harness.errors import UserError
from harness.job import Job
from harness.model.accounting import account
from harness.model.decoder import Decoder
from harness.model.shapes import parameter_shapes
from harness.parallelism.stages import stages_of_rank
from harness.plan import verify as module
from harness.plan.fake import pretending, stand_in
from harness.plan.fake_step import Cycle, cycle_of, drawn_out, fake_step, figures_of
from harness.plan.plan import Plan, RankMemory
from harness.plan.verify import Verified, render_verified, verify

SMALL = ("data=synthetic", "tokenizer=bytes", "training.seq_len=64", "training.global_batch_size=8")
ON_CLUSTER = ("cluster=slurm_h100", "precision=bf16")


def job_of(model: str, *overrides: str) -> Job:
    return compose_job([f"model={model}", *SMALL, *overrides])


def layout_of(degrees: str) -> list[str]:
    return [f"parallelism.{degree}" for degree in degrees.split()]


def plan_of(job: Job) -> Plan:
    """A plan that says nothing of memory but who holds which stages."""
    ranks = range(job.parallelism.pp)
    memory = [
        RankMemory(rank, tuple(stages_of_rank(job.parallelism, job.model.n_layers, rank)), {})
        for rank in ranks
    ]
    return Plan(job, account(job.model, job.training.seq_len), [], memory, None, [], None, None)


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


@pytest.mark.parametrize(("model", "degrees"), LAYOUTS)
def test_what_is_built_is_what_is_planned(model: str, degrees: str) -> None:
    batch = ["training.global_batch_size=24"]
    job = job_of(model, *layout_of(degrees), *batch)
    result = verify(plan_of(job))
    assert result.problems == [] and len(result.ranks) == job.parallelism.pp
    parameters = sum(rank.parameter_bytes for rank in result.ranks)
    whole = 4 * account(job.model, job.training.seq_len).parameters
    shares = job.parallelism.parameter_shards * job.parallelism.tp
    # Some are whole on tensor-parallel ranks, and the first rank of uneven shards has the longest.
    assert whole / shares <= parameters <= (whole if shares == 1 else 1.3 * whole / shares)
    assert sum(rank.gradient_bytes for rank in result.ranks) == parameters
    tensors = len(parameter_shapes(job.model))
    assert sum(rank.optimizer_bytes for rank in result.ranks) == 2 * parameters + 4 * tensors
    assert sum(rank.dtensors for rank in result.ranks) == (0 if job.world_size == 1 else tensors)
    assert not dist.is_initialized()
