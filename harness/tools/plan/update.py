"""What ranks orthogonalize and exchange in an update of Muon, in closed form (no torch).

The assignment of matrices to ranks is that of training (``optimizer/assignment.py``). Pieces are taken as
equal.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from harness.config.job import Job
from harness.config.optimizer import KINDS
from harness.config.parallelism import ParallelismConfig
from harness.model.spec import TensorSpec
from harness.optimizer.assignment import Matrices, Unit, assign, orthogonalization_flops
from harness.optimizer.settings import TensorSettings, exchanges, tensor_settings
from harness.tools.plan.parameters import BYTES, RankParameters, tp_of


@dataclass(frozen=True)
class PlannedUpdate:
    """The exchanges of an update, on the busiest rank of a pipeline rank."""

    shapes: Mapping[tuple[int, int], int]
    """Number of matrices that it orthogonalizes by shape, the shorter side first."""
    flops: float
    """FLOPs of their orthogonalization."""
    sent: float
    """Bytes that it sends."""
    exchanges: int
    """All-to-alls."""
    buffers: float
    """Most bytes of buffers and of the iterations' temporary matrices."""


@dataclass(frozen=True)
class _Cell:
    """The ranks that hold pieces of the same matrices of a tensor, in the order of ``axes``."""

    axes: tuple[str, ...]
    sizes: tuple[int, ...]
    replicated: tuple[str, ...]

    @property
    def replicas(self) -> int:
        return prod(size for axis, size in zip(self.axes, self.sizes, strict=True) if axis in self.replicated)

    @property
    def holders(self) -> int:
        return prod(self.sizes)

    @property
    def shards(self) -> int:
        return self.holders // self.replicas

    def replica(self, holder: int) -> tuple[int, ...]:
        """Coordinates of a holder on the replicated axes."""
        at = _coordinates(self.axes, self.sizes, holder)
        return tuple(at[axis] for axis in self.replicated)

    def holder(self, at: Mapping[str, int]) -> int:
        """Index of the rank with these coordinates among the holders."""
        index = 0
        for axis, size in zip(self.axes, self.sizes, strict=True):
            index = index * size + at[axis]
        return index


def planned_update(job: Job, parameters: RankParameters) -> PlannedUpdate | None:
    """Plan the exchanges of an update; None if no optimizer of these tensors exchanges anything.

    Args:
        job: the resolved job.
        parameters: the tensors of a pipeline rank.
    """
    all_specs = (held.spec for module in parameters.held_modules for held in module.tensors)
    if not exchanges(job.optimizer, all_specs):
        return None
    by_settings: dict[TensorSettings, list[TensorSpec]] = {}
    for held in parameters.tensors:
        if not held.is_buffer:
            by_settings.setdefault(tensor_settings(job.optimizer, held.spec), []).append(held.spec)
    specs = [each for settings, own in by_settings.items() if KINDS[settings.kind].exchanges for each in own]
    layout = job.parallelism
    cells = [_cell(layout, spec) for spec in specs]
    matrices = [
        Matrices(_matrices(layout, spec), spec.outputs, spec.inputs, cell.holders)
        for spec, cell in zip(specs, cells, strict=True)
    ]
    rounds = assign(matrices)
    value_bytes = BYTES[job.optimizer.newton_schulz_dtype or job.precision.param_dtype]
    steps = job.optimizer.newton_schulz_steps
    owned: dict[_Cell, Counter[int]] = defaultdict(Counter)
    replicas: dict[_Cell, Counter[tuple[int, ...]]] = defaultdict(Counter)
    shapes: dict[_Cell, dict[int, Counter[tuple[int, int]]]] = defaultdict(lambda: defaultdict(Counter))
    for unit in (unit for units in rounds for unit in units):
        cell, of = cells[unit.tensor], matrices[unit.tensor]
        owned[cell][unit.owner] += unit.count * of.values
        replicas[cell][cell.replica(unit.owner)] += unit.count * of.values
        shapes[cell][unit.owner][min(of.rows, of.columns), max(of.rows, of.columns)] += unit.count
    sent, work = 0.0, Counter[tuple[int, int]]()
    for at in _ranks(layout):
        values, own_shapes = 0.0, Counter[tuple[int, int]]()
        for cell in owned:
            holder = cell.holder(at)
            own = owned[cell][holder]
            # The pieces for owners in the same replica, and all pieces of own matrices to all others.
            values += (replicas[cell][cell.replica(holder)] - own) / cell.shards
            values += own * (cell.replicas - 1 / cell.shards)
            own_shapes += shapes[cell][holder]
        sent = max(sent, values * value_bytes)
        work = max(work, own_shapes, key=lambda found: _flops(found, steps))
    exchanged = sum(matrices[units[0].tensor].holders > 1 for units in rounds)
    buffers = _buffers(rounds, matrices, cells, on_cpu=job.cluster.device == "cpu")
    return PlannedUpdate(work, _flops(work, steps), sent, 2 * exchanged, buffers * value_bytes)


def _flops(shapes: Mapping[tuple[int, int], int], steps: int) -> float:
    return sum(count * orthogonalization_flops(*shape, steps) for shape, count in shapes.items())


def _cell(layout: ParallelismConfig, spec: TensorSpec) -> _Cell:
    """The holders of a tensor's matrices (``parallelism/mesh.py``): the axes that do not divide experts."""
    sizes = {"dp_replicate": layout.dp_replicate, "shard": layout.parameter_shards, "tp": layout.tp}
    replicated = ("dp_replicate",) if tp_of(layout, spec) == layout.tp else ("dp_replicate", "tp")
    if spec.is_expert:
        by_expert = layout.expert_shard_dim(spec.experts) == 0
        sizes = {
            "dp_replicate": layout.dp_replicate,
            **({} if by_expert else {"expert_shard": layout.expert_shards}),
            "expert_tp": layout.tp if layout.splits_experts else 1,
        }
        replicated = ("dp_replicate",)
    return _Cell(tuple(sizes), tuple(sizes.values()), replicated)


def _matrices(layout: ParallelismConfig, spec: TensorSpec) -> int:
    """Number of a tensor's matrices that the ranks of a cell share."""
    if not spec.is_expert:
        return 1
    by_expert = layout.expert_shard_dim(spec.experts) == 0
    return spec.experts // layout.ep // (layout.expert_shards if by_expert else 1)


def _ranks(layout: ParallelismConfig) -> list[dict[str, int]]:
    """Coordinates of the ranks of a pipeline stage, on the mesh and on that of experts."""
    dense = ("dp_replicate", "shard", "tp"), (layout.dp_replicate, layout.parameter_shards, layout.tp)
    expert_tp = layout.tp if layout.splits_experts else 1
    sizes = layout.dp_replicate, layout.expert_shards, layout.ep, expert_tp
    experts = ("dp_replicate", "expert_shard", "ep", "expert_tp"), sizes
    return [_coordinates(*dense, rank) | _coordinates(*experts, rank) for rank in range(prod(dense[1]))]


def _coordinates(axes: Sequence[str], sizes: Sequence[int], index: int) -> dict[str, int]:
    """Coordinates of the ``index``-th rank of a mesh."""
    found = {}
    for axis, size in zip(reversed(axes), reversed(sizes), strict=True):
        index, found[axis] = divmod(index, size)
    return found


def _buffers(
    rounds: Sequence[Sequence[Unit]], matrices: Sequence[Matrices], cells: Sequence[_Cell], *, on_cpu: bool
) -> float:
    """Most values of temporary tensors on the first rank of each cell (``optimizer/muon.py``, ``step``).

    While a round is orthogonalized, the pieces of the next one arrive and those of the one before return.
    """
    first = [_RoundValues(units, matrices, cells, on_cpu=on_cpu) for units in rounds]
    exchanged = [each for each in first if each.holders > 1]
    peak = max((each.iterating for each in first if each.holders == 1), default=0.0)
    peak += exchanged[0].arriving if exchanged else 0.0
    for before, this, after in zip([None, *exchanged], exchanged, [*exchanged[1:], None], strict=False):
        around = (before.returning if before else 0.0) + (after.arriving if after else 0.0)
        peak = max(peak, around + max(this.iterating, this.owned + this.returning))
    return peak


class _RoundValues:
    """Numbers of values of a round's temporary tensors on the first rank of each cell."""

    def __init__(
        self,
        units: Sequence[Unit],
        matrices: Sequence[Matrices],
        cells: Sequence[_Cell],
        *,
        on_cpu: bool,
    ) -> None:
        self.holders = matrices[units[0].tensor].holders
        self.owned = self.arriving = self.returning = 0.0
        together: dict[object, list[Unit]] = defaultdict(list)
        for unit in units:
            cell, of = cells[unit.tensor], matrices[unit.tensor]
            size = float(unit.count * of.values)
            if cell.replica(unit.owner) == cell.replica(0):
                self.arriving += size / cell.shards
            self.returning += size / cell.shards
            if unit.owner == 0:
                self.owned += size
                self.arriving += size
                self.returning += size * cell.replicas
                together[unit if on_cpu else (of.rows, of.columns)].append(unit)
        largest = 0.0
        for group in together.values():
            of = matrices[group[0].tensor]
            # A CPU iterates on one matrix after the other.
            count = 1 if on_cpu else sum(unit.count for unit in group)
            grams = 2 * min(of.rows, of.columns) ** 2
            largest = max(largest, count * (of.values + grams))
        self.iterating = self.owned + largest
