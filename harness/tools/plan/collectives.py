"""Passes of a microbatch, and the collectives of context parallelism, FSDP and replication in one block."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from harness.config.job import Job
from harness.tools.plan.costs import AttentionCost
from harness.tools.plan.machine import Group, Machine, group_of
from harness.tools.plan.parameters import BYTES, HeldTensor, held_modules

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


def collective_of(
    job: Job, machine: Machine, axis: str, kind: str, size: float, *mesh: str
) -> Collective:
    """A collective that nothing hides, over ``axis`` or some axes of a mesh."""
    group = group_of(job, machine.ranks_per_node, *(mesh or [axis]))
    if kind == "send":
        group = Group(2, min(2, group.per_node))
    seconds = machine.collective_seconds(kind, size, group)
    return Collective(axis, kind, group, size, seconds, seconds)


def hidden(
    collectives: Iterable[Collective], seconds: float, lost: float = 0.0
) -> tuple[Collective, ...]:
    """Collectives of which ``seconds`` of computing hide as many, but for a fraction ``lost``."""
    every = tuple(collectives)
    taken = sum(each.seconds for each in every)
    share = 1 - min(1.0, seconds / taken) * (1 - lost) if taken else 0.0
    return tuple(replace(each, exposed=each.seconds * share) for each in every)


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


def context_parallel(
    job: Job, machine: Machine, attention: AttentionCost, rows: int, seconds: float
) -> tuple[Pass, Pass]:
    """What context parallelism adds to forward and backward of a block's attention.

    Ulysses exchanges heads for positions, and back. Gathering takes the keys and values of all ranks, and
    adds up and scatters their gradients. A ring passes keys and values on, in backward
    also their gradients in float32, and merges partial results
    (torch/distributed/tensor/experimental/_context_parallel/_attention.py,
    _templated_ring_attention_backward).

    Args:
        rows: tokens of a rank.
        seconds: attention's forward on a rank, which hides a ring's collectives.
    """
    layout = job.parallelism
    cp = layout.cp
    if cp == 1:
        return Pass(), Pass()
    per_width = rows / layout.tp
    queries = per_width * attention.heads * attention.score_width
    keys = per_width * attention.kv_heads * (attention.score_width + attention.value_width)
    outputs = per_width * attention.heads * attention.value_width
    value_bytes = BYTES[job.precision.param_dtype]
    if attention.halo:
        return _fragments(job, machine, attention, seconds)

    def over(kind: str, sizes: Sequence[float], behind: float = 0.0) -> tuple[Collective, ...]:
        """Collectives over the context axis; computation hides ``behind`` seconds of their sum."""
        return hidden((collective_of(job, machine, "cp", kind, size) for size in sizes), behind)

    if layout.cp_method == "ulysses":
        both = Pass(
            0.0, over("all_to_all", [(queries + keys) * value_bytes, outputs * value_bytes])
        )
        return both, both
    if layout.cp_method == "gather":
        whole = keys * cp
        # Copied to be sent, in order of positions, and their gradients by piece and added up.
        copied = machine.pass_seconds(2 * value_bytes * whole)
        gathered = over("all_gather", [whole * value_bytes])
        scattered = over("reduce_scatter", [whole * value_bytes])
        return Pass(copied, gathered), Pass(3 * copied, scattered)
    # A ring's values are as wide as keys (RingAttention).
    keys = per_width * attention.kv_heads * 2 * attention.score_width
    outputs = queries
    # Half of a load-balanced ring's steps work on half of the rows.
    share, copying = (0.75, RING_COPY / 2) if layout.cp_load_balance else (1.0, 0.0)

    def steps(values: float, first: float, later: float) -> float:
        """Seconds of passes over values, with so many bytes per value in the first and in later steps."""
        return machine.pass_seconds(values * (first + (cp - 1) * (share * later + copying)))

    # A rank sends as much in an all-to-all as in a hop of a ring.
    hop = keys * cp / (cp - 1)
    computing = seconds * (cp - 1) / cp
    if layout.cp_rotate_method == "allgather":
        moved = over("all_gather", [keys * value_bytes * cp], computing)
    else:
        moved = over("all_to_all", [hop * value_bytes] * (cp - 1), computing)
    gradients = over("all_to_all", [hop * BYTES["float32"]] * cp, seconds * 1.5)
    merging = steps(outputs, RING_CAST, RING_CAST + RING_MERGE) + steps(keys, 0.0, RING_KEYS)
    adding = steps(queries, RING_QUERY, RING_QUERY)
    adding += steps(keys, RING_KEY_GRADIENTS, RING_KEY_GRADIENTS + RING_KEYS)
    return Pass(merging, moved), Pass(adding, (*moved, *gradients))


def _fragments(
    job: Job, machine: Machine, attention: AttentionCost, seconds: float
) -> tuple[Pass, Pass]:
    """The same of Gated DeltaNet: the ends of all fragments are gathered, and their gradients scattered.

    The columns that multiply earlier states take about as long as those of values.
    """
    layout = job.parallelism
    fragments = layout.cp * (2 if layout.balances_context else 1) * job.microbatch_size / layout.tp
    sizes = (
        fragments * attention.halo * BYTES[job.precision.param_dtype],
        fragments * attention.state * BYTES["float32"],
    )
    gathered = tuple(collective_of(job, machine, "cp", "all_gather", size) for size in sizes)
    scattered = tuple(collective_of(job, machine, "cp", "reduce_scatter", size) for size in sizes)
    more = seconds * attention.score_width / attention.value_width
    return Pass(more, gathered), Pass(2.5 * more, scattered)


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
    return sharing_of(job, machine, held_modules(job, [name])[name].groups.values())


def sharing_of(job: Job, machine: Machine, groups: Iterable[Sequence[HeldTensor]]) -> Sharing:
    """FSDP's work for the parameters of some of its groups."""
    precision = job.precision
    param = 1 if precision.enable_fsdp_float8_all_gather else BYTES[precision.param_dtype]
    reduced = BYTES[precision.reduce_dtype]
    gather = []
    reduce = []
    copying = 0.0
    shared = partial(collective_of, job, machine, "dp")
    for tensors in groups:
        values = sum(tensor.gathered_elements for tensor in tensors)
        over = ("expert_shards",) if tensors[0].spec.is_expert else ("dp_shard", "cp")
        gathered = shared("all_gather", values * param, *over)
        if gathered.group.ranks > 1:
            gather.append(gathered)
            reduce.append(shared("reduce_scatter", values * reduced, *over))
            copying += machine.pass_seconds(2 * values * param)
        if job.parallelism.dp_replicate > 1:
            size = values / gathered.group.ranks * reduced
            reduce.append(shared("all_reduce", size, "dp_replicate"))
    return Sharing(tuple(gather), tuple(reduce), copying)
