"""The plan of Muon's update, by hand."""

from __future__ import annotations

import pytest
from jobs import tiny

from harness.compose.composer import compose_job
from harness.model.spec import tensors
from harness.tools.plan.machine import machine_of
from harness.tools.plan.parameters import parameters_of, planned_update
from harness.tools.plan.step_time import StepModel

JOB = ("data=synthetic", "tokenizer=bytes", "training.global_batch_size=8", "optimizer=muon")


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
