"""The plan of Muon's update, against the update on a fake process group and by hand."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from jobs import tiny
from test_verify import layout_of, plan_of
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.model.spec import tensors
from harness.tools.plan import verify as module
from harness.tools.plan.machine import machine_of
from harness.tools.plan.parameters import parameters_of
from harness.tools.plan.step_time import StepModel
from harness.tools.plan.update import planned_update
from harness.tools.plan.verify import verify

JOB = ("data=synthetic", "tokenizer=bytes", "training.global_batch_size=8", "optimizer=muon")
LAYOUTS = [
    ("llama3_tiny", ""),
    ("llama3_tiny", "dp_replicate=2 dp_shard=2 tp=2"),
    ("llama3_tiny", "dp_shard=3 pp=2"),
    ("deepseek_v3_debug", "dp_shard=4 tp=2 ep=4"),
    ("qwen3_moe_debug", "dp_shard=2 tp=2 ep=2 expert_tensor_parallel=true dp_replicate=2"),
]


@pytest.mark.parametrize("case", rest_is_thorough(LAYOUTS, LAYOUTS[1], LAYOUTS[4]), ids=" ".join)
def test_verify_agrees(case: tuple[str, str]) -> None:
    """FLOPs, bytes sent and buffers of the first rank are those of the plan, at most."""
    model, degrees = case
    batch = ["training.global_batch_size=24"] if "3" in degrees else []
    job = compose_job([f"model={model}", *JOB, *layout_of(degrees), *batch])
    assert verify(plan_of(job)).problems == []


def test_buffers_are_the_same_under_torchdynamo() -> None:
    """A failed compilation leaves its evaluator of frames, with which callers keep the arguments of calls."""

    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x + 1

    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.compile(broken, backend="eager", fullgraph=True)(torch.ones(1))
    job = compose_job(["model=llama3_tiny", *JOB, *layout_of("dp_replicate=2 dp_shard=2 tp=2")])
    assert verify(plan_of(job)).problems == []


def test_verify_finds_an_update_that_the_plan_does_not_expect() -> None:
    job = compose_job(["model=llama3_tiny", *JOB, *layout_of("dp_shard=2")])
    with mock.patch.object(module, "UPDATE_TOLERANCE", 0.9):
        problems = verify(plan_of(job)).problems
    found = [problem.split(" has ")[1].split(" ", 1)[1].split(",")[0] for problem in problems]
    assert found == ["FLOPs", "bytes sent", "bytes of buffers"]


def test_two_ranks_by_hand() -> None:
    """Each rank sends its half of the other's matrices, and gets it back orthogonalized."""
    job = tiny("optimizer=muon", "parallelism=fsdp", "parallelism.dp_shard=2", "training.global_batch_size=8")
    planned = planned_update(job, parameters_of(job, 0))
    assert planned is not None
    matrices = [each for each in tensors(job.model).values() if each.is_hidden_matrix]
    values = sum(each.size for each in matrices)
    # Both own half of the values, and send a half of those there, and half of their own back.
    assert planned.sent == pytest.approx(4 * values / 2, rel=0.1)
    flops = 0.0
    for each in matrices:
        short, long = sorted(each.shape)
        flops += 5 * (2 * short * long * short + 2 * short**3 + 2 * short * short * long)
    assert planned.flops == pytest.approx(flops / 2, rel=0.1)
    assert sum(planned.shapes.values()) == pytest.approx(len(matrices) / 2, abs=len(matrices) / 4)


def test_the_plan_prices_an_update() -> None:
    """Against AdamW: one running mean less, a longer update, and an all-to-all there and back each round."""
    job = ["model=llama3_8b", *JOB, "parallelism=fsdp", "parallelism.dp_shard=8", "cluster=slurm_h100"]
    found = {}
    for kind in ("adamw", "muon"):
        composed = compose_job([*job, f"optimizer={kind}"])
        machine = machine_of(composed)
        assert machine is not None
        found[kind] = StepModel(composed, machine).speed(), parameters_of(composed, 0).optimizer_bytes
    (adamw, traffic), adamw_bytes = found["adamw"]
    (muon, exchanged), muon_bytes = found["muon"]
    specs = tensors(composed.model).values()
    hidden = sum(each.size for each in specs if each.is_hidden_matrix) / sum(each.size for each in specs)
    assert muon_bytes == pytest.approx(adamw_bytes * (1 - hidden / 2), rel=1e-3)
    [exchange] = [each for each in exchanged if each.axis == "optimizer"]
    assert (exchange.collective, exchange.ranks, exchange.count % 2) == ("all_to_all", 8, 0)
    assert [each for each in traffic if each.axis == "optimizer"] == []
    assert muon.parts["optimizer"] > adamw.parts["optimizer"]
    assert muon.parts["compute"] == pytest.approx(adamw.parts["compute"])
