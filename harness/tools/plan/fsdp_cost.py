"""Communication of FSDP and replication: what is gathered and reduced for a block."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.job import Job
from harness.model.accounting import block_weights
from harness.model.spec import block_tensors
from harness.tools.plan.machine import DTYPE_BYTES, Group, Machine, expert_groups, group_of
from harness.tools.plan.parameters import tensors_by_module
from harness.tools.plan.traffic import Collective


@dataclass(frozen=True)
class Sharing:
    """Communication and copies of FSDP and replication for one block."""

    gather: tuple[Collective, ...]
    reduce: tuple[Collective, ...]
    copying: float
    """Seconds of copying gathered parameters out of the buffer that they came in."""
    held: float
    """Number of the block's parameters in the rank's shard."""


class Sharer:
    """Computes the ``Sharing`` of a job's blocks and tables on a machine."""

    def __init__(self, job: Job, machine: Machine) -> None:
        self.job, self.machine, self.layout = job, machine, job.parallelism

    def block(self, layer: int) -> Sharing:
        """FSDP's work for a block. Experts are a separate group, sharded over other ranks."""
        layout = self.layout
        experts, others = block_weights(self.job.model, layer)
        matrices = [t for t in block_tensors(self.job.model, layer) if t.is_matrix and not t.is_expert]
        split = sum(matrix.size for matrix in matrices if matrix.split_dim is not None)
        dense = others - split + split / layout.tp
        shared = self._share_values(dense, self._shards)
        if not experts:
            return shared
        own = experts / layout.ep / (layout.tp if layout.splits_experts else 1)
        of_experts = self._share_values(own, expert_groups(self.job, self.machine.ranks_per_node)[1])
        return Sharing(
            shared.gather + of_experts.gather,
            shared.reduce + of_experts.reduce,
            shared.copying + of_experts.copying,
            shared.held + of_experts.held,
        )

    def table(self, name: str) -> Sharing:
        """FSDP's work for the embedding or the head."""
        values = sum(tensor.size for tensor in tensors_by_module(self.job.model).get(name, ()))
        return self._share_values(values / self.layout.tp, self._shards)

    @property
    def _shards(self) -> Group:
        """Ranks over which parameters other than experts are sharded."""
        return group_of(self.job, self.machine.ranks_per_node, "dp_shard", "cp")

    def _share_values(self, values: float, group: Group) -> Sharing:
        precision, machine = self.job.precision, self.machine
        param = 1 if precision.enable_fsdp_float8_all_gather else DTYPE_BYTES[precision.param_dtype]
        reduced = DTYPE_BYTES[precision.reduce_dtype]
        shards = group.ranks
        gather, reduce = [], []
        if shards > 1:
            gather.append(self._over_shards("all_gather", values * param, group))
            reduce.append(self._over_shards("reduce_scatter", values * reduced, group))
        if self.layout.dp_replicate > 1:
            replicas = group_of(self.job, machine.ranks_per_node, "dp_replicate")
            reduce.append(self._over_shards("all_reduce", values / shards * reduced, replicas))
        copying = machine.pass_seconds(2 * values * param) if shards > 1 else 0.0
        return Sharing(tuple(gather), tuple(reduce), copying, values / shards)

    def _over_shards(self, collective: str, size: float, group: Group) -> Collective:
        seconds = self.machine.collective_seconds(collective, size, group)
        return Collective("dp", collective, group, size, seconds, seconds)
