"""A step's time: collectives and links by hand, the update, and properties that must hold."""

from itertools import product

import pytest
from cases import rows
from jobs import tiny
from plans import LLAMA_8B, job_of

from harness.config.fields import with_value
from harness.model.spec import tensors
from harness.tools.plan.block_cost import Worker
from harness.tools.plan.constants import Calibration, Constants, Software
from harness.tools.plan.machine import Group, group_of, machine_of, neighbours
from harness.tools.plan.make import make_plan
from harness.tools.plan.parameters import muon_update, parameters_of
from harness.tools.plan.render import render
from harness.tools.plan.space import Space
from harness.tools.plan.step_time import StepModel

LONG = f"{LLAMA_8B} dp_shard=8 training.seq_len=8192"


def machine_for(job, software=None, **constants):
    machine = machine_of(job, Calibration(Constants(**constants), software=software or Software()))
    assert machine is not None
    return machine


def step(line, software=None, **constants):
    job = job_of(line)
    return StepModel(job, machine_for(job, software, **constants)).speed()[0]


def traffic(line):
    return make_plan(job_of(line)).traffic


def links(line):
    return {each.axis: each.link for each in traffic(line)}


MODELS = {
    "llama": LLAMA_8B,
    "deepseek": f"{LLAMA_8B} model=deepseek_v3_671b training.global_batch_size=256",
}


@pytest.mark.parametrize(
    ("model", "layout", "axes", "group"),
    # ``ep`` is innermost: ranks with the same experts are on many nodes.
    rows("""
        llama     tp=4 dp_shard=8       tp             [4, 4]
        llama     tp=4 dp_shard=8       dp_shard cp    [8, 2]
        llama     cp=2 dp_shard=8       dp_shard cp    [16, 8]
        llama     cp=2 dp_shard=8       cp             [2, 2]
        deepseek  dp_shard=256 ep=8     ep             [8, 8]
        deepseek  dp_shard=256 ep=8     expert_shards  [32, 1]
        deepseek  dp_shard=256 ep=4     expert_shards  [64, 2]
        deepseek  dp_shard=256 ep=64    ep             [64, 8]
        deepseek  dp_shard=256 ep=64    expert_shards  [4, 1]
        deepseek  dp_shard=32 tp=8 ep=8 expert_tensor_parallel=true  ep             [8, 1]
        deepseek  dp_shard=32 tp=8 ep=8 expert_tensor_parallel=true  expert_shards  [4, 1]
    """),
)
def test_groups_know_their_nodes(model, layout, axes, group):
    job = job_of(f"{MODELS[model]} {layout}")
    assert group_of(job, 8, *axes.split()) == Group(*group)


def test_ranks_among_neighbours_are_counted_as_placed():
    """Against a count of every group's ranks on every node."""
    for degree, stride, size, copies in product((2, 3, 8, 12), (1, 2, 8), (4, 8, 72), (1, 3, 10)):
        world = degree * stride * copies
        expected = world
        for first in range(world):
            if first // stride % degree == 0:
                nodes = [(first + i * stride) // size for i in range(degree)]
                expected = min(expected, *map(nodes.count, nodes))
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
def test_collectives_by_hand(collective, size, group, seconds):
    machine = machine_for(job_of(f"{LLAMA_8B} dp_shard=8"), latency=0.0)
    assert machine.collective_seconds(collective, size, group) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("name", "link", "share"),
    [
        # Four devices without a switch have a third of their links each.
        ("H200 SXM", "NVLink", 1 / 3),
        ("GB200", "NVLink", 1.0),
        ("MI300X", "'Infinity Fabric'", 1.0),
        ("L40S", "PCIe", 1.0),
    ],
)
def test_links_of_devices(name, link, share):
    line = f"{LLAMA_8B} cluster=slurm dp_shard=2 cluster.accelerator='{name}'"
    assert links(line) == {"dp": link.strip("'")}
    machine = machine_for(with_value(job_of(line), "cluster.ranks_per_node", 4), latency=0.0)
    whole = 8e9 / (machine.device.link_bandwidth * 0.75)
    for ranks, rate in ((2, share), (4, 1.0)):
        seconds = machine.collective_seconds("all_gather", 8e9, Group(ranks, ranks))
        assert seconds == pytest.approx(whole * (ranks - 1) / ranks / rate)


def test_a_domain_of_nodes_is_one_node_to_the_links():
    """64 GPUs on 16 nodes of a rack: with a domain every group has NVLink, without it only those of 4."""
    rack = f"{LLAMA_8B} cluster=slurm_gb200 tp=8"
    wide = f"{rack} dp_shard=8 training.global_batch_size=8"
    far = f"{rack} dp_shard=16 training.global_batch_size=16"
    assert links(wide) == {"dp": "NVLink", "tp": "NVLink"}
    assert links(f"{wide} cluster.link_nodes=1") == {"dp": "network", "tp": "network"}
    # Between two domains of 64 the network connects eight ranks of each group on either side.
    two = f"{far} cluster.link_nodes=16"
    assert links(two) == {"dp": "network", "tp": "NVLink"}
    machine = machine_for(job_of(two), latency=0.0, link=1.0, network=1.0)
    group = group_of(job_of(two), machine.ranks_per_node, "dp_shard", "cp")
    assert group == Group(16, 8)
    assert machine.collective_seconds("all_gather", 16e9, group) == pytest.approx(15e9 / (8 * 50e9))
    # A single domain needs no network.
    assert machine_of(job_of(f"{wide} cluster.network_gbps=null")) is not None
    assert machine_of(job_of(f"{far} cluster.network_gbps=null")) is None
    assert "16 nodes of 4, NVLink joins 18 nodes" in render(make_plan(job_of(wide)))


def test_a_search_keeps_tensor_parallel_within_the_domain():
    typed = ["parallelism.pp=1", "parallelism.cp=1", "parallelism.dp_replicate=1"]
    line = f"{LLAMA_8B} cluster=slurm_gb200 cluster.nodes=16 dp_shard=64 {' '.join(typed)}"
    for nodes, most in ((18, 64), (1, 4)):
        job = job_of(f"{line} training.global_batch_size=64 cluster.link_nodes={nodes}")
        layouts = Space.of(job, [*typed, "cluster.nodes=16"]).layouts()
        assert max(of[-1] for of, _ in layouts) == most


def test_without_a_network_there_is_no_speed_between_nodes():
    unknown = f"{LLAMA_8B} cluster.network_gbps=null training.global_batch_size=16"
    assert machine_of(job_of(f"{unknown} dp_shard=8")) is not None
    far = make_plan(job_of(f"{unknown} dp_shard=16"))
    assert far.speed is None and far.fits
    assert "unknown network between nodes; set cluster.network_gbps" in render(far)


def test_collectives_beside_computing_slow_it_down():
    """Gathers and reductions of 32 blocks are hidden but for the first ones, and take computing with them."""
    alone, slowed = (step(LONG, contention=share, second_wave=0.0) for share in (0.0, 0.15))
    taken = sum(each.seconds or 0.0 for each in traffic(LONG))
    exposed = alone.parts["dp"]
    assert slowed.parts["dp"] - exposed == pytest.approx(0.15 * (taken - exposed))
    # Products of an A100 have many blocks for each multiprocessor, those of newer devices one.
    constants = Constants()
    for name, lost in (("A100 SXM 80GB", 0.0), ("H100 SXM", constants.second_wave)):
        machine = machine_for(job_of(f"{LONG} cluster.accelerator='{name}'"))
        assert machine.contention == constants.contention + lost


def test_a_power_limit_slows_products_and_not_memory():
    """500 of 700 W is a clock of sqrt(300 / 500), with 200 W that do not depend on it."""
    rated, limited = (
        machine_for(job_of(f"{LONG} cluster.accelerator='{name}'"))
        for name in ("H100 SXM", "H100 96GB")
    )
    shape = (8192, 4096, 14336, "bfloat16", 2)
    slower = rated.product_seconds(*shape) / limited.product_seconds(*shape)
    assert slower == pytest.approx((300 / 500) ** 0.5, rel=0.01)
    assert limited.attention_seconds(1e12, "bfloat16") == rated.attention_seconds(1e12, "bfloat16")


@pytest.mark.parametrize(("ranks", "deviations"), [(1, 0.0), (8, 1.424), (128, 2.594)])
def test_more_devices_have_a_slower_slowest_one(ranks, deviations):
    """The expected maximum of normal values, with a deviation of 1.75 %."""
    job = job_of(f"{LLAMA_8B} dp_shard={ranks} training.global_batch_size=128")
    assert machine_for(job).pace == pytest.approx(1 + deviations * 0.0175, abs=5e-4)


def test_other_software_has_other_kernels():
    def rate(*names, **values):
        return step(LONG, Software(*names, **values)).tokens_per_second_per_rank

    here = rate()
    assert rate("cudnn") == here > rate("flash2") > rate("flash1")
    assert rate(fused_norm=False) < 0.95 * here
    assert 1.15 * here < rate(speed=1.2) < 1.2 * here


@pytest.mark.parametrize(("compiled", "times"), [("on", 2), ("off", 1)])
def test_either_half_of_a_split_pass_calls_all_of_a_compiled_block(compiled, times):
    line = (
        f"{LLAMA_8B} pp=2 pp_schedule=ZBVZeroBubble training.local_batch_size=8 compile={compiled}"
    )
    job = job_of(f"{line} training.global_batch_size=8 activation_checkpoint=full")
    first, second = (stage.passes for stage in StepModel(job, machine_for(job)).stages[:2])
    assert first["I"].seconds + first["W"].seconds == pytest.approx(first["B"].seconds)
    assert second["I"].seconds + second["W"].seconds == pytest.approx(times * second["B"].seconds)


def test_experts_wait_for_the_busiest_rank():
    """64 experts of a load with a deviation of 0.25 on 8 ranks: the sum of 8 has 0.25 / sqrt(8), and the
    largest of 8 sums is 1.42 of that above the mean."""

    def busiest(line):
        job = job_of(line)
        return Worker(job, machine_for(job)).busiest

    line = f"{LLAMA_8B} model=deepseek_v2_lite_16b dp_shard=8 training.seq_len=4096"
    line += " training.global_batch_size=32"
    usual, balanced = f"{line} ep=8", f"{line} ep=8 model.moe.force_balance=true"
    assert busiest(usual) == pytest.approx(1 + 0.25 / 8**0.5 * 1.424, abs=1e-3)
    assert busiest(balanced) == busiest(line) == 1.0
    slow, fast = step(usual).parts, step(balanced).parts
    assert slow["ep"] == pytest.approx(fast["ep"] * busiest(usual), rel=0.02)
    assert slow["compute"] > fast["compute"]
    # Of 6 rows of a token one is the first expert's, the others those of 63 experts on 8 ranks.
    expected = 8 / 6 * (1 + 5 * 7 / 63)
    assert busiest(f"{usual} debug.routing=one_hot") == pytest.approx(expected, rel=0.01)


def test_measured_loads_count_for_time_and_memory():
    line = f"{LLAMA_8B} model=deepseek_v2_lite_16b dp_shard=8 ep=8 activation_checkpoint=none"
    job = job_of(f"{line} training.seq_len=4096 training.global_batch_size=32")
    plans = {}
    for loads in (None, 1.0, 1.5, 2.0):
        calibration = Calibration(Constants(), software=Software(expert_imbalance=loads))
        plans[loads] = make_plan(job, calibration)
    assert plans[None].peak == plans[1.0].peak == make_plan(job).peak
    assert plans[None].notes and not plans[1.5].notes
    more = plans[1.5].allocated - plans[1.0].allocated
    assert plans[2.0].allocated - plans[1.0].allocated == pytest.approx(2 * more) and more > 0
    times = [plans[loads].speed.step_seconds for loads in (1.0, None, 1.5)]
    assert times == sorted(times)


def test_muon_of_two_ranks_by_hand():
    """Each rank sends its half of the other's matrices, and gets it back orthogonalized."""
    job = tiny("optimizer=muon", "parallelism.dp_shard=2", "training.global_batch_size=8")
    planned = muon_update(job, parameters_of(job, 0))
    matrices = [each for each in tensors(job.model).values() if each.is_hidden_matrix]
    values = sum(each.size for each in matrices)
    # Both own half of the values, and send a half of those there, and half of their own back.
    assert planned.sent == pytest.approx(4 * values / 2, rel=0.1)
    assert sum(planned.shapes.values()) == pytest.approx(len(matrices) / 2, abs=len(matrices) / 4)


@pytest.mark.parametrize("layout", ["dp_shard=8", "pp=4 dp_shard=2 training.global_batch_size=16"])
def test_qk_clip_repeats_forward_passes(layout):
    def computing(*overrides):
        return step(" ".join((LLAMA_8B, layout, *overrides))).parts["compute"]

    without = computing()
    again = computing("optimizer.qk_clip=100") - without
    # A backward pass has twice the products of its forward pass.
    assert 0.2 < again / without < 0.4
    seldom = computing("optimizer.qk_clip=100", "optimizer.qk_clip_interval=10") - without
    assert seldom == pytest.approx(again / 10)
