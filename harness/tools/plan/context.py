"""Time and traffic of context parallelism in one block."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.parallelism import ParallelismConfig
from harness.tools.plan.elementwise import (
    RING_CAST,
    RING_COPY,
    RING_KEY_GRADIENTS,
    RING_KEYS,
    RING_MERGE,
    RING_QUERY,
)
from harness.tools.plan.machine import DTYPE_BYTES, Group, Machine
from harness.tools.plan.operations import Attention
from harness.tools.plan.traffic import Collective


@dataclass(frozen=True)
class ContextParallel:
    """Collectives of a block's attention over the context axis, and a ring's partial results."""

    layout: ParallelismConfig
    machine: Machine
    group: Group
    of: Attention
    rows: int
    """Tokens of a rank."""
    value_bytes: int
    attention_seconds: float
    """Of attention's forward on a rank."""

    def forward(self) -> tuple[Collective, ...]:
        """Collectives of context parallel in forward: Ulysses' two exchanges, or a ring's keys and values."""
        layout, of = self.layout, self.of
        if layout.cp == 1:
            return ()
        if layout.cp_method == "ulysses":
            per_head = self.rows * self.value_bytes / layout.tp
            inputs = per_head * (of.heads * of.score_width + of.kv_heads * (of.score_width + of.value_width))
            return self._over("all_to_all", [inputs, per_head * of.heads * of.value_width])
        keys = self._keys * self.value_bytes
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
        forward = self.forward()
        if layout.cp == 1 or layout.cp_method == "ulysses":
            return forward
        gradients = self._one_hop(self._keys * DTYPE_BYTES["float32"])
        behind = self.attention_seconds * 1.5
        return (*forward, *self._over("all_to_all", [gradients] * layout.cp, behind))

    @property
    def _keys(self) -> float:
        """Number of elements in a rank's keys and values."""
        of = self.of
        return self.rows * of.kv_heads * (of.score_width + of.value_width) / self.layout.tp

    def _one_hop(self, size: float) -> float:
        """Size of an all-to-all in which a rank sends ``size`` bytes, as it does in one hop of a ring."""
        cp = self.layout.cp
        return size * cp / (cp - 1)

    def _over(self, collective: str, sizes: list[float], behind: float = 0.0) -> tuple[Collective, ...]:
        """Collectives over the context axis; computation hides ``behind`` seconds of their sum."""
        taken = {size: self.machine.collective_seconds(collective, size, self.group) for size in sizes}
        exposed = max(0.0, 1 - behind / sum(taken[size] for size in sizes)) if behind else 1.0
        each = {
            size: Collective("cp", collective, self.group, size, seconds, seconds * exposed)
            for size, seconds in taken.items()
        }
        return tuple(each[size] for size in sizes)

    def merging_seconds(self) -> float:
        """Seconds of merging a ring's partial outputs in forward, and of copying keys and values."""
        of, tp = self.of, self.layout.tp
        outputs = self.rows * of.heads * of.value_width / tp
        merging = self._ring_steps(outputs, RING_CAST, RING_CAST + RING_MERGE)
        return merging + self._ring_steps(self._keys, 0.0, RING_KEYS)

    def adding_seconds(self) -> float:
        """Seconds of adding up a ring's gradients."""
        of, tp = self.of, self.layout.tp
        queries = self.rows * of.heads * of.score_width / tp
        adding = self._ring_steps(queries, RING_QUERY, RING_QUERY)
        later = RING_KEY_GRADIENTS + RING_KEYS
        return adding + self._ring_steps(self._keys, RING_KEY_GRADIENTS, later)

    def _ring_steps(self, values: float, first: float, later: float) -> float:
        """Seconds of a ring's passes over ``values``: bytes per value in the first step, and in later
        ones."""
        layout = self.layout
        if layout.cp == 1 or layout.cp_method != "ring":
            return 0.0
        if layout.cp_load_balance:
            later = 0.75 * later + RING_COPY / 2
        return self.machine.pass_seconds(values * (first + (layout.cp - 1) * later))
