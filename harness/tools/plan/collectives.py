"""Passes of a microbatch, and the collectives of context parallelism, FSDP and replication in one block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.tools.plan.costs import AttentionCost
from harness.tools.plan.machine import Group, Machine, expert_groups, group_of
from harness.tools.plan.parameters import BYTES, HeldTensor, held_groups

# A ring's partial results, eager (torch's _SDPAMerger and ring backward,
# torch/distributed/tensor/experimental/ _context_parallel/_attention.py). Outputs: the cast to 32
# bits (6) and the difference, its product and sum (32). Gradients of queries: cast and sum (12).
# Keys and values: copied into one buffer to be sent (4), and their gradients added up and copied in
# 32 bits (18). Half of a load-balanced ring's steps work on half of the rows, but copy all of them
# (8).
RING_CAST = 6.0
RING_MERGE = 32.0
RING_QUERY = 12.0
RING_KEYS = 4.0
RING_KEY_GRADIENTS = 18.0
RING_COPY = 8.0


@dataclass(frozen=True)
class Collective:
    """One collective of a pass."""

    axis: str
    collective: str
    group: Group
    bytes: float
    """Of the full tensor, as ``Machine.collective_seconds`` expects."""
    seconds: float
    exposed: float
    """Seconds that no computation hides."""

    @classmethod
    def on(
        cls, machine: Machine, axis: str, collective: str, group: Group, size: float
    ) -> Collective:
        """A collective that nothing hides."""
        seconds = machine.collective_seconds(collective, size, group)
        return cls(axis, collective, group, size, seconds, seconds)


@dataclass(frozen=True)
class Pass:
    """A forward, or a part of a backward, of one microbatch."""

    compute: float = 0.0
    collectives: tuple[Collective, ...] = ()

    @property
    def seconds(self) -> float:
        return self.compute + sum(each.exposed for each in self.collectives)

    def __add__(self, other: Pass) -> Pass:
        return Pass(self.compute + other.compute, self.collectives + other.collectives)

    def times(self, factor: float) -> Pass:
        scaled = (
            replace(
                m, bytes=m.bytes * factor, seconds=m.seconds * factor, exposed=m.exposed * factor
            )
            for m in self.collectives
        )
        return Pass(self.compute * factor, tuple(scaled))


@dataclass(frozen=True)
class ContextParallel:
    """Collectives of a block's attention over the context axis, and a ring's partial results."""

    job: Job
    machine: Machine
    of: AttentionCost
    rows: int
    """Tokens of a rank."""
    attention_seconds: float
    """Of attention's forward on a rank."""

    @property
    def layout(self) -> ParallelismConfig:
        return self.job.parallelism

    def forward(self) -> tuple[Collective, ...]:
        """Collectives of context parallel in forward: Ulysses' two exchanges, or a ring's keys and values."""
        layout = self.layout
        of = self.of
        value_bytes = BYTES[self.job.precision.param_dtype]
        if layout.cp == 1:
            return ()
        if layout.cp_method == "ulysses":
            per_head = self.rows * value_bytes / layout.tp
            inputs = per_head * (
                of.heads * of.score_width + of.kv_heads * (of.score_width + of.value_width)
            )
            return self._over("all_to_all", [inputs, per_head * of.heads * of.value_width])
        keys = self._keys * value_bytes
        behind = self.attention_seconds * (layout.cp - 1) / layout.cp
        if layout.cp_rotate_method == "allgather":
            return self._over("all_gather", [keys * layout.cp], behind)
        return self._over("all_to_all", [self._one_hop(keys)] * (layout.cp - 1), behind)

    def backward(self) -> tuple[Collective, ...]:
        """The same in backward; a ring also passes on the gradients of keys and values, in float32.

        Source: torch/distributed/tensor/experimental/_context_parallel/_attention.py,
        _templated_ring_attention_backward.
        """
        layout = self.layout
        if layout.cp == 1 or layout.cp_method == "ulysses":
            return self.forward()
        gradients = [self._one_hop(self._keys * BYTES["float32"])] * layout.cp
        return (*self.forward(), *self._over("all_to_all", gradients, self.attention_seconds * 1.5))

    @property
    def _keys(self) -> float:
        """Elements of a rank's keys and values."""
        of = self.of
        return self.rows * of.kv_heads * (of.score_width + of.value_width) / self.layout.tp

    def _one_hop(self, size: float) -> float:
        """Size of an all-to-all in which a rank sends ``size`` bytes, as it does in one hop of a ring."""
        cp = self.layout.cp
        return size * cp / (cp - 1)

    def _over(
        self, collective: str, sizes: list[float], behind: float = 0.0
    ) -> tuple[Collective, ...]:
        """Collectives over the context axis; computation hides ``behind`` seconds of their sum."""
        group = group_of(self.job, self.machine.ranks_per_node, "cp")
        every = [Collective.on(self.machine, "cp", collective, group, size) for size in sizes]
        exposed = max(0.0, 1 - behind / sum(each.seconds for each in every)) if behind else 1.0
        return tuple(replace(each, exposed=each.seconds * exposed) for each in every)

    def merging_seconds(self) -> float:
        """Seconds of merging a ring's partial outputs in forward, and of copying keys and values."""
        outputs = self.rows * self.of.heads * self.of.value_width / self.layout.tp
        return self._ring_steps(
            (outputs, RING_CAST, RING_CAST + RING_MERGE), (self._keys, 0.0, RING_KEYS)
        )

    def adding_seconds(self) -> float:
        """Seconds of adding up a ring's gradients."""
        queries = self.rows * self.of.heads * self.of.score_width / self.layout.tp
        keys = self._keys, RING_KEY_GRADIENTS, RING_KEY_GRADIENTS + RING_KEYS
        return self._ring_steps((queries, RING_QUERY, RING_QUERY), keys)

    def _ring_steps(self, *passes: tuple[float, float, float]) -> float:
        """Seconds of a ring's passes: each of so many values, with bytes per value at first and later."""
        layout = self.layout
        if layout.cp == 1 or layout.cp_method != "ring":
            return 0.0
        share, copying = (0.75, RING_COPY / 2) if layout.cp_load_balance else (1.0, 0.0)
        return sum(
            self.machine.pass_seconds(
                values * (first + (layout.cp - 1) * (share * later + copying))
            )
            for values, first, later in passes
        )


@dataclass(frozen=True)
class Sharing:
    """Communication and copies of FSDP and replication for a block, or for another FSDP group."""

    gather: tuple[Collective, ...]
    reduce: tuple[Collective, ...]
    copying: float
    """Seconds of copying gathered parameters out of the buffer that they came in."""


def sharing_of_block(job: Job, machine: Machine, layer: int) -> Sharing:
    """FSDP's work for a block: one group, or another one for experts that other ranks share."""
    # The block of multi-token prediction is after the last layer.
    name = f"layers.{layer}" if layer < job.model.n_layers else "mtp"
    return sharing_of(job, machine, held_groups(job, [name]).values())


def sharing_of(job: Job, machine: Machine, groups: Iterable[Sequence[HeldTensor]]) -> Sharing:
    """FSDP's work for the parameters of some of its groups."""
    precision = job.precision
    per_node = machine.ranks_per_node
    param = 1 if precision.enable_fsdp_float8_all_gather else BYTES[precision.param_dtype]
    reduced = BYTES[precision.reduce_dtype]
    replicas = group_of(job, per_node, "dp_replicate")
    gather = []
    reduce = []
    copying = 0.0
    for tensors in groups:
        values = sum(tensor.gathered_elements for tensor in tensors)
        shards = group_of(job, per_node, "dp_shard", "cp")
        if tensors[0].spec.is_expert:
            shards = expert_groups(job, per_node)[1]
        if shards.ranks > 1:
            gather.append(Collective.on(machine, "dp", "all_gather", shards, values * param))
            reduce.append(Collective.on(machine, "dp", "reduce_scatter", shards, values * reduced))
            copying += machine.pass_seconds(2 * values * param)
        if replicas.ranks > 1:
            size = values / shards.ranks * reduced
            reduce.append(Collective.on(machine, "dp", "all_reduce", replicas, size))
    return Sharing(tuple(gather), tuple(reduce), copying)
