"""Links of groups: domains larger than a node, shared adapters, and leaf switches; times by hand."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.machine import Group, Machine, group_of, machine_of, neighbours
from harness.tools.plan.make import make_plan
from harness.tools.plan.render import render
from harness.tools.plan.space import Space

BASE = ["model=llama3_8b", "data=synthetic", "tokenizer=bytes", "precision=bf16"]
NVL72 = [*BASE, "cluster=slurm_gb200"]


def job_of(*overrides: str, ranks: int) -> Job:
    return compose_job([*overrides, f"training.global_batch_size={ranks}"])


def machine_without_latency(job: Job) -> Machine:
    machine = machine_of(job, Calibration(Constants(latency=0.0, link=1.0, network=1.0)))
    assert machine is not None
    return machine


def links(job: Job) -> dict[str, str]:
    return {each.axis: each.link for each in make_plan(job).traffic}


def test_a_domain_of_nodes_is_one_node_to_the_links() -> None:
    """64 GPUs on 16 nodes of a rack: with a domain every group has NVLink, without it only those of 4."""
    wide = [*NVL72, "parallelism=fsdp_tp", "parallelism.tp=8", "parallelism.dp_shard=8"]
    assert links(job_of(*wide, ranks=8)) == {"dp": "NVLink", "tp": "NVLink"}
    assert links(job_of(*wide, "cluster.link_nodes=1", ranks=8)) == {"dp": "network", "tp": "network"}
    # Between two domains of 64 the network connects eight ranks of each group on either side.
    two = job_of(*wide[:-1], "parallelism.dp_shard=16", "cluster.link_nodes=16", ranks=16)
    assert links(two) == {"dp": "network", "tp": "NVLink"}
    machine = machine_without_latency(two)
    group = group_of(two, machine.ranks_per_node, "dp_shard", "cp")
    assert group == Group(16, 8)
    assert machine.collective_seconds("all_gather", 16e9, group) == pytest.approx(15e9 / (8 * 50e9))
    # A single domain needs no network.
    assert machine_of(job_of(*wide, "cluster.network_gbps=null", ranks=8)) is not None
    assert (
        machine_of(job_of(*wide[:-1], "parallelism.dp_shard=16", "cluster.network_gbps=null", ranks=16))
        is None
    )
    assert "16 nodes of 4, NVLink joins 18 nodes" in render(make_plan(job_of(*wide, ranks=8)))


def test_a_search_keeps_tensor_parallel_within_the_domain() -> None:
    typed = ["parallelism.pp=1", "parallelism.cp=1", "parallelism.dp_replicate=1"]

    def degrees(*cluster: str) -> set[int]:
        base = compose_job([*NVL72, *typed, *cluster, "training.global_batch_size=64"])
        space = Space.of(base, [*typed, "cluster.nodes=16"])
        return {of[-1] for of, _ in space.layouts()}

    assert max(degrees("cluster.nodes=16", "parallelism.dp_shard=64")) == 64
    assert max(degrees("cluster.nodes=16", "parallelism.dp_shard=64", "cluster.link_nodes=1")) == 4


def test_ranks_among_neighbours_are_counted_as_placed() -> None:
    """Against a count of every group's ranks on every node."""
    cases = product((2, 3, 8, 12), (1, 2, 8), (4, 8, 72), (1, 3, 10))
    for degree, stride, size, copies in cases:
        world = degree * stride * copies
        expected = min(
            count
            for start in range(0, world, degree * stride)
            for offset in range(stride)
            for count in shares([start + offset + i * stride for i in range(degree)], size)
        )
        found = neighbours(degree, stride, size, world)
        # Ranks that are apart may be one more on some nodes.
        assert expected <= found <= expected + (stride > 1), (degree, stride, size, copies)
    assert neighbours(3, 1, 8, 3 * 10**12) == 1
    assert neighbours(12, 1, 8, 24) == 4 and neighbours(32, 8, 72, 256) == 5


def shares(ranks: list[int], size: int) -> list[int]:
    nodes = [rank // size for rank in ranks]
    return [nodes.count(node) for node in set(nodes)]


def test_adapters_are_shared_by_the_ranks_of_a_node() -> None:
    def rate(*cluster: str) -> float:
        machine = machine_of(
            job_of(*BASE, "cluster=slurm_h100", *cluster, "parallelism.dp_shard=16", ranks=16)
        )
        assert machine is not None
        return machine.network_bandwidth

    assert rate() == 50e9
    assert rate("cluster.network_adapters=4") == 25e9
    # p5.48xlarge: 32 adapters of 100 Gbit/s for 8 GPUs.
    assert rate("cluster.network_adapters=32", "cluster.network_gbps=100") == 50e9


LEAVES = [*BASE, "cluster=slurm_h100", "cluster.leaf_nodes=4", "cluster.oversubscription=4"]


def test_leaf_switches_by_hand() -> None:
    """Eight nodes under two leaf switches, whose links have a fourth of the nodes' bandwidth."""
    job = job_of(*LEAVES, "parallelism.dp_shard=64", ranks=64)
    machine = machine_without_latency(job)
    whole = group_of(job, machine.ranks_per_node, "dp_shard", "cp")
    assert whole == Group(64, 8, 32)
    # A ring leaves each leaf switch once: four nodes share its links, which is all that a ring of one needs.
    assert machine.collective_seconds("all_gather", 64e9, whole) == pytest.approx(63e9 / (8 * 50e9))
    # Half of an all-to-all's pieces are for the other leaf, at 12.5 GB/s for each rank.
    assert machine.collective_seconds("all_to_all", 64e9, whole) == pytest.approx(32e9 / 12.5e9)
    assert machine.link_of(whole) == "spine"
    # One node of each leaf: every rank of a leaf sends to the other one.
    far = Group(2, 1, 1)
    assert machine.collective_seconds("all_reduce", 2e9, far) == pytest.approx(2 * 1e9 / 12.5e9)
    assert machine.collective_seconds("send", 1e9, far.pair) == pytest.approx(1e9 / 12.5e9)
    # Under one leaf switch the network is as fast as without.
    near = Group(4, 1, 4)
    assert machine.collective_seconds("all_gather", 4e9, near) == pytest.approx(3e9 / 50e9)
    assert machine.link_of(near) == "network"


def test_oversubscription_slows_what_crosses_leaves() -> None:
    def rate(*overrides: str, ranks: int = 64) -> float:
        plan = make_plan(job_of(*overrides, "training.seq_len=2048", ranks=ranks))
        assert plan.speed is not None
        return plan.speed.tokens_per_second_per_rank

    replicas = ["parallelism.dp_replicate=2", "parallelism.dp_shard=32"]
    full = [each for each in LEAVES if "leaf" not in each and "over" not in each]
    assert rate(*LEAVES, *replicas) < rate(*full, *replicas)
    assert rate(*LEAVES, *replicas[1:], ranks=32) == rate(*full, *replicas[1:], ranks=32)


@pytest.mark.parametrize(
    ("accelerator", "link"), [("MI300X", "Infinity Fabric"), ("L40S", "PCIe"), ("H200 SXM", "NVLink")]
)
def test_links_of_a_node_have_their_name(accelerator: str, link: str) -> None:
    job = job_of(
        *BASE, "cluster=slurm", f"cluster.accelerator={accelerator}", "parallelism.dp_shard=8", ranks=8
    )
    assert links(job) == {"dp": link}


def test_no_constants_of_a_cluster_change_a_job() -> None:
    values: dict[str, Any] = {"link_nodes": 2, "leaf_nodes": 4, "oversubscription": 2, "network_adapters": 4}
    plain = job_of(*BASE, "cluster=slurm_h100", "parallelism.dp_shard=16", ranks=16)
    typed = [f"cluster.{name}={value}" for name, value in values.items()]
    assert job_of(*BASE, "cluster=slurm_h100", *typed, "parallelism.dp_shard=16", ranks=16).id == plain.id
