"""Hardware model of the plan: peaks, links, and which ranks share a node."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from math import ceil
from statistics import NormalDist

from harness.hardware import ACCELERATORS, Accelerator
from harness.job import Job
from harness.parallelism.config import AXES
from harness.plan.achieved import MEASURED, Achieved, achieved_by
from harness.plan.constants import Calibration, Constants

DTYPE_BYTES = {"float32": 4, "bfloat16": 2}
# Tile size that cuBLAS and CUTLASS choose on Hopper for large matrices.
TILE = (128, 256)


@dataclass(frozen=True)
class Group:
    """Ranks of one axis (or of several) that take part in a collective."""

    ranks: int
    per_node: int
    """Ranks of the group on one node."""

    @property
    def nodes(self) -> int:
        """Number of nodes of the group."""
        return ceil(self.ranks / self.per_node)


@dataclass(frozen=True)
class Machine:
    """A device, its efficiency constants, and the links between devices."""

    device: Accelerator
    constants: Constants
    network_bandwidth: float
    """Bytes per second between nodes per device."""
    ranks_per_node: int
    ranks: int
    """Devices of the job."""

    @property
    def shares_cores(self) -> bool:
        """Whether ranks compute on the same cores."""
        return self.constants.cores is not None

    @cached_property
    def achieved(self) -> Achieved:
        """What the device's best kernels achieve; of a CPU the peaks are measured."""
        return MEASURED if self.shares_cores else achieved_by(self.device.name)

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

        Limited by arithmetic, with an incomplete last wave of tiles, or by memory traffic (the roofline
        model, doi:10.1145/1498765.1498785). The kernel has ``share`` of the usual speed.
        """
        if min(rows, inputs, outputs) <= 0:
            return 0.0
        achieved = self.achieved
        if dtype in ("float8", "mxfp8"):
            share *= self.constants.float8 * achieved.float8
        else:
            share *= self.constants.matmul * achieved.half
        flops = 2.0 * rows * inputs * outputs * groups
        arithmetic = flops / (self.device.peak_flops[dtype] * share * self._filled(rows, outputs, groups))
        moved = (value_bytes * (rows * inputs + inputs * outputs) + 2 * rows * outputs) * groups
        return max(arithmetic * self.slowest, self.pass_seconds(moved)) + self.constants.launch

    def _filled(self, rows: int, outputs: int, groups: int) -> float:
        """Fraction of the multiprocessors that have a tile, over all waves; of many products, also of the
        tiles' values that exist (cuBLAS chooses another tile for a single product that does not fill
        them)."""
        if self.shares_cores:
            return 1.0
        down, across = ceil(rows / TILE[0]), ceil(outputs / TILE[1])
        used = rows * outputs / (down * TILE[0] * across * TILE[1]) if groups > 1 else 1.0
        tiles = groups * down * across
        return used * tiles / (ceil(tiles / self.device.units) * self.device.units)

    @cached_property
    def slowest(self) -> float:
        """Expected time of the slowest device, as a multiple of their mean.

        The largest of n normal values is at the quantile (n - 0.375) / (n + 0.25) (Blom, 1958).
        """
        if self.ranks == 1 or self.shares_cores:
            return 1.0
        quantile = (self.ranks - 0.375) / (self.ranks + 0.25)
        return 1.0 + self.constants.spread * NormalDist().inv_cdf(quantile)

    def pass_seconds(self, moved: float) -> float:
        """Seconds to read or write ``moved`` bytes of memory."""
        return moved / (self.device.memory_bandwidth * self.constants.memory) * self.slowest

    def attention_seconds(self, flops: float, dtype: str) -> float:
        """Seconds of fused attention's arithmetic."""
        share = self.constants.attention * self.achieved.attention
        return flops / (self.device.peak_flops[dtype] * share) * self.slowest + self.constants.launch

    def link_of(self, group: Group) -> str:
        """Name of the link between the ranks of a group."""
        if self.shares_cores:
            return "host"
        return "NVLink" if group.nodes == 1 else "network"

    def collective_seconds(self, collective: str, moved: float, group: Group) -> float:
        """Seconds of one collective.

        NCCL's rings and trees send each rank's data once over every link (nccl-tests, doc/PERFORMANCE.md).
        Between nodes every device uses its own network adapter, so the group's ranks on a node share the
        traffic.

        Args:
            collective: name as in ``Traffic.collective``.
            moved: bytes of the full tensor: the output of an all-gather, the input of a reduce-scatter, input
                or output of an all-reduce, the data a rank sends in an all-to-all or to the next stage.
            group: the ranks.
        """
        if group.ranks == 1 or moved == 0:
            return 0.0
        there_and_back = 2.0 if collective == "all_reduce" else 1.0
        share = 1.0 if collective == "send" else (group.ranks - 1) / group.ranks
        rate = self.device.link_bandwidth * self.constants.link
        if group.nodes > 1 and not self.shares_cores:
            if collective == "all_to_all":
                # Pieces for ranks of this node and of others are sent at the same time.
                outside = (group.ranks - group.per_node) / group.ranks
                inside = (share - outside) * moved / rate
                return max(inside, outside * moved / self.network_rate) + self.constants.latency
            adapters = 1 if collective == "send" else group.per_node
            rate = min(rate, self.network_rate * adapters)
        return there_and_back * share * moved / rate + self.constants.latency

    @property
    def network_rate(self) -> float:
        """Achieved bytes per second and device between nodes."""
        return self.network_bandwidth * self.constants.network


def device_of(job: Job, calibration: Calibration | None = None) -> Accelerator | None:
    """Return the device that a job runs on; None if it is unknown."""
    measured = None if calibration is None else calibration.accelerator
    return measured or ACCELERATORS.get(job.cluster.accelerator or "")


def machine_of(job: Job, calibration: Calibration | None = None) -> Machine | None:
    """Return the hardware of a job; None if the device, or the network that its ranks need, is unknown."""
    device = device_of(job, calibration)
    per_node = job.cluster.nodes_for(job.world_size)[1]
    gbps = job.cluster.network_gbps
    if device is None or (gbps is None and job.world_size > per_node):
        return None
    constants = Constants() if calibration is None else calibration.constants
    return Machine(device, constants, (gbps or 0.0) * 1e9 / 8, per_node, job.world_size)


def expert_groups(job: Job, ranks_per_node: int) -> tuple[Group, Group]:
    """Return the groups of an expert's mesh (``parallelism/mesh.py``): of ``ep``, and of the expert's
    shards."""
    layout = job.parallelism
    stride = layout.tp if layout.splits_experts else 1
    groups = []
    for ranks in (layout.ep, layout.expert_shards):
        groups.append(Group(ranks, max(1, min(ranks, ranks_per_node // stride))))
        stride *= ranks
    return groups[0], groups[1]


def group_of(job: Job, ranks_per_node: int, *axes: str) -> Group:
    """Return the group over neighbouring mesh axes, e.g. dp_shard and cp."""
    return _group(tuple(job.parallelism.degrees.items()), ranks_per_node, axes)


@lru_cache(maxsize=4096)
def _group(degrees: tuple[tuple[str, int], ...], ranks_per_node: int, axes: tuple[str, ...]) -> Group:
    ranks, inside = 1, 1
    stride = 1
    for axis, degree in reversed(degrees):
        if axis in axes:
            ranks *= degree
            inside *= max(1, min(degree, ranks_per_node // stride)) if stride < ranks_per_node else 1
        stride *= degree
    return Group(ranks, max(1, min(inside, ranks)))


assert AXES[-1] == "tp", "_group assumes that ranks of the last axis are next to each other"
