"""Muon on several ranks: the layout does not change the update, and the plan knows what ranks send."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from layouts import EXPERT_MATRIX, MATRIX, layout, require_parity, verdict_of
from tiers import rest_is_thorough

from harness.config.job import Job
from harness.launch.pool import RankPool
from harness.optimizer import assignment, muon
from harness.tools.parity.parity import Trace, trace
from harness.tools.plan.parameters import parameters_of, planned_update

# A learning rate at which updates matter, from the first step on.
MUON = ("optimizer=muon", "schedule.warmup_steps=1", "optimizer.lr=0.01")
MOE = (*MUON, "model=qwen3_moe_debug")
# Shards by rows and columns, strided shards, uneven ones, replicas, stages, and host memory.
CORE = ["fsdp_uneven", "hsdp_tp", "fsdp_offload"]
CORE_OF_EXPERTS = ["fsdp_tp_ep_experts", "ep_hsdp"]


def in_many_rounds(job_json: str, steps: int) -> Trace:
    """Train with rounds of one matrix each, so that exchanges overlap."""
    with mock.patch.object(assignment, "ROUND_VALUES", 1):
        return trace(job_json, steps)


@pytest.mark.parametrize("name", rest_is_thorough(MATRIX, *CORE))
def test_layout_agrees_with_one_process(pool: RankPool, name: str) -> None:
    require_parity(pool, name, layout(name, *MUON), steps=3)


@pytest.mark.parametrize("name", rest_is_thorough(EXPERT_MATRIX, *CORE_OF_EXPERTS))
def test_layout_of_experts_agrees_with_one_process(pool: RankPool, name: str) -> None:
    require_parity(pool, name, layout(name, *MOE), steps=3, run=in_many_rounds)


def own_shards(job_json: str, steps: int) -> Trace:
    """Every rank orthogonalizes its own shards."""

    def alone(self: Any, parameter: torch.Tensor) -> Any:
        shape = getattr(parameter, "_local_tensor", parameter).shape
        count = 1 if len(shape) == 2 else shape[0]
        holder = muon._Holder(self.group.rank(), (), range(shape[-2]), range(shape[-1]))
        return range(count), [holder]

    with mock.patch.object(muon._Holders, "of", alone):
        return trace(job_json, steps)


def test_sabotage_is_noticed(pool: RankPool) -> None:
    assert not verdict_of(pool, "fsdp", layout("fsdp", *MUON), run=own_shards, steps=3).passed


def sent_in_a_step(job_json: str) -> float:
    """Bytes that this rank sends to others in the all-to-alls of an update."""
    sent = 0.0
    original = dist.all_to_all_single

    def counted(received: Any, values: Any, into: Any, out: list[int], **options: Any) -> Any:
        nonlocal sent
        sent += (sum(out) - out[options["group"].rank()]) * values.element_size()
        return original(received, values, into, out, **options)

    with mock.patch.object(dist, "all_to_all_single", counted):
        trace(job_json, 1)
    return sent


BYTES = [("fsdp", MUON), ("hsdp_tp", MUON), ("ddp", MUON), ("fsdp_tp_pp", MUON), ("ep_hsdp", MOE)]
BYTES += [("fsdp_tp_ep_experts", MOE), ("tp_experts", MOE), ("fsdp_experts_uneven", MOE)]


@pytest.mark.parametrize("case", rest_is_thorough(BYTES, *BYTES[4::3]), ids=lambda case: case[0])
def test_ranks_send_what_the_plan_says(pool: RankPool, case: tuple[str, tuple[str, ...]]) -> None:
    name, overrides = case
    job: Job = layout(name, *overrides)
    sent = pool.run(job.world_size, sent_in_a_step, job.to_json())
    each = job.world_size // job.parallelism.pp
    for stage in range(job.parallelism.pp):
        planned = planned_update(job, parameters_of(job, stage))
        assert planned is not None
        busiest = max(sent[stage * each : (stage + 1) * each])
        assert busiest > 0
        assert planned.sent == pytest.approx(busiest, rel=0.1)
