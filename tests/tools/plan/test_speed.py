"""A step's time: collectives and links by hand, the update, and properties that must hold."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from jobs import tiny

from harness.compose.composer import compose_job
from harness.config.fields import with_value
from harness.config.job import Job
from harness.model.spec import tensors
from harness.tools.plan.block_cost import Worker
from harness.tools.plan.constants import Calibration, Constants, Software
from harness.tools.plan.machine import (
    Group,
    Machine,
    group_of,
    machine_of,
    neighbours,
)
from harness.tools.plan.make import make_plan
from harness.tools.plan.parameters import muon_update, parameters_of
from harness.tools.plan.plan import Speed, Traffic
from harness.tools.plan.render import render
from harness.tools.plan.space import Space
from harness.tools.plan.step_time import StepModel

COMMON = (
    "model=llama3_8b",
    "data=synthetic",
    "tokenizer=bytes",
    "precision=bf16",
    "cluster=slurm_h100",
)
LONG = ("parallelism.dp_shard=8", "training.seq_len=8192")


def job_of(*overrides: str) -> Job:
    return compose_job([*COMMON, *overrides])


def machine_for(job: Job, software: Software | None = None, **constants: float) -> Machine:
    machine = machine_of(job, Calibration(Constants(**constants), software=software or Software()))
    assert machine is not None
    return machine


def step(*overrides: str, **constants: float) -> tuple[Speed, list[Traffic]]:
    job = job_of(*overrides)
    return StepModel(job, machine_for(job, **constants)).speed()


def rate(*overrides: str) -> float:
    return step(*overrides)[0].tokens_per_second_per_rank


def worker_of(*overrides: str, software: Software | None = None) -> Worker:
    job = job_of(*overrides)
    return Worker(job, machine_for(job, software))


def links(job: Job) -> dict[str, str]:
    return {each.axis: each.link for each in make_plan(job).traffic}


def test_groups_know_their_nodes() -> None:
    job = job_of(
        "model=llama3_70b", "parallelism=fsdp_tp", "parallelism.tp=4", "parallelism.dp_shard=8"
    )
    assert group_of(job, 8, "tp") == Group(4, 4)
    assert group_of(job, 8, "dp_shard", "cp") == Group(8, 2)
    wide = job_of("parallelism=fsdp_cp", "parallelism.cp=2", "parallelism.dp_shard=8")
    assert group_of(wide, 8, "dp_shard", "cp") == Group(16, 8)
    assert group_of(wide, 8, "cp") == Group(2, 2)


def test_ranks_with_the_same_experts_are_on_many_nodes() -> None:
    """``ep`` is innermost: FSDP of experts over 256 ranks of 8 a node, EP 8, has one rank on each node."""
    far = ["model=deepseek_v3_671b", "training.global_batch_size=256", "parallelism.dp_shard=256"]
    split = [
        *far[:2],
        *(f"parallelism.{each}" for each in ("dp_shard=32", "tp=8", "expert_tensor_parallel=true")),
    ]
    for layout, ep, groups in (
        (far, 8, (Group(8, 8), Group(32, 1))),
        (far, 4, (Group(4, 4), Group(64, 2))),
        (far, 64, (Group(64, 8), Group(4, 1))),
        (split, 8, (Group(8, 1), Group(4, 1))),
    ):
        job = job_of(*layout, f"parallelism.ep={ep}")
        assert tuple(group_of(job, 8, axis) for axis in ("ep", "expert_shards")) == groups
    traffic = step(*far, "parallelism.ep=8", "training.seq_len=4096")[1]
    [experts] = [each for each in traffic if (each.ranks, each.collective) == (32, "all_gather")]
    assert experts.link == "network" and experts.seconds is not None
    assert experts.bytes / experts.seconds == pytest.approx(50e9 * 0.85, rel=0.01)


def test_ranks_among_neighbours_are_counted_as_placed() -> None:
    """Against a count of every group's ranks on every node."""

    def shares(ranks: list[int], size: int) -> list[int]:
        nodes = [rank // size for rank in ranks]
        return [nodes.count(node) for node in set(nodes)]

    for degree, stride, size, copies in product((2, 3, 8, 12), (1, 2, 8), (4, 8, 72), (1, 3, 10)):
        world = degree * stride * copies
        expected = min(
            count
            for start in range(0, world, degree * stride)
            for offset in range(stride)
            for count in shares([start + offset + i * stride for i in range(degree)], size)
        )
        # Ranks that are apart may be one more on some nodes.
        found = neighbours(degree, stride, size, world)
        assert expected <= found <= expected + (stride > 1), (degree, stride, size, copies)
    assert neighbours(3, 1, 8, 3 * 10**12) == 1
    assert neighbours(12, 1, 8, 24) == 4 and neighbours(32, 8, 72, 256) == 5


LINK, NETWORK = 450e9 * 0.75, 50e9 * 0.85


@pytest.mark.parametrize(
    ("collective", "size", "group", "seconds"),
    [
        ("all_gather", 8e9, Group(8, 8), 7e9 / LINK),
        ("all_reduce", 8e9, Group(8, 8), 14e9 / LINK),
        # With one member per node, its adapter carries all traffic; with eight, eight adapters share it.
        ("reduce_scatter", 8e9, Group(8, 1), 7e9 / NETWORK),
        ("all_gather", 16e9, Group(16, 8), 15e9 / LINK),
        ("all_gather", 16e9, Group(16, 2), 15e9 / NETWORK / 2),
        ("send", 1e9, Group(2, 1), 1e9 / NETWORK),
        # Of 16 pieces, 8 go to other nodes, while 7 go to ranks of this one.
        ("all_to_all", 16e9, Group(16, 8), 8e9 / NETWORK),
        ("all_to_all", 8e9, Group(8, 8), 7e9 / LINK),
        ("all_gather", 8e9, Group(1, 1), 0.0),
    ],
)
def test_collectives_by_hand(collective: str, size: float, group: Group, seconds: float) -> None:
    machine = machine_for(job_of("parallelism.dp_shard=8"), latency=0.0)
    assert machine.collective_seconds(collective, size, group) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "link", "shares"),
    [
        # Four devices without a switch have a third of their links each.
        ("H200 SXM", "NVLink", [1 / 3, 1.0]),
        ("GB200", "NVLink", [1.0, 1.0]),
        ("MI300X", "Infinity Fabric", [1.0, 1.0]),
        ("L40S", "PCIe", [1.0, 1.0]),
    ],
)
def test_links_of_devices(name: str, link: str, shares: list[float]) -> None:
    job = job_of("cluster=slurm", "parallelism.dp_shard=2", f"cluster.accelerator={name}")
    machine = machine_for(with_value(job, "cluster.ranks_per_node", 4), latency=0.0)
    whole = machine.device.link_bandwidth * 0.75
    found = [
        machine.collective_seconds("all_gather", 8e9, Group(ranks, ranks))
        / (8e9 * (ranks - 1) / ranks)
        for ranks in (2, 4)
    ]
    assert [1 / (each * whole) for each in found] == pytest.approx(shares)
    assert links(job) == {"dp": link}


def test_a_domain_of_nodes_is_one_node_to_the_links() -> None:
    """64 GPUs on 16 nodes of a rack: with a domain every group has NVLink, without it only those of 4."""
    rack = ["cluster=slurm_gb200", "parallelism=fsdp_tp", "parallelism.tp=8"]
    wide = [*rack, "parallelism.dp_shard=8", "training.global_batch_size=8"]
    far = [*rack, "parallelism.dp_shard=16", "training.global_batch_size=16"]
    assert links(job_of(*wide)) == {"dp": "NVLink", "tp": "NVLink"}
    assert links(job_of(*wide, "cluster.link_nodes=1")) == {"dp": "network", "tp": "network"}
    # Between two domains of 64 the network connects eight ranks of each group on either side.
    two = job_of(*far, "cluster.link_nodes=16")
    assert links(two) == {"dp": "network", "tp": "NVLink"}
    machine = machine_for(two, latency=0.0, link=1.0, network=1.0)
    group = group_of(two, machine.ranks_per_node, "dp_shard", "cp")
    assert group == Group(16, 8)
    assert machine.collective_seconds("all_gather", 16e9, group) == pytest.approx(15e9 / (8 * 50e9))
    # A single domain needs no network.
    assert machine_of(job_of(*wide, "cluster.network_gbps=null")) is not None
    assert machine_of(job_of(*far, "cluster.network_gbps=null")) is None
    assert "16 nodes of 4, NVLink joins 18 nodes" in render(make_plan(job_of(*wide)))


def test_a_search_keeps_tensor_parallel_within_the_domain() -> None:
    typed = ["parallelism.pp=1", "parallelism.cp=1", "parallelism.dp_replicate=1"]
    for cluster, most in (([], 64), (["cluster.link_nodes=1"], 4)):
        nodes = ["cluster=slurm_gb200", "cluster.nodes=16", "parallelism.dp_shard=64", *cluster]
        base = job_of(*nodes, *typed, "training.global_batch_size=64")
        assert (
            max(of[-1] for of, _ in Space.of(base, [*typed, "cluster.nodes=16"]).layouts()) == most
        )


@pytest.mark.parametrize(
    ("adapters", "gbps", "bandwidth"),
    # The last is p5.48xlarge: 32 adapters of 100 Gbit/s for 8 GPUs.
    [(None, 400, 50e9), (4, 400, 25e9), (32, 100, 50e9)],
)
def test_adapters_are_shared_by_the_ranks_of_a_node(
    adapters: Any, gbps: int, bandwidth: float
) -> None:
    job = job_of(
        "parallelism.dp_shard=16", "training.global_batch_size=16", f"cluster.network_gbps={gbps}"
    )
    assert (
        machine_for(with_value(job, "cluster.network_adapters", adapters)).network_bandwidth
        == bandwidth
    )


def test_no_constants_of_a_cluster_change_a_job() -> None:
    values: dict[str, Any] = {"link_nodes": 2, "network_adapters": 4}
    base = ["parallelism.dp_shard=16", "training.global_batch_size=16"]
    assert (
        job_of(*base, *(f"cluster.{name}={value}" for name, value in values.items())).id
        == job_of(*base).id
    )


def test_without_a_network_there_is_no_speed_between_nodes() -> None:
    unknown = ["cluster.network_gbps=null", "training.global_batch_size=16"]
    assert machine_of(job_of(*unknown, "parallelism.dp_shard=8")) is not None
    far = make_plan(job_of(*unknown, "parallelism.dp_shard=16"))
    assert far.speed is None and far.fits
    assert "unknown network between nodes; set cluster.network_gbps" in render(far)


def test_collectives_beside_computing_slow_it_down() -> None:
    """Gathers and reductions of 32 blocks are hidden but for the first ones, and take computing with them."""
    (alone, traffic), (slowed, _) = (
        step(*LONG, contention=share, second_wave=0.0) for share in (0.0, 0.15)
    )
    exposed, taken = alone.parts["dp"], sum(each.seconds or 0.0 for each in traffic)
    assert slowed.parts["dp"] - exposed == pytest.approx(0.15 * (taken - exposed))
    # Products of an A100 have many blocks for each multiprocessor, those of newer devices one.
    constants = Constants()
    for name, lost in (("A100 SXM 80GB", 0.0), ("H100 SXM", constants.second_wave)):
        assert (
            machine_for(job_of(f"cluster.accelerator={name}")).contention
            == constants.contention + lost
        )


def test_a_power_limit_slows_products_and_not_memory() -> None:
    """500 of 700 W is a clock of sqrt(300 / 500), with 200 W that do not depend on it."""
    job = job_of(*LONG)
    rated, limited = (
        machine_for(with_value(job, "cluster.accelerator", name))
        for name in ("H100 SXM", "H100 96GB")
    )
    shape = (8192, 4096, 14336, "bfloat16", 2)
    clock = (300 / 500) ** 0.5
    assert rated.product_seconds(*shape) / limited.product_seconds(*shape) == pytest.approx(
        clock, rel=0.01
    )
    assert limited.attention_seconds(1e12, "bfloat16") == rated.attention_seconds(1e12, "bfloat16")


def test_more_devices_have_a_slower_slowest_one() -> None:
    """With a deviation of 1.75 %, the expected maximum of 8 and of 128 is 1.42 and 2.59 deviations above
    the mean."""
    layouts = [
        (f"parallelism.dp_shard={ranks}", "training.global_batch_size=128") for ranks in (1, 8, 128)
    ]
    found = [machine_for(job_of(*layout)).pace for layout in layouts]
    assert found == pytest.approx([1.0, 1 + 1.424 * 0.0175, 1 + 2.594 * 0.0175], abs=5e-4)


def test_other_software_has_other_kernels() -> None:
    job = job_of(*LONG)

    def with_software(*names: str, **values: Any) -> float:
        model = StepModel(job, machine_for(job, Software(*names, **values)))
        return model.speed()[0].tokens_per_second_per_rank

    here = with_software()
    assert with_software("cudnn") == here > with_software("flash2") > with_software("flash1")
    assert with_software(fused_norm=False) < 0.95 * here
    assert 1.15 * here < with_software(speed=1.2) < 1.2 * here


@pytest.mark.parametrize("compiled", ["on", "off"])
def test_either_half_of_a_split_pass_calls_all_of_a_compiled_block(compiled: str) -> None:
    layout = [
        "parallelism.pp=2",
        "parallelism.pp_schedule=ZBVZeroBubble",
        "training.local_batch_size=8",
    ]
    job = job_of(
        *layout, "training.global_batch_size=8", "activation_checkpoint=full", f"compile={compiled}"
    )
    stages = [stage.passes for stage in StepModel(job, machine_for(job)).stages]
    halves = [passes["I"].seconds + passes["W"].seconds for passes in stages]
    whole = [passes["B"].seconds for passes in stages]
    assert halves[0] == pytest.approx(whole[0])
    assert halves[1] == pytest.approx(whole[1] * (2 if compiled == "on" else 1))


def test_experts_wait_for_the_busiest_rank() -> None:
    """64 experts of a load with a deviation of 0.25 on 8 ranks: the sum of 8 has 0.25 / sqrt(8), and the
    largest of 8 sums is 1.42 of that above the mean."""
    layout = ["model=deepseek_v2_lite_16b", "parallelism.dp_shard=8", "parallelism.ep=8"]
    layout += ["training.seq_len=4096", "training.global_batch_size=32"]
    assert worker_of(*layout).busiest == pytest.approx(1 + 0.25 / 8**0.5 * 1.424, abs=1e-3)
    assert worker_of(*layout, "model.moe.force_balance=true").busiest == 1.0
    assert worker_of(*layout[:2]).busiest == 1.0
    balanced, usual = (
        step(*layout, f"model.moe.force_balance={on}")[0] for on in ("true", "false")
    )
    assert usual.parts["ep"] == pytest.approx(
        balanced.parts["ep"] * worker_of(*layout).busiest, rel=0.02
    )
    assert usual.parts["compute"] > balanced.parts["compute"]


def test_flex_pads_heads_to_a_power_of_two() -> None:
    """Heads of 192 and 128 are computed as 256 and 128; those of 128 are not padded."""
    for model, padded in (("deepseek_v2_lite_16b", 384 / 320), ("llama3_8b", 1.0)):
        flash, flex = (
            worker_of(f"model={model}", software=Software(name)) for name in ("flash2", "flex")
        )
        operations = flash.model_costs.block_operations(flash.job.model, 0, 8192)
        flops = flash.rows * operations.attention.flops
        for worker, share in ((flash, 1.0), (flex, padded)):
            expected = worker.machine.attention_seconds(flops * share, worker.dtype)
            assert worker._attention_seconds(operations) == expected


def test_muon_of_two_ranks_by_hand() -> None:
    """Each rank sends its half of the other's matrices, and gets it back orthogonalized."""
    job = tiny(
        "optimizer=muon",
        "parallelism=fsdp",
        "parallelism.dp_shard=2",
        "training.global_batch_size=8",
    )
    planned = muon_update(job, parameters_of(job, 0))
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
