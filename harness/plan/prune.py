"""Lower bounds of a point's memory and step time, by the formulas of ``memory.py`` and ``work.py``.

A search computes them before it plans a point. What depends on few of the searched fields is computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, TypeVar

from harness.hardware import Accelerator
from harness.job import Job
from harness.model.operations import block_kinds
from harness.parallelism.config import AXES, ParallelismConfig
from harness.parallelism.stages import num_stages, split_modules, stages_of_rank
from harness.plan.machine import Machine
from harness.plan.memory import RankStep, memory_limit
from harness.plan.memory_activations import ActivationBytes
from harness.plan.order import passes_of_rank
from harness.plan.parameters import HeldModules, parameters_of
from harness.plan.plan import Action
from harness.plan.space import Point
from harness.plan.traffic import Pass
from harness.plan.work import Worker
from harness.precision.linears import sort_linears

KNOWN = ("compute", "tp", "cp", "ep")
"""Parts of a step's time that come from single blocks."""
Key = tuple[Any, ...]
Made = TypeVar("Made")


class MemoryBounds:
    """Lower bounds of the memory of many points of one job.

    That of the first two pipeline ranks, at some moments: the first one has the most microbatches in flight,
    the second one most often has more layers.
    """

    def __init__(self, base: Job, device: Accelerator | None, headroom: float = 0.0) -> None:
        self._base, self._device, self._headroom = base, device, headroom
        self._modules = HeldModules(base)
        self._known: dict[Key, Any] = {}

    def persistent_shortfall(self, point: Point) -> float:
        """Least bytes by which a legal point exceeds the limit without activations; 0 if it may fit."""
        return self._once(_layout_of(point), lambda: self._persistent_shortfall(point))

    def _persistent_shortfall(self, point: Point) -> float:
        job = point.job_unchecked(self._base)
        empty = replace(job, training=replace(job.training, seq_len=0))

        def most() -> float:
            stages = [self._stages(empty.parallelism, rank) for rank in _ranks(empty)]
            one = [[Action(stage, kind, 0) for stage in own for kind in "FB"] for own in stages]
            return max(self._peak(empty, rank, one[rank]) for rank in _ranks(empty))

        return self._over_limit(job, self._once(("persistent", *self._held_by(job.parallelism)), most))

    def shortfall(self, point: Point) -> float:
        """Least bytes by which a legal point exceeds the limit with its own microbatches; 0 if it may fit."""
        job = point.job_unchecked(self._base)
        for rank in _ranks(job):
            order = passes_of_rank(job.parallelism, job.model.n_layers, job.microbatches, rank)
            passes = _first_passes(order, self._stages(job.parallelism, rank))
            if found := self._over_limit(job, self._peak(job, rank, passes)):
                return found
        return 0.0

    def _over_limit(self, job: Job, peak: float) -> float:
        layout = job.parallelism
        axes = (*layout.degrees.values(), layout.ep)
        limit = self._once(
            ("limit", *(degree > 1 for degree in axes)), lambda: memory_limit(job, self._device)
        )
        if limit is None or layout.cpu_offload:
            return 0.0
        return max(0.0, peak - (1 - self._headroom) * limit)

    def _peak(self, job: Job, rank: int, passes: Sequence[Action]) -> float:
        """Memory of a pipeline rank, if these are its first passes."""
        key = ("parameters", rank, *self._held_by(job.parallelism))
        parameters = self._once(key, lambda: parameters_of(job, rank, self._modules))
        return RankStep(job, parameters, ActivationBytes(job), passes).memory().peak

    def _held_by(self, layout: ParallelismConfig) -> Key:
        """The fields on which the parameters of the first two pipeline ranks depend."""
        shards = (layout.parameter_shards, layout.tp, layout.ep, layout.dp_replicate > 1)
        stages = num_stages(layout, self._base.model.n_layers)
        return layout.pp, stages, *self._stages(layout, 0), *shards

    def _stages(self, layout: ParallelismConfig, rank: int) -> list[int]:
        return stages_of_rank(layout, self._base.model.n_layers, rank)

    def _once(self, key: Key, make: Callable[[], Made]) -> Made:
        if key not in self._known:
            self._known[key] = make()
        return self._known[key]  # type: ignore[no-any-return]


def _layout_of(point: Point) -> Key:
    """The fields that determine a point's layout, up to the size of microbatches."""
    return point.degrees, point.ep, point.schedule, point.layers_per_stage


def _ranks(job: Job) -> range:
    return range(min(2, job.parallelism.pp))


def _first_passes(order: Iterator[Action], stages: Sequence[int]) -> list[Action]:
    """The first passes of a rank, until every stage has gradients; most microbatches are in flight then."""
    waiting, first = set(stages), []
    for action in order:
        first.append(action)
        if action.kind in "BW":
            waiting.discard(action.stage)
        if not waiting:
            break
    return [*first, *islice(order, 2 * len(stages))]


@dataclass(frozen=True)
class _Load:
    """Seconds of one microbatch in a part of the model."""

    forward: float
    backward: float
    parts: tuple[float, ...]
    """Their sum, split by ``KNOWN``."""

    @classmethod
    def of(cls, forward: Pass, *backward: Pass) -> _Load:
        both, parts = (forward, *backward), dict.fromkeys(KNOWN, 0.0)
        for each in both:
            parts["compute"] += each.compute
            for collective in each.collectives:
                parts[collective.axis] += collective.exposed
        return cls(forward.seconds, sum(each.seconds for each in backward), tuple(parts.values()))


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank."""

    busy: float
    """Seconds of one microbatch in its stages."""
    idle: float
    """Seconds at the start and end of the step in which it has no work."""
    stages: tuple[int, ...]
    """Its stages."""


class TimeBounds:
    """Lower bounds on the step time of many points of one job.

    A rank runs the passes of its stages once per microbatch. Before its first pass, the microbatch goes
    through the earlier stages. If backward is not split, the gradients go back through them after its last
    pass. No schedule of these passes is faster; FSDP's collectives and the update come on top. If ranks share
    cores, one works while another waits.
    """

    def __init__(self, base: Job, machine: Machine, world: int) -> None:
        self._base, self._machine = base, machine
        self._kinds = tuple(block_kinds(base.model))
        self._loads: dict[Key, dict[Any, _Load]] = {}
        self._model_seconds: dict[Key, float] = {}
        self._of_ranks: dict[Key, list[_Rank]] = {}
        self._of_points: dict[Key, tuple[list[_Rank], Key]] = {}
        self._parts: dict[tuple[int, int], list[Counter[Any]]] = {}
        linear = base.precision.linear
        converted = () if linear == "none" else sort_linears(base.model, base.precision).converted
        self._converted = frozenset(converted)
        self._cores, self._world = machine.constants.cores, world

    def seconds(self, point: Point) -> float:
        """Lower bound on the step time of a legal point."""
        times, ranks, _ = self._of(point)
        chain = max(times * rank.busy + rank.idle for rank in ranks)
        if self._cores is None:
            return chain
        # As in speed.py: all ranks' work on all cores, or the longest chain on one rank's share of cores.
        total = times * self._model_seconds[self._key(point)] * self._world / point.pp / self._cores
        return max(chain / max(1, self._cores // self._world), total)

    def parts(self, point: Point) -> dict[str, float]:
        """The bound, split by ``KNOWN`` and the bubble."""
        times, ranks, loads = self._of(point)
        rank = max(ranks, key=lambda rank: times * rank.busy + rank.idle)
        stages = self._stages(point.layout(self._base.parallelism))
        held = [pair for stage in rank.stages for pair in stages[stage].items()]
        columns = zip(*([count * part for part in loads[of].parts] for of, count in held), strict=True)
        parts = {name: times * sum(column) for name, column in zip(KNOWN, columns, strict=True)}
        return parts | {"bubble": rank.idle}

    def _of(self, point: Point) -> tuple[int, list[_Rank], dict[Any, _Load]]:
        """Return the number of microbatches, the pipeline ranks, and the loads of the model's parts."""
        key = (_layout_of(point), point.rows, point.mode)
        if key not in self._of_points:
            loads = self._load(point)
            self._of_points[key] = self._ranks(loads, point.layout(self._base.parallelism)), loads
        ranks, loads = self._of_points[key]
        times = self._base.global_batch_size // point.data_parallel // point.rows
        return times, ranks, self._loads[loads]

    @staticmethod
    def _key(point: Point) -> Key:
        """The fields on which the loads of the model's parts depend."""
        shards = point.degrees[AXES.index("dp_shard")] if point.ep > 1 else 0
        return (point.tp, point.cp, shards, point.ep, point.rows, point.schedule is not None, point.mode)

    def _load(self, point: Point) -> Key:
        """Compute the loads of blocks, the table and the head unless cached; return the cache key."""
        key = self._key(point)
        if key not in self._loads:
            worker = Worker(point.job_unchecked(self._base), self._machine, self._converted)
            firsts = {kind: layer for layer, kind in reversed(list(enumerate(self._kinds)))}
            blocks = {kind: worker.block(layer) for kind, layer in firsts.items()}
            loads: dict[Any, _Load] = {
                kind: _Load.of(block.forward, block.recompute, block.inputs, block.weights)
                for kind, block in blocks.items()
            }
            loads |= {"tok_embeddings": _Load.of(*worker.table()), "output": _Load.of(*worker.head())}
            self._loads[key] = loads
            model = [loads[part] for part in (*self._kinds, "tok_embeddings", "output")]
            self._model_seconds[key] = sum(load.forward + load.backward for load in model)
        return key

    def _ranks(self, key: Key, layout: ParallelismConfig) -> list[_Rank]:
        """The ranks that can be the slowest for some number of microbatches."""
        n_layers = self._base.model.n_layers
        loads = self._loads[key]
        key = (*key, layout.pp, num_stages(layout, n_layers), layout.pp_schedule)
        if key in self._of_ranks:
            return self._of_ranks[key]
        stages = self._stages(layout)
        forward = [sum(count * loads[of].forward for of, count in parts.items()) for parts in stages]
        backward = [sum(count * loads[of].backward for of, count in parts.items()) for parts in stages]
        reached, left = [0.0, *accumulate(forward)], [0.0, *accumulate(backward)]
        one_backward = layout.pp > 1 and not layout.splits_backward
        ranks: list[_Rank] = []
        for number in range(layout.pp):
            own = stages_of_rank(layout, n_layers, number)
            busy = sum(forward[stage] + backward[stage] for stage in own)
            idle = reached[own[0]] + (left[own[0]] if one_backward else 0.0)
            if not any(other.busy >= busy and other.idle >= idle for other in ranks):
                ranks.append(_Rank(busy, idle, tuple(own)))
        self._of_ranks[key] = ranks
        return ranks

    def _stages(self, layout: ParallelismConfig) -> list[Counter[Any]]:
        """Count the kinds of blocks, the table and the head of every stage."""
        n_layers = self._base.model.n_layers
        key = (layout.pp, num_stages(layout, n_layers))
        if key not in self._parts:
            modules = split_modules(layout, n_layers)
            held = [Counter(part for name in names if (part := self._part(name))) for names in modules]
            # The lists of modules do not name the block of multi-token prediction.
            held[-1].update(self._kinds[n_layers:])
            self._parts[key] = held
        return self._parts[key]

    def _part(self, name: str) -> Any:
        """Key of a module's load; None for the last norm, whose time is negligible."""
        if name.startswith("layers."):
            return self._kinds[int(name.removeprefix("layers."))]
        return None if name == "norm" else name
