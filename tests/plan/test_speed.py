"""A step's time: collectives computed by hand, and properties that must hold."""

from __future__ import annotations

import pytest

from harness.compose import compose_job
from harness.job import Job
from harness.plan.constants import Calibration, Constants
from harness.plan.machine import Group, group_of, machine_of
from harness.plan.plan import Speed, Traffic
from harness.plan.speed import StepModel

H100 = ["cluster=slurm_h100", "precision=bf16", "data=synthetic", "tokenizer=bytes"]


def job_of(*overrides: str) -> Job:
    return compose_job([*H100, *overrides])


def step(*overrides: str) -> tuple[Speed, list[Traffic]]:
    job = job_of(*overrides)
    machine = machine_of(job)
    assert machine is not None
    return StepModel(job, machine).speed()


def test_groups_know_their_nodes() -> None:
    job = job_of("model=llama3_70b", "parallelism=fsdp_tp", "parallelism.tp=4", "parallelism.dp_shard=8")
    assert group_of(job, 8, "tp") == Group(4, 4)
    assert group_of(job, 8, "dp_shard", "cp") == Group(8, 2)
    wide = job_of("model=llama3_8b", "parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.dp_shard=8")
    assert group_of(wide, 8, "dp_shard", "cp") == Group(16, 8)
    assert group_of(wide, 8, "cp") == Group(2, 2)


def test_collectives_by_hand() -> None:
    machine = machine_of(
        job_of("model=llama3_8b", "parallelism.dp_shard=8"), Calibration(Constants(latency=0.0))
    )
    assert machine is not None
    link, network = 450e9 * 0.75, 50e9 * 0.85
    assert machine.collective_seconds("all_gather", 8e9, Group(8, 8)) == pytest.approx(7e9 / link)
    assert machine.collective_seconds("all_reduce", 8e9, Group(8, 8)) == pytest.approx(14e9 / link)
    # With one member per node, its adapter carries all traffic; with eight, eight adapters share it.
    assert machine.collective_seconds("reduce_scatter", 8e9, Group(8, 1)) == pytest.approx(7e9 / network)
    assert machine.collective_seconds("all_gather", 16e9, Group(16, 8)) == pytest.approx(15e9 / link)
    assert machine.collective_seconds("all_gather", 16e9, Group(16, 2)) == pytest.approx(15e9 / network / 2)
    assert machine.collective_seconds("send", 1e9, Group(2, 1)) == pytest.approx(1e9 / network)
    assert machine.collective_seconds("all_gather", 8e9, Group(1, 1)) == 0


def test_parts_add_up_and_traffic_fits_the_layout() -> None:
    speed, traffic = step("model=llama3_8b", "parallelism.dp_shard=8", "training.seq_len=8192")
    assert sum(speed.parts.values()) == pytest.approx(speed.step_seconds)
    moved = {(t.axis, t.collective): t for t in traffic}
    assert set(moved) == {("dp", "all_gather"), ("dp", "reduce_scatter")}
    parameters = 8.03e9
    # Blocks are gathered twice in bfloat16, tables once; every gradient is reduced once in float32.
    tables = 2 * 128256 * 4096
    gathered = (2 * (parameters - tables) + tables) * 2 * 7 / 8
    assert moved["dp", "all_gather"].bytes == pytest.approx(gathered, rel=0.08)
    assert moved["dp", "reduce_scatter"].bytes == pytest.approx(parameters * 4 * 7 / 8, rel=0.01)


def test_faster_options_are_faster() -> None:
    base = ["model=llama3_8b", "parallelism.dp_shard=8", "training.seq_len=8192"]

    def rate(*more: str) -> float:
        return step(*base, *more)[0].tokens_per_second_per_rank

    assert rate("activation_checkpoint=full") < rate("activation_checkpoint=selective_op") < rate()
    assert rate() < rate("compile=on") < rate("compile=on", "precision=float8_tensorwise")
    wide = ["model=llama3_70b", "parallelism=fsdp_tp", "parallelism.tp=8", "parallelism.dp_shard=8"]
    wide += ["training.seq_len=8192", "compile=on"]
    slow, quick = step(*wide)[0], step(*wide, "parallelism.async_tp=true")[0]
    assert quick.parts["tp"] == pytest.approx(slow.parts["tp"] / 2) and quick.step_seconds < slow.step_seconds


def test_a_bubble_shrinks_with_microbatches() -> None:
    pipeline = ["model=llama3_70b", "parallelism=fsdp_pp", "parallelism.pp=8", "parallelism.dp_shard=8"]
    pipeline += ["training.seq_len=4096"]
    shares = []
    for batch in (8, 32):
        speed, traffic = step(
            *pipeline, f"training.local_batch_size={batch}", "training.global_batch_size=null"
        )
        shares.append(speed.parts["bubble"] / speed.step_seconds)
        assert len(speed.timeline) == 8 and {t.axis for t in traffic} == {"dp", "pp"}
    assert shares[0] == pytest.approx(7 / 15, abs=0.05) and shares[1] == pytest.approx(7 / 39, abs=0.05)


def test_experts_travel() -> None:
    speed, traffic = step(
        *("model=qwen3_30b_a3b", "parallelism=fsdp_ep", "parallelism.ep=8", "parallelism.dp_shard=16"),
        *("training.seq_len=4096", "training.global_batch_size=16"),
    )
    [travel] = [t for t in traffic if t.axis == "ep"]
    # Rows there and back, forward and backward, and their counts, in each of 48 blocks.
    assert travel.count == 5 * 48 and travel.ranks == 8 and speed.parts["ep"] > 0


def test_a_ring_without_balance_is_as_slow_as_its_last_rank() -> None:
    ring = ["model=llama3_8b", "parallelism=fsdp_cp", "parallelism.cp=8", "parallelism.dp_shard=1"]
    ring += ["training.seq_len=131072", "training.local_batch_size=1", "training.global_batch_size=null"]
    ring += ["activation_checkpoint=full"]
    balanced = step(*ring)[0].step_seconds
    assert 1.3 < step(*ring, "parallelism.cp_load_balance=false")[0].step_seconds / balanced < 15 / 8
