"""Lower bounds of a point's memory and step time, by the formulas of ``memory.py`` and ``step_time.py``.

A search computes them before it plans a point. What depends on few of the searched fields is computed once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, TypeVar

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import num_stages, split_modules, stages_of_rank
from harness.model.architecture import block_kinds
from harness.precision.linears import sort_linears
from harness.tools.plan.block_cost import Block, Worker
from harness.tools.plan.fsdp_cost import Sharer
from harness.tools.plan.machine import Machine
from harness.tools.plan.memory import RankStep, equal_stages, memory_limit
from harness.tools.plan.memory_activations import ActivationBytes
from harness.tools.plan.order import fullest, passes_of_rank
from harness.tools.plan.parameters import RankParameters, parameters_of
from harness.tools.plan.plan import Action
from harness.tools.plan.space import Point
from harness.tools.plan.traffic import Pass
from harness.util.hardware import Accelerator

KNOWN = ("compute", "tp", "cp", "ep")
"""Parts of a step's time that come from single blocks."""
TABLES = ("tok_embeddings", "output")
Key = tuple[Any, ...]
Made = TypeVar("Made")


class MemoryBounds:
    """Lower bounds of the memory of many points of one job.

    That of some pipeline ranks: the first one has the most microbatches in flight, the second one most often
    has more layers, and the last two have the most halves of backward passes left if they are split.
    """

    def __init__(self, base: Job, device: Accelerator | None, headroom: float = 0.0) -> None:
        self._base, self._device, self._headroom = base, device, headroom
        self._known: dict[Key, Any] = {}

    def persistent_shortfall(self, point: Point) -> float:
        """Least bytes by which a legal point exceeds the limit without activations; 0 if it may fit."""
        return self._once(_layout_of(point), lambda: self._persistent_shortfall(point))

    def _persistent_shortfall(self, point: Point) -> float:
        layout = point.layout(self._base.parallelism)

        def most() -> float:
            job = point.job_unchecked(self._base)
            empty = replace(job, training=replace(job.training, seq_len=0))
            one = [self._one_microbatch(empty, rank) for rank in _ranks(empty)]
            return max(self._peak(empty, rank, (), one[rank]) for rank in _ranks(empty))

        return self._over_limit(point, self._once(("persistent", *self._held_by(layout)), most))

    def shortfall(self, point: Point) -> float:
        """Least bytes by which a legal point exceeds the limit with its own microbatches; 0 if it may fit."""
        job = point.job_unchecked(self._base)
        layout, order = job.parallelism, (job.microbatches, point.schedule)
        for rank in _ranks(job):
            if found := self._over_limit(point, self._peak(job, rank, order, self._first_passes(job, rank))):
                return found
        for rank in (layout.pp - 1, layout.pp - 2) if layout.pp > 2 and layout.splits_backward else ():
            passes = passes_of_rank(layout, job.model.n_layers, job.microbatches, rank)
            if found := self._over_limit(point, self._peak(job, rank, (*order, "all"), passes)):
                return found
        return 0.0

    def _one_microbatch(self, job: Job, rank: int) -> Iterator[Action]:
        """A forward and a backward of every stage of a rank."""
        return (Action(stage, kind, 0) for stage in self._stages(job.parallelism, rank) for kind in "FB")

    def _first_passes(self, job: Job, rank: int) -> Iterator[Action]:
        """The first passes of a rank, until every stage has gradients; most microbatches are in flight."""
        waiting = stages = set(self._stages(job.parallelism, rank))
        order = passes_of_rank(job.parallelism, job.model.n_layers, job.microbatches, rank)
        for action in order:
            yield action
            if action.kind in "BW":
                waiting = waiting - {action.stage}
            if not waiting:
                break
        yield from islice(order, 2 * len(stages))

    def _over_limit(self, point: Point, peak: float) -> float:
        limit = self._once(
            ("limit", *(degree > 1 for degree in (*point.degrees, point.ep))),
            lambda: memory_limit(point.job_unchecked(self._base), self._device),
        )
        if limit is None or self._base.parallelism.cpu_offload:
            return 0.0
        return max(0.0, peak - (1 - self._headroom) * limit)

    def _peak(self, job: Job, rank: int, order: Key, actions: Iterable[Action]) -> float:
        """Memory of a pipeline rank in some passes, which depend on ``order`` and the rank's stages."""

        def held() -> tuple[RankParameters, dict[int, int]]:
            parameters = parameters_of(job, rank)
            return parameters, equal_stages(job, parameters)

        parameters, equal = self._once(("held", rank, *self._held_by(job.parallelism)), held)
        key = ("passes", rank, *self._split(job.parallelism), *order)
        passes = self._once(key, lambda: fullest(actions, equal))
        return RankStep(job, parameters, ActivationBytes(job), equal, passes).memory().peak

    def _held_by(self, layout: ParallelismConfig) -> Key:
        """The fields on which the parameters of a pipeline rank depend."""
        shards = (layout.parameter_shards, layout.tp, layout.ep, layout.dp_replicate > 1)
        return *self._split(layout), *shards

    def _split(self, layout: ParallelismConfig) -> Key:
        """The fields on which the stages of a rank depend."""
        return layout.pp, num_stages(layout, self._base.model.n_layers), *self._stages(layout, 0)

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
class _Pipeline:
    """How a pipeline splits the model."""

    contents: list[tuple[tuple[Any, int], ...]]
    """The different contents of its stages: kinds of blocks, the table and the head, with their numbers."""
    stages: list[int]
    """Index in ``contents`` of every stage."""
    ranks: list[tuple[int, tuple[int, ...]]]
    """The first stage of every rank, and the indices in ``contents`` of its stages."""
    one_backward: bool
    """Whether gradients of inputs and of weights are computed in one pass."""


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank."""

    busy: float
    """Seconds of one microbatch in its stages."""
    idle: float
    """Seconds at the start and end of the step in which it has no work."""
    parts: tuple[float, ...]
    """``busy``, split by ``KNOWN``."""
    blocks: tuple[tuple[Any, int], ...]
    """The kinds of its blocks, with their numbers."""


class TimeBounds:
    """Lower bounds on the step time of many points of one job.

    A rank runs the passes of its stages once per microbatch. Before its first pass, the microbatch goes
    through the earlier stages. If backward is not split, the gradients go back through them after its last
    pass. No schedule of these passes is faster. FSDP's collectives slow down the computation that hides them.
    The update comes on top. If ranks share cores, one works while another waits.
    """

    def __init__(self, base: Job, machine: Machine, world: int) -> None:
        self._base, self._machine = base, machine
        self._kinds = tuple(block_kinds(base.model))
        self._first = {kind: layer for layer, kind in reversed(list(enumerate(self._kinds)))}
        self._blocks: dict[Key, tuple[dict[Any, Block], dict[Any, _Load]]] = {}
        self._loads: dict[Key, dict[Any, _Load]] = {}
        self._pipelines: dict[Key, _Pipeline] = {}
        self._ranks: dict[Key, list[_Rank]] = {}
        self._sharing: dict[Key, dict[Any, float]] = {}
        linear = base.precision.linear
        converted = () if linear == "none" else sort_linears(base.model, base.precision).converted
        self._converted = frozenset(converted)
        self._cores, self._world = machine.constants.cores, world

    def seconds(self, point: Point) -> float:
        """Lower bound on the step time of a legal point."""
        if self._cores is None:
            return self._slowest(point)[0]
        times = self._times(point)
        chain = max(times * rank.busy + rank.idle for rank in self._ranks_of(point))
        # As in step_time.py: all ranks' work on all cores, or the longest chain on one rank's share of cores.
        loads = self._loads_of(point)
        model = [loads[part] for part in (*self._kinds, *TABLES)]
        seconds = sum(load.forward + load.backward for load in model)
        total = times * seconds * self._world / point.pp / self._cores
        return max(chain / max(1, self._cores // self._world), total)

    def parts(self, point: Point) -> dict[str, float]:
        """The bound of ranks with own devices, split by ``KNOWN``, ``dp`` for FSDP, and the bubble."""
        times, (_, sharing, rank) = self._times(point), self._slowest(point)
        parts = {name: times * part for name, part in zip(KNOWN, rank.parts, strict=True)}
        return parts | {"dp": sharing, "bubble": rank.idle}

    def _slowest(self, point: Point) -> tuple[float, float, _Rank]:
        """The largest bound of a rank, and FSDP's part of it."""
        times, ranks = self._times(point), self._ranks_of(point)
        of_block = self._sharing_of(point)
        passes = times if point.pp == 1 else times * point.rows // point.local_batch_size
        sharing = [passes * sum(count * of_block[kind] for kind, count in rank.blocks) for rank in ranks]
        bounds = [times * rank.busy + rank.idle + more for rank, more in zip(ranks, sharing, strict=True)]
        at = max(range(len(ranks)), key=bounds.__getitem__)
        return bounds[at], sharing[at], ranks[at]

    def _times(self, point: Point) -> int:
        """Number of microbatches of a step."""
        return self._base.global_batch_size // point.data_parallel // point.rows

    def _ranks_of(self, point: Point) -> list[_Rank]:
        """The ranks that can be the slowest for some number of microbatches."""
        pipeline = (point.pp, point.schedule, point.layers_per_stage)
        key = (point.tp, point.cp, point.ep, point.rows, point.mode, *pipeline)
        if key not in self._ranks:
            if pipeline not in self._pipelines:
                self._pipelines[pipeline] = self._pipeline(point.layout(self._base.parallelism))
            self._ranks[key] = _slowest(self._pipelines[pipeline], self._loads_of(point))
        return self._ranks[key]

    def _loads_of(self, point: Point) -> dict[Any, _Load]:
        """The loads of blocks, the table and the head."""
        shared = (point.tp, point.cp, point.ep, point.rows, point.schedule is not None)
        key = (*shared, point.mode)
        if key not in self._loads:
            worker = Worker(point.job_unchecked(self._base), self._machine, self._converted)
            if shared not in self._blocks:
                ends = {"tok_embeddings": _Load.of(*worker.table()), "output": _Load.of(*worker.head())}
                self._blocks[shared] = {kind: worker.block(at) for kind, at in self._first.items()}, ends
            blocks, ends = self._blocks[shared]
            again = {kind: worker.recompute(layer) for kind, layer in self._first.items()}
            self._loads[key] = ends | {
                kind: _Load.of(block.forward, again[kind], block.inputs, block.weights)
                for kind, block in blocks.items()
            }
        return self._loads[key]

    def _sharing_of(self, point: Point) -> dict[Any, float]:
        """Least seconds that FSDP takes for a block of each kind in one pass over a local batch."""
        key = (point.degrees, point.ep)
        if key not in self._sharing:
            sharer = Sharer(point.job_unchecked(self._base), self._machine)
            gathers, contention = 1 + sharer.layout.reshards_after_forward, min(1.0, self._machine.contention)
            self._sharing[key] = {}
            for kind, layer in self._first.items():
                block = sharer.block(layer)
                moving = gathers * sum(each.seconds for each in block.gather)
                moving += sum(each.seconds for each in block.reduce)
                self._sharing[key][kind] = contention * moving + gathers * block.copying
        return self._sharing[key]

    def _pipeline(self, layout: ParallelismConfig) -> _Pipeline:
        n_layers = self._base.model.n_layers
        modules = split_modules(layout, n_layers)
        held = [Counter(part for name in names if (part := self._part(name))) for names in modules]
        # The lists of modules do not name the block of multi-token prediction.
        held[-1].update(self._kinds[n_layers:])
        contents = {parts: i for i, parts in enumerate(dict.fromkeys(tuple(each.items()) for each in held))}
        stages = [contents[tuple(each.items())] for each in held]
        owned = [stages_of_rank(layout, n_layers, rank) for rank in range(layout.pp)]
        return _Pipeline(
            list(contents),
            stages,
            [(own[0], tuple(stages[stage] for stage in own)) for own in owned],
            layout.pp > 1 and not layout.splits_backward,
        )

    def _part(self, name: str) -> Any:
        """Key of a module's load; None for the last norm, whose time is negligible."""
        if name.startswith("layers."):
            return self._kinds[int(name.removeprefix("layers."))]
        return None if name == "norm" else name


def _slowest(pipeline: _Pipeline, loads: dict[Any, _Load]) -> list[_Rank]:
    """The ranks that can be the slowest for some number of microbatches."""
    counted = [[(count, loads[of]) for of, count in parts] for parts in pipeline.contents]
    there = [sum(count * load.forward for count, load in each) for each in counted]
    back = [sum(count * load.backward for count, load in each) for each in counted]
    reached = [0.0, *accumulate(there[at] for at in pipeline.stages)]
    left = [0.0, *accumulate(back[at] for at in pipeline.stages)]
    work = {held: sum(there[at] + back[at] for at in held) for held in {held for _, held in pipeline.ranks}}
    ranks: list[_Rank] = []
    for first, held in pipeline.ranks:
        busy = work[held]
        idle = reached[first] + (left[first] if pipeline.one_backward else 0.0)
        if not any(other.busy >= busy and other.idle >= idle for other in ranks):
            parts = ([count * part for part in load.parts] for at in held for count, load in counted[at])
            blocks = Counter[Any]()
            for at in held:
                blocks.update({kind: count for kind, count in pipeline.contents[at] if kind not in TABLES})
            ranks.append(_Rank(busy, idle, tuple(map(sum, zip(*parts, strict=True))), tuple(blocks.items())))
    return ranks
