"""A step's time: collectives computed by hand, and properties that must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.tools.plan.block_cost import Worker
from harness.tools.plan.constants import Calibration, Constants, Software
from harness.tools.plan.machine import Group, expert_groups, group_of, machine_of
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Speed, Traffic
from harness.tools.plan.render import render
from harness.tools.plan.step_time import StepModel
from harness.util.hardware import H100_96GB, H100_SXM

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


def test_ranks_with_the_same_experts_are_on_many_nodes() -> None:
    """``ep`` is innermost: FSDP of experts over 256 ranks of 8 a node, EP 8, has one rank on each node."""
    far = ["model=deepseek_v3_671b", "parallelism.dp_shard=256", "training.global_batch_size=256"]
    assert expert_groups(job_of(*far, "parallelism.ep=8"), 8) == (Group(8, 8), Group(32, 1))
    assert expert_groups(job_of(*far, "parallelism.ep=4"), 8) == (Group(4, 4), Group(64, 2))
    assert expert_groups(job_of(*far, "parallelism.ep=64"), 8) == (Group(64, 8), Group(4, 1))
    traffic = step(*far, "parallelism.ep=8", "training.seq_len=4096")[1]
    [experts] = [each for each in traffic if (each.ranks, each.collective) == (32, "all_gather")]
    assert experts.link == "network" and experts.seconds is not None
    assert experts.bytes / experts.seconds == pytest.approx(50e9 * 0.85, rel=0.01)
    split = [
        *far[:1],
        "parallelism.dp_shard=32",
        "parallelism.tp=8",
        "parallelism.expert_tensor_parallel=true",
    ]
    assert expert_groups(job_of(*split, "parallelism.ep=8", far[2]), 8) == (Group(8, 1), Group(4, 1))


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
    # Of 16 pieces, 8 go to other nodes, while 7 go to ranks of this one.
    assert machine.collective_seconds("all_to_all", 16e9, Group(16, 8)) == pytest.approx(8e9 / network)
    assert machine.collective_seconds("all_to_all", 8e9, Group(8, 8)) == pytest.approx(7e9 / link)
    assert machine.collective_seconds("all_gather", 8e9, Group(1, 1)) == 0


def test_four_devices_without_a_switch_have_a_third_of_their_links_each() -> None:
    sizes = {"H200 SXM": [1 / 3, 1.0], "GB200": [1.0, 1.0]}
    for name, shares in sizes.items():
        job = job_of("model=llama3_8b", "parallelism.dp_shard=2", f"cluster.accelerator={name}")
        machine = machine_of(
            with_value(job, "cluster.ranks_per_node", 4), Calibration(Constants(latency=0.0))
        )
        assert machine is not None
        whole = machine.device.link_bandwidth * 0.75
        found = [
            machine.collective_seconds("all_gather", 8e9, Group(ranks, ranks)) / (8e9 * (ranks - 1) / ranks)
            for ranks in (2, 4)
        ]
        assert [1 / (each * whole) for each in found] == pytest.approx(shares)


def test_collectives_beside_computing_slow_it_down() -> None:
    """Gathers and reductions of 32 blocks are hidden but for the first ones, and take computing with them."""
    job = job_of("model=llama3_8b", "parallelism.dp_shard=8", "training.seq_len=8192")
    exposed = {}
    for share in (0.0, 0.15):
        machine = machine_of(job, Calibration(Constants(contention=share, second_wave=0.0)))
        assert machine is not None
        speed, traffic = StepModel(job, machine).speed()
        exposed[share] = speed.parts["dp"]
        taken = sum(each.seconds or 0.0 for each in traffic)
    assert exposed[0.15] - exposed[0.0] == pytest.approx(0.15 * (taken - exposed[0.0]))


def test_collectives_slow_persistent_products_more() -> None:
    """Products of an A100 have many blocks for each multiprocessor, those of newer devices one."""
    constants = Constants()
    for name, lost in (("A100 SXM 80GB", 0.0), ("H100 SXM", constants.second_wave)):
        machine = machine_of(job_of("model=llama3_8b", f"cluster.accelerator={name}"))
        assert machine is not None
        assert machine.contention == constants.contention + lost


def worker_of(*overrides: str, software: Software | None = None) -> Worker:
    """The worker of a job."""
    job = job_of(*overrides)
    machine = machine_of(job, Calibration(Constants(), software=software or Software()))
    assert machine is not None
    return Worker(job, machine)


def test_experts_wait_for_the_busiest_rank() -> None:
    """64 experts of a load with a deviation of 0.25 on 8 ranks: the sum of 8 has 0.25 / sqrt(8), and the
    largest of 8 sums is 1.42 of that above the mean."""
    layout = ["model=deepseek_v2_lite_16b", "parallelism.dp_shard=8", "parallelism.ep=8"]
    layout += ["training.seq_len=4096", "training.global_batch_size=32"]
    assert worker_of(*layout).busiest == pytest.approx(1 + 0.25 / 8**0.5 * 1.424, abs=1e-3)
    assert worker_of(*layout, "model.moe.force_balance=true").busiest == 1.0
    assert worker_of(*layout[:2]).busiest == 1.0
    balanced, usual = (step(*layout, f"model.moe.force_balance={on}")[0] for on in ("true", "false"))
    assert usual.parts["ep"] == pytest.approx(balanced.parts["ep"] * worker_of(*layout).busiest, rel=0.02)
    assert usual.parts["compute"] > balanced.parts["compute"]


def test_flex_pads_heads_to_a_power_of_two() -> None:
    """Heads of 192 and 128 are computed as 256 and 128; those of 128 are not padded."""
    for model, padded in (("deepseek_v2_lite_16b", 384 / 320), ("llama3_8b", 1.0)):
        flash, flex = (worker_of(f"model={model}", software=Software(name)) for name in ("flash2", "flex"))
        operations = flash.model_costs.block_operations(flash.job.model, 0, 8192)
        flops = flash.rows * operations.attention.flops
        assert flash._attention_seconds(operations) == flash.machine.attention_seconds(flops, flash.dtype)
        assert flex._attention_seconds(operations) == flex.machine.attention_seconds(
            flops * padded, flex.dtype
        )


def test_weights_are_cast_once_a_microbatch_unless_they_are_gathered_in_8_bits() -> None:
    """5 bytes a weight in forward: the maximum reads 2, the cast reads 2 and writes 1."""
    base = ["model=llama3_8b", "parallelism.dp_shard=8", "precision=float8_tensorwise"]
    cast, gathered = worker_of(*base), worker_of(*base, "precision.enable_fsdp_float8_all_gather=true")
    operations = cast.model_costs.block_operations(cast.job.model, 0, 8192)
    weights = sum(product.size for product in operations.products)
    more = cast._forward(operations) - gathered._forward(operations)
    assert more == pytest.approx(cast.machine.pass_seconds(5 * weights))


def test_biases_of_experts_add_up_their_gradients_slowly() -> None:
    """As much as what 1,571 ms of GPT-OSS 20b lost by another kernel (torchtitan pull request 2686)."""
    for model, seconds in (("gpt_oss_20b", 0.15), ("qwen3_30b_a3b", 0.0)):
        worker = worker_of(f"model={model}", "parallelism.dp_shard=8", "training.seq_len=8192")
        slow = worker.block(0).inputs.compute
        worker.costs = replace(worker.costs, bias_gradient=0.0)
        assert 24 * (slow - worker.block(0).inputs.compute) == pytest.approx(seconds, abs=0.03)


def test_a_pipeline_adds_gradients_up_in_the_dtype_of_their_reduction() -> None:
    """Cast: 2 bytes are read and 4 written; added to a sum of 4 bytes, it is read, too."""
    one, piped = (
        worker_of("model=llama3_8b", *layout)
        for layout in (["parallelism.dp_shard=8"], ["parallelism.pp=2", "parallelism.dp_shard=4"])
    )
    values = sum(
        product.size for product in one.model_costs.block_operations(one.job.model, 0, 8192).products
    )
    assert one.rows == piped.rows
    more = piped.block(0).weights.compute - one.block(0).weights.compute
    assert more == pytest.approx(one.machine.pass_seconds(4 * values))


def test_other_software_has_other_kernels() -> None:
    job = job_of("model=llama3_8b", "parallelism.dp_shard=8", "training.seq_len=8192")

    def rate(software: Software) -> float:
        machine = machine_of(job, Calibration(Constants(), software=software))
        assert machine is not None
        return StepModel(job, machine).speed()[0].tokens_per_second_per_rank

    here = rate(Software())
    assert rate(Software("cudnn")) == here > rate(Software("flash2")) > rate(Software("flash1"))
    assert rate(Software(fused_norm=False)) < 0.95 * here
    assert 1.15 * here < rate(Software(speed=1.2)) < 1.2 * here


def test_a_step_takes_as_long_as_the_host_needs_to_start_it() -> None:
    job = job_of("model=llama3_debug", "parallelism=single", "training.global_batch_size=8")
    machine = machine_of(job)
    assert machine is not None
    kernels = 7 + 15 + 1  # products, others, attention
    compute = StepModel(job, machine).speed()[0].parts["compute"]
    assert compute >= 3 * job.model.n_layers * kernels * 20e-6 * job.accumulation_steps
    quick = machine_of(job, Calibration(Constants(host=0.0)))
    assert quick is not None and StepModel(job, quick).speed()[0].parts["compute"] < compute / 2


def test_routers_multiply_in_float32() -> None:
    """The highest precision does without tensor cores."""
    base = ["model=deepseek_v3_671b", "parallelism=fsdp_ep", "parallelism.dp_shard=64", "parallelism.ep=64"]
    base += ["training.seq_len=4096", "training.local_batch_size=8", "training.global_batch_size=512"]
    exact, quick = (
        step(*base, f"training.matmul_precision={name}")[0].parts["compute"] for name in ("highest", "high")
    )
    tokens, blocks = 8 * 4096, 59  # one of them predicts the token after the next
    flops = 3 * 2 * tokens * 7168 * 256 * blocks
    saved = flops * (1 / 66.9e12 - 1 / 494.7e12) / (0.825 * 0.803)
    assert exact - quick == pytest.approx(saved, rel=0.25)


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
    assert (
        quick.parts["tp"] == pytest.approx(slow.parts["tp"] * 0.7) and quick.step_seconds < slow.step_seconds
    )


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


def test_a_ring_pays_for_its_partial_results() -> None:
    """At 4,096 tokens attention is cheap, and each of eight steps merges outputs and adds gradients up."""
    base = ["model=llama3_8b", "training.seq_len=4096", "training.global_batch_size=8", "compile=on"]
    base += ["activation_checkpoint=none", "precision=bf16"]
    alone = step(*base, "parallelism.dp_shard=8")[0].tokens_per_second_per_rank
    ring = step(*base, "parallelism=fsdp_cp", "parallelism.dp_shard=1", "parallelism.cp=8")[0]
    assert ring.tokens_per_second_per_rank < 0.9 * alone


def test_a_power_limit_slows_products_and_not_memory() -> None:
    """500 of 700 W is a clock of sqrt(300 / 500), with 200 W that do not depend on it."""
    job = job_of("model=llama3_8b", "parallelism.dp_shard=8", "training.seq_len=8192")
    rated, limited = (
        machine_of(with_value(job, "cluster.accelerator", each.name)) for each in (H100_SXM, H100_96GB)
    )
    assert rated is not None and limited is not None
    shape = (8192, 4096, 14336, "bfloat16", 2)
    clock = (300 / 500) ** 0.5
    assert rated.product_seconds(*shape) / limited.product_seconds(*shape) == pytest.approx(clock, rel=0.01)
    assert limited.attention_seconds(1e12, "bfloat16") == rated.attention_seconds(1e12, "bfloat16")


def test_more_devices_have_a_slower_slowest_one() -> None:
    """With a deviation of 1.75 %, the expected maximum of 8 and of 128 is 1.42 and 2.59 deviations above
    the mean."""
    found = []
    for ranks in (1, 8, 128):
        machine = machine_of(
            job_of("model=llama3_8b", f"parallelism.dp_shard={ranks}", "training.global_batch_size=128")
        )
        assert machine is not None
        found.append(machine.slowest)
    assert found == pytest.approx([1.0, 1 + 1.424 * 0.0175, 1 + 2.594 * 0.0175], abs=5e-4)


def test_scales_for_rows_gain_less_than_one_for_a_tensor() -> None:
    """Published for the H100 (torchao/float8/README.md): 25 % with one scale, whose weights are gathered in
    8 bits (benchmarks/float8/training/torchtitan_benchmark.sh), 10 % with one for each row."""
    base = ["model=llama3_8b", "parallelism.dp_shard=8", "training.seq_len=8192", "compile=on"]
    base += ["activation_checkpoint=selective_op"]
    rate = {
        name: step(*base, f"precision={name}", *more)[0].tokens_per_second_per_rank
        for name, *more in (
            ("bf16",),
            ("float8_tensorwise", "precision.enable_fsdp_float8_all_gather=true"),
            ("float8_rowwise",),
        )
    }
    assert 1.2 < rate["float8_tensorwise"] / rate["bf16"] < 1.35
    assert 1.0 < rate["float8_rowwise"] / rate["bf16"] < 1.2


def test_without_a_network_there_is_no_speed_between_nodes() -> None:
    unknown = ["model=llama3_8b", "cluster.network_gbps=null", "training.global_batch_size=16"]
    assert machine_of(job_of(*unknown, "parallelism.dp_shard=8")) is not None
    far = make_plan(job_of(*unknown, "parallelism.dp_shard=16"))
    assert far.speed is None and far.fits
    assert "unknown network between nodes; set cluster.network_gbps" in render(far)
