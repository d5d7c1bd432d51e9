"""Hardware model of the plan: peaks, links, and which ranks share a node."""

from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import ceil, gcd, prod
from statistics import NormalDist

from harness.config.job import Job
from harness.config.parallelism import AXES
from harness.tools.plan.constants import (
    ACHIEVED,
    DEFAULTS,
    HGX,
    OTHER,
    Achieved,
    Calibration,
    Constants,
    Software,
)
from harness.util.hardware import Accelerator

# Boards of up to four of these have no switch. The list of boards with NVSwitch in NVIDIA's
# documentation of vGPU (docs.nvidia.com) has only boards of eight.
DIRECTLY_WIRED = ("A100 SXM", "H100 SXM", "H100 96GB", "H200 SXM", "GH200")
# The tile that cuBLAS and CUTLASS choose on Hopper for large matrices, and the speed of smaller tiles
# relative to it. These speeds are assumed, from 0.8 to 0.95 and from 0.6 to 0.8.
TILE = (128, 256)
TILES = {TILE: 1.0, (128, 128): 0.9, (64, 128): 0.7}


@dataclass(frozen=True)
class Group:
    """Ranks of one axis (or of several) that take part in a collective."""

    ranks: int
    per_node: int
    """Ranks of the group on one node, or on the neighbouring nodes that the accelerators' links
    join."""

    @property
    def nodes(self) -> int:
        return ceil(self.ranks / self.per_node)


@dataclass(frozen=True)
class Machine:
    """A device, its efficiency constants, and the links between devices."""

    device: Accelerator
    constants: Constants
    network_bandwidth: float
    """Bytes per second between nodes per device."""
    ranks_per_node: int
    """Neighbouring ranks that the accelerators' links join: those of a node, or of several."""
    ranks: int
    """Devices of the job."""
    board: int = 8
    """Devices of a node, whether the job has them or not."""
    software: Software = field(default_factory=Software)

    @cached_property
    def achieved(self) -> Achieved:
        found = ACHIEVED.get(self.device.name, OTHER)
        clock = self.constants.hgx
        if self.device.name in HGX:
            found = replace(found, half=found.half * clock, float8=found.float8 * clock)
        return found

    def product_seconds(
        self,
        rows: int,
        inputs: int,
        outputs: int,
        dtype: str,
        value_bytes: float,
        *,
        groups: int = 1,
        share: float = 1.0,
    ) -> float:
        """Seconds of a product [rows, inputs] x [inputs, outputs], or of ``groups`` such in one kernel.

        Limited by arithmetic, with an incomplete last wave of tiles, or by memory traffic (the
        roofline model, doi:10.1145/1498765.1498785). The kernel has ``share`` of the usual speed.
        """
        if min(rows, inputs, outputs) <= 0:
            return 0.0
        achieved = self.achieved
        if dtype in ("float8", "mxfp8"):
            share *= self.constants.float8 * achieved.float8
        else:
            share *= self.constants.matmul * achieved.half
        flops = 2.0 * rows * inputs * outputs * groups
        filled = _filled(rows, outputs, groups, self.device.units)
        arithmetic = flops / (self.device.peak_flops[dtype] * share * filled)
        moved = (value_bytes * (rows * inputs + inputs * outputs) + 2 * rows * outputs) * groups
        return max(arithmetic * self.pace, self.pass_seconds(moved)) + self.constants.launch

    @cached_property
    def pace(self) -> float:
        """Expected slowdown of the slowest device, relative to torch's kernels on an average one."""
        return (1.0 + self.constants.spread * largest_of(self.ranks)) / self.software.speed

    def busiest(self, ranks: int, experts: int) -> float:
        """Expected rows of the busiest of ``ranks`` with ``experts`` each, as a multiple of their mean."""
        deviation = self.constants.imbalance / max(1, experts) ** 0.5
        return 1.0 + deviation * largest_of(ranks)

    @cached_property
    def contention(self) -> float:
        """Fraction of computing that is lost while a collective runs beside it."""
        return self.constants.contention + self.constants.second_wave * self.achieved.persistent

    def pass_seconds(self, moved: float) -> float:
        return moved / (self.device.memory_bandwidth * self.constants.memory) * self.pace

    def attention_seconds(self, flops: float, dtype: str) -> float:
        kernel = self.software.attention
        achieved = self.achieved.others[kernel] if kernel else self.achieved.attention
        share = self.constants.attention * achieved
        return flops / (self.device.peak_flops[dtype] * share) * self.pace + self.constants.launch

    def link_of(self, group: Group) -> str:
        """Name of the slowest link between the ranks of a group."""
        return self.device.link if group.nodes == 1 else "network"

    def collective_seconds(self, collective: str, moved: float, group: Group) -> float:
        """Seconds of one collective.

        NCCL's rings and trees send each rank's data once over every link (nccl-tests,
        doc/PERFORMANCE.md). Between nodes every device uses its own network adapter, so the group's
        ranks on a node share the traffic.

        Args:
            collective: name as in ``Traffic.collective``.
            moved: bytes of the full tensor: the output of an all-gather, the input of a
                reduce-scatter, input or output of an all-reduce, the data a rank sends in an
                all-to-all or to the next stage.
            group: the ranks.
        """
        if group.ranks == 1 or moved == 0:
            return 0.0
        sent = moved * sent_share(collective, group.ranks)
        rate = self.device.link_bandwidth * self.constants.link
        directly_wired = self.device.name.startswith(DIRECTLY_WIRED) and 2 < self.board <= 4
        if directly_wired and group.per_node > 1:
            # These boards have no switch: their links are divided among the other devices.
            rate *= (group.per_node - 1) / (self.board - 1)
        if group.nodes > 1:
            if collective == "all_to_all":
                # Pieces for ranks of this node and of others are sent at the same time.
                outside = moved * (group.ranks - group.per_node) / group.ranks
                longest = max((sent - outside) / rate, outside / self.network_rate)
                return longest + self.constants.latency
            adapters = 1 if collective == "send" else group.per_node
            rate = min(rate, self.network_rate * adapters)
        return sent / rate + self.constants.latency

    @property
    def network_rate(self) -> float:
        """Achieved bytes per second and device between nodes."""
        return self.network_bandwidth * self.constants.network


def sent_share(collective: str, ranks: int) -> float:
    """Bytes that a rank sends in a collective, as a multiple of the full tensor."""
    if collective == "send":
        return 1.0
    share = (ranks - 1) / ranks
    return 2 * share if collective == "all_reduce" else share


@lru_cache(maxsize=4096)
def largest_of(number: int) -> float:
    """Expected largest of standard normal values: at the quantile (n - 0.375) / (n + 0.25) (Blom, 1958)."""
    return NormalDist().inv_cdf((number - 0.375) / (number + 0.25)) if number > 1 else 0.0


@lru_cache(maxsize=4096)
def _filled(rows: int, outputs: int, groups: int, units: int) -> float:
    """Fraction of the multiprocessors' speed that the tiles of a product use, over all waves.

    For a single product cuBLAS chooses a tile of which little lies beyond the edge of the result. In
    a kernel of several products, values beyond the edge cost as much as others.
    """

    def busy_share(tiles: int) -> float:
        return tiles / (ceil(tiles / units) * units)

    if groups > 1:
        down = ceil(rows / TILE[0])
        across = ceil(outputs / TILE[1])
        used = rows * outputs / (down * TILE[0] * across * TILE[1])
        return used * busy_share(groups * down * across)
    return max(
        share * busy_share(ceil(rows / height) * ceil(outputs / width))
        for (height, width), share in TILES.items()
    )


def on_cpu(job: Job) -> bool:
    """Whether ranks compute on a CPU: ``auto`` means this machine's if the cluster names no accelerator."""
    device = job.cluster.device
    return device == "cpu" or (device == "auto" and job.cluster.accelerator is None)


def device_of(job: Job) -> Accelerator | None:
    """Return the GPU that a job runs on; None if it is unknown, and for CPUs, whose time is not planned."""
    return None if on_cpu(job) else job.cluster.gpu


def machine_of(job: Job, calibration: Calibration = DEFAULTS) -> Machine | None:
    """Return the hardware of a job; None if the device, or the network that its ranks need, is unknown."""
    device = device_of(job)
    cluster = job.cluster
    linked = cluster.linked_ranks(job.world_size)
    gbps = cluster.network_gbps
    if device is None or (gbps is None and job.world_size > linked):
        return None
    return Machine(
        device,
        calibration.constants,
        (gbps or 0.0) * 1e9 / 8,
        linked,
        job.world_size,
        board=cluster.ranks_per_node or linked,
        software=calibration.software,
    )


def group_of(job: Job, ranks_per_node: int, *axes: str) -> Group:
    """Return the group over neighbouring mesh axes, e.g. dp_shard and cp.

    ``ep`` and ``expert_shards`` are axes of the experts' mesh (``parallelism/mesh.py``), which has
    them in place of dp_shard, cp, and tp where that does not split experts.
    """
    layout = job.parallelism
    degrees = layout.degrees
    if axes[0] in ("ep", "expert_shards"):
        degrees = {
            "replicas": layout.pp * layout.dp_replicate,
            "expert_shards": layout.expert_shards,
            "ep": layout.ep,
            "tp": layout.tp if layout.splits_experts else 1,
        }
    return _group(tuple(degrees.items()), ranks_per_node, axes)


@lru_cache(maxsize=4096)
def _group(
    degrees: tuple[tuple[str, int], ...], ranks_per_node: int, axes: tuple[str, ...]
) -> Group:
    world = prod(degree for _, degree in degrees)
    ranks = inside = stride = 1
    for axis, degree in reversed(degrees):
        if axis in axes:
            ranks *= degree
            inside *= neighbours(degree, stride, ranks_per_node, world)
        stride *= degree
    return Group(ranks, inside)


@lru_cache(maxsize=4096)
def neighbours(degree: int, stride: int, size: int, world: int) -> int:
    """Return how many ranks of a group are on one node.

    The group has ``degree`` ranks, ``stride`` apart; a node has ``size`` neighbouring ranks. Groups
    may divide a node unevenly, e.g. groups of 12 on nodes of 8. The result is the smallest number,
    which makes the slowest part of a collective.
    """
    extent = degree * stride
    least = size
    if world <= size or size % extent == 0:
        return degree
    # Later groups are placed like earlier ones.
    for number in range(min(world // extent, size // gcd(extent, size))):
        start = number * extent
        end = (number + 1) * extent
        if start // size == (end - 1) // size:
            continue  # all of them are neighbours
        on_first = -start % size or size
        on_last = end % size or size
        least = min(least, on_first, on_last)
    return max(1, least // stride)


assert AXES[-1] == "tp", "_group assumes that ranks of the last axis are next to each other"
