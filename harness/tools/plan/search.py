"""Search the fastest layouts of a job: each legal point that fits is ranked, or proved to be slower.

Points that cannot fit are excluded. The others are fully planned in the order of their lower bound on time,
until no remaining point can be among the best. Bounds are the sums of ``memory.py`` and ``step_time.py``
over fewer passes; what depends on few of the searched fields is computed once.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby, islice
from typing import Any

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import num_stages, split_modules, stages_of_rank
from harness.metrics.console import progress
from harness.model.architecture import block_kinds
from harness.precision.linears import sort_linears
from harness.tools.plan.block_cost import Worker
from harness.tools.plan.collectives import Pass, sharing_of_block
from harness.tools.plan.constants import Calibration
from harness.tools.plan.evidence import RESOLUTION
from harness.tools.plan.machine import Machine, device_of, machine_of
from harness.tools.plan.make import plan_memory, with_speed
from harness.tools.plan.memory import RankStep, equal_stages, memory_limit
from harness.tools.plan.memory_parts import ActivationBytes
from harness.tools.plan.order import fullest, passes_of_rank
from harness.tools.plan.parameters import Memo, RankParameters, parameters_of
from harness.tools.plan.plan import Action, Plan
from harness.tools.plan.render import mesh_of
from harness.tools.plan.space import MODES, Key, LayoutPoint, Legality, Space
from harness.util.errors import ConfigError, UserError
from harness.util.hardware import ACCELERATORS, Accelerator
from harness.util.tables import gib, plural

MOST_LAYOUTS, MOST_POINTS = 20_000, 1_000_000
"""Limit of a search: a few minutes."""


@dataclass(frozen=True)
class Candidate:
    """A point that is legal and fits, with its plan."""

    point: LayoutPoint
    plan: Plan

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        assert self.plan.speed is not None, "a search knows its hardware"
        return self.plan.speed.step_seconds

    @cached_property
    def order(self) -> tuple[float, tuple[int, bool, int], float]:
        """Sort key: time, then complexity, then memory."""
        return rounded(self.seconds), self.point.complexity, self.plan.peak


def rounded(seconds: float) -> float:
    """Round to three digits: the plan cannot tell smaller differences."""
    return float(f"{seconds:.3g}")


def search(space: Space, top: int, calibration: Calibration | None = None, headroom: float = 0.0) -> Search:
    """Find the ``top`` fastest points of a space that leave ``headroom``, a fraction of the usable memory.

    Raises:
        UserError: no point is legal, none fits, or the hardware is unknown.
    """
    began = time.perf_counter()
    found = Search(space, top, calibration, headroom)
    legal = found.legal_points()
    if legal:
        found.rank(legal)
    if not found.best and found.closest:
        shortfall, closest = found.closest
        raise UserError(
            f"none of {plural(found.too_large, 'legal way')} to run {space.world} ranks fits; the closest is "
            f"at least {gib(shortfall)} GiB too large on its fullest rank; would work: more ranks, or what "
            f"harness plan says to {' '.join(closest.overrides(space.base.parallelism))}"
        )
    if not found.best:
        name, count = found.illegal.most_common(1)[0]
        raise UserError(
            f"none of {plural(found.points, 'way')} to run {space.world} ranks is legal, "
            f"for most of them ({count:,}): {found.rules[name]}"
        )
    found.seconds = time.perf_counter() - began
    return found


@dataclass
class Search:
    """A search and its result: the best points, and why the others are not among them."""

    space: Space
    top: int
    calibration: Calibration | None
    headroom: float
    fitting: list[Candidate] = field(default_factory=list)
    """All that were planned and fit, the fastest first."""
    best: list[Candidate] = field(default_factory=list)
    """The ``top`` fastest; of equal ones the simplest."""
    layouts: int = 0
    """Number of all meshes."""
    points: int = 0
    """Number of all points: the best, and those that the following count."""
    illegal: Counter[str] = field(default_factory=Counter)
    """Illegal points by the field whose rule they break."""
    rules: dict[str, ConfigError] = field(default_factory=dict)
    """One broken rule of each field."""
    too_large: int = 0
    """Number of points that do not fit."""
    closest: tuple[float, LayoutPoint] | None = None
    """The point closest to fitting, and a lower bound on its shortfall in bytes."""
    tied: int = 0
    """Number of points as fast as one of the best, less simple or with more memory."""
    slower: Counter[str] = field(default_factory=Counter)
    """Slower points, by the part of the step in which they lose most to the best."""
    planned: int = 0
    """Number of points that were fully planned; the bound was enough for the others."""
    seconds: float = 0.0
    """Duration of the search."""
    _known: dict[Key, list[tuple[int, int, float]]] = field(default_factory=lambda: defaultdict(list))
    """Points that did not fit, by placement: rows, saved activations, shortfall."""

    @property
    def error(self) -> float | None:
        """The plan does not order two layouts whose times differ by less; None if nothing is published."""
        return None if self.best[0].plan.is_calibrated else RESOLUTION.off

    @property
    def most(self) -> float:
        """Longest step within the error of the first."""
        return (1 + (self.error or 0.0)) * self.best[0].seconds

    @property
    def simplest(self) -> Candidate:
        """The simplest within the error of the first, and of equally simple ones the fastest."""
        return min(
            (each for each in self.fitting if each.seconds <= self.most), key=lambda each: each.order[1]
        )

    @property
    def fastest(self) -> dict[str, Candidate]:
        """The fastest layout of each kind of data parallelism."""
        kinds = ((each.point.data_parallelism, each) for each in reversed(self.fitting))
        return {kind: each for kind, each in kinds if kind}

    @property
    def shown(self) -> dict[str, Candidate]:
        """The best by number; then by name the fastest of each kind and the simplest, if not among them."""
        shown = {f"{number}": each for number, each in enumerate(self.best, start=1)}
        for name, each in (*sorted(self.fastest.items()), ("simplest", self.simplest)):
            if each not in shown.values():
                shown[name] = each
        return shown

    def legal_points(self) -> list[LayoutPoint]:
        """Return the legal points of the space; count the others."""
        space, legality, legal = self.space, Legality(self.space.base), list[LayoutPoint]()
        layouts = list(islice(space.layouts(), MOST_LAYOUTS + 1))
        if len(layouts) > MOST_LAYOUTS:
            raise _too_many(space, f"{MOST_LAYOUTS:,} layouts")
        for degrees, ep in layouts:
            self.layouts += 1
            for point in space.points(degrees, ep):
                self.points += 1
                error = legality.broken(point)
                if error is None:
                    legal.append(point)
                else:
                    self._count_illegal(error)
            if len(legal) > MOST_POINTS:
                raise _too_many(space, f"{MOST_POINTS:,} ways to run {space.world} ranks")
        if not self.layouts:
            axes = ", ".join(sorted(name for name in space.typed if name.startswith("parallelism.")))
            raise UserError(
                f"no layout has {plural(space.world, 'rank')} with the fields on the command line ({axes}); "
                "would work: fewer of these fields, or other values"
            )
        return legal

    def rank(self, points: Sequence[LayoutPoint]) -> None:
        """Plan the legal points that may be among the best."""
        base = self.space.base
        device, machine = device_of(base), machine_of(points[0].job(base), self.calibration)
        if device is None:
            rule = "a search ranks by speed, and the hardware of these ranks is unknown"
            raise ConfigError("cluster.accelerator", base.cluster.accelerator, rule, ACCELERATORS)
        if machine is None:
            rule = "a search ranks by speed, and the network between these nodes is unknown"
            raise ConfigError("cluster.network_gbps", None, rule, "400, Gbit/s for each device")
        memory, times = MemoryBounds(base, device, self.headroom), TimeBounds(base, machine)
        meshes = [[*group] for _, group in groupby(points, key=lambda point: point[:6])]
        bounded: list[tuple[float, LayoutPoint]] = []
        slower: list[LayoutPoint] = []
        with progress(2 * len(meshes), seconds=10.0) as begin:
            for mesh in meshes:
                begin(f"bounds of {mesh_of(mesh[0].layout(base.parallelism))}")
                for point in mesh:
                    if shortfall := memory.persistent_shortfall(point):
                        self._count_too_large(shortfall, point)
                    else:
                        bounded.append((rounded(times.seconds(point)), point))
            bounded.sort(key=lambda pair: pair[0])
            for number, (least, point) in enumerate(bounded):
                if number * len(meshes) % len(bounded) < len(meshes):
                    begin("plans of the fastest")
                if not self._may_matter(least, point):
                    slower.append(point)
                elif shortfall := self._too_large(point, memory):
                    self._count_too_large(shortfall, point)
        as_fast = sum(each.order[0] <= self.best[-1].order[0] for each in self.fitting)
        self.tied = as_fast - len(self.best)
        first = times.parts(self.best[0].point) if self.best else {}
        for point in [*slower, *(each.point for each in self.fitting[as_fast:])]:
            parts = times.parts(point)
            self.slower[max(parts, key=lambda part: parts[part] - first[part])] += 1

    def _may_matter(self, least: float, point: LayoutPoint) -> bool:
        """Whether a point that takes at least this time may be shown."""
        bound, kind = (least, point.complexity), point.data_parallelism
        if len(self.best) < self.top or bound <= self.best[-1].order[:2]:
            return True
        if kind and ((own := self.fastest.get(kind)) is None or bound <= own.order[:2]):
            return True
        return least <= self.most and bound[::-1] < self.simplest.order[1::-1]

    def _count_illegal(self, error: ConfigError) -> None:
        self.illegal[error.field] += 1
        self.rules.setdefault(error.field, error)

    def _count_too_large(self, shortfall: float, point: LayoutPoint) -> None:
        self.too_large += 1
        if self.closest is None or shortfall < self.closest[0]:
            self.closest = shortfall, point

    def _too_large(self, point: LayoutPoint, memory: MemoryBounds) -> float:
        """Plan a point that may fit; keep it, or return a lower bound on its shortfall."""
        # With all else equal, larger microbatches and less recomputation never take less memory.
        too_large = self._known[point.placement]
        saved = -MODES.index(point.mode) if point.mode in MODES else 0
        lacks = (short for rows, less, short in too_large if rows <= point.rows and less <= saved)
        if shortfall := next(lacks, 0.0):
            return shortfall
        if (shortfall := memory.shortfall(point)) == 0.0:
            try:
                job = point.job(self.space.base)
            except ConfigError as error:
                self._count_illegal(error)
                return 0.0
            plan = plan_memory(job, self.calibration)
            self.planned += 1
            usable = math.inf if plan.memory_limit is None else (1 - self.headroom) * plan.memory_limit
            if (shortfall := max(0.0, plan.peak - usable)) == 0.0:
                new = Candidate(point, with_speed(plan, self.calibration))
                insort(self.fitting, new, key=lambda each: each.order)
                equal = groupby(self.fitting, key=lambda each: each.order[0])
                self.best = [next(group) for _, group in islice(equal, self.top)]
                return 0.0
        too_large.append((point.rows, saved, shortfall))
        return shortfall


class MemoryBounds(Memo):
    """Lower bounds of the memory of many points of one job.

    That of some pipeline ranks: the first one has the most microbatches in flight, the second one most often
    has more layers, and the last two have the most halves of backward passes left if they are split.
    """

    def __init__(self, base: Job, device: Accelerator | None, headroom: float = 0.0) -> None:
        super().__init__()
        self._base, self._device, self._headroom = base, device, headroom

    def persistent_shortfall(self, point: LayoutPoint) -> float:
        """Least bytes by which a legal point exceeds the limit without activations; 0 if it may fit."""

        def peak() -> float:
            job = point.job_unchecked(self._base)
            job = replace(job, training=replace(job.training, seq_len=0))
            ranks = [(rank, self._stages(job.parallelism, rank)) for rank in _first_ranks(job)]
            return max(
                self._peak(job, rank, (), (Action(stage, kind, 0) for stage in stages for kind in "FB"))
                for rank, stages in ranks
            )

        def shortfall() -> float:
            layout = point.layout(self._base.parallelism)
            return self._over_limit(point, self.once(("persistent", *self._shards(layout)), peak))

        return self.once(point.placement, shortfall)

    def shortfall(self, point: LayoutPoint) -> float:
        """Least bytes by which a legal point exceeds the limit with its own microbatches; 0 if it may fit."""
        job = point.job_unchecked(self._base)
        layout, order = job.parallelism, (job.microbatches, point.schedule)
        for rank in _first_ranks(job):
            if found := self._over_limit(point, self._peak(job, rank, order, self._first_passes(job, rank))):
                return found
        for rank in (layout.pp - 1, layout.pp - 2) if layout.pp > 2 and layout.splits_backward else ():
            passes = passes_of_rank(layout, job.model.n_layers, job.microbatches, rank)
            if found := self._over_limit(point, self._peak(job, rank, (*order, "all"), passes)):
                return found
        return 0.0

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

    def _over_limit(self, point: LayoutPoint, peak: float) -> float:
        limit = self.once(
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

        parameters, equal = self.once(("held", rank, *self._shards(job.parallelism)), held)
        key = ("passes", rank, *self._split(job.parallelism), *order)
        passes = self.once(key, lambda: fullest(actions, equal))
        return RankStep(job, parameters, ActivationBytes(job), equal, passes).memory().peak

    def _shards(self, layout: ParallelismConfig) -> Key:
        """The fields on which the parameters of a pipeline rank depend."""
        replicated = layout.dp_replicate > 1
        return *self._split(layout), layout.parameter_shards, layout.tp, layout.ep, replicated

    def _split(self, layout: ParallelismConfig) -> Key:
        """The fields on which the stages of a rank depend."""
        return layout.pp, num_stages(layout, self._base.model.n_layers), *self._stages(layout, 0)

    def _stages(self, layout: ParallelismConfig, rank: int) -> list[int]:
        return stages_of_rank(layout, self._base.model.n_layers, rank)


def _too_many(space: Space, what: str) -> UserError:
    return UserError(
        f"cluster.ranks={space.world}: a search of more than {what} takes too long; would work: fewer ranks, "
        "or fixed degrees such as parallelism.tp=8"
    )


def _first_ranks(job: Job) -> range:
    return range(min(2, job.parallelism.pp))


KNOWN = ("compute", "tp", "cp", "ep")
"""Parts of a step's time that come from single blocks."""
Load = Sequence[float]
"""Seconds of one microbatch in a part of the model: forward, backward, and both by ``KNOWN``."""
Held = tuple[tuple[Any, int], ...]
"""Kinds of blocks, the embedding and the head, each with its number."""


def _load(forward: Pass, *backward: Pass) -> Load:
    parts = dict.fromkeys(KNOWN, 0.0)
    for each in (forward, *backward):
        parts["compute"] += each.compute
        for collective in each.collectives:
            parts[collective.axis] += collective.exposed
    return forward.seconds, sum(each.seconds for each in backward), *parts.values()


def _added(loads: Iterable[Load]) -> Load:
    return tuple(map(sum, zip(*loads, strict=True)))


@dataclass(frozen=True)
class _Rank:
    """One pipeline rank."""

    busy: float
    """Seconds of one microbatch in its stages."""
    idle: float
    """Seconds at the start and end of the step in which it has no work."""
    parts: Sequence[float]
    """``busy`` by ``KNOWN``."""
    held: Sequence[tuple[Any, int]]
    """What its stages hold, with the numbers."""


class TimeBounds(Memo):
    """Lower bounds on the step time of many points of one job.

    A rank runs the passes of its stages once per microbatch. Before its first pass, the microbatch goes
    through the earlier stages. If backward is not split, the gradients go back through them after its last
    pass. No schedule of these passes is faster. FSDP's collectives slow down the computation that hides them.
    """

    def __init__(self, base: Job, machine: Machine) -> None:
        super().__init__()
        self._base, self._machine = base, machine
        self._kinds = tuple(block_kinds(base.model))
        self._first = {kind: layer for layer, kind in reversed(list(enumerate(self._kinds)))}
        formatted = base.precision.linear != "none"
        self._converted = frozenset(sort_linears(base.model, base.precision).converted if formatted else ())

    def seconds(self, point: LayoutPoint) -> float:
        """Lower bound on the step time of a legal point."""
        return sum(self.parts(point).values())

    def parts(self, point: LayoutPoint) -> dict[str, float]:
        """The bound, split by ``KNOWN``, ``dp`` for FSDP, and the bubble."""
        times = self._base.global_batch_size // point.data_parallel // point.rows
        passes = times if point.pp == 1 else times * point.rows // point.local_batch_size
        sharing = self.once(("sharing", point.degrees, point.ep), lambda: self._sharing(point))
        key = ("ranks", point.tp, point.cp, point.ep, point.rows, point.mode)
        pipeline = (point.pp, point.schedule, point.layers_per_stage)
        ranks = self.once((*key, *pipeline), lambda: self._slowest(point))
        of_ranks = [passes * sum(count * sharing.get(of, 0.0) for of, count in rank.held) for rank in ranks]
        bounds = [times * rank.busy + rank.idle + more for rank, more in zip(ranks, of_ranks, strict=True)]
        at = max(range(len(ranks)), key=bounds.__getitem__)
        parts = {name: times * part for name, part in zip(KNOWN, ranks[at].parts, strict=True)}
        return parts | {"dp": of_ranks[at], "bubble": ranks[at].idle}

    def _sharing(self, point: LayoutPoint) -> dict[Any, float]:
        """Least seconds that FSDP takes for a block of each kind in one pass over a local batch."""
        job, contention = point.job_unchecked(self._base), min(1.0, self._machine.contention)
        gathers = 1 + job.parallelism.reshards_after_forward
        sharing = {}
        for kind, layer in self._first.items():
            block = sharing_of_block(job, self._machine, layer)
            moving = gathers * sum(each.seconds for each in block.gather)
            moving += sum(each.seconds for each in block.reduce)
            sharing[kind] = contention * moving + gathers * block.copying
        return sharing

    def _slowest(self, point: LayoutPoint) -> list[_Rank]:
        """The ranks that can be the slowest for some number of microbatches."""
        shared = (point.tp, point.cp, point.ep, point.rows, point.mode, point.schedule is not None)
        loads = self.once(("loads", *shared), lambda: self._loads(point))
        layout = point.layout(self._base.parallelism)
        pipeline = ("pipeline", point.pp, point.schedule, point.layers_per_stage)
        stages, owned = self.once(pipeline, lambda: self._pipeline(layout))
        work = {
            held: _added([count * part for part in loads[of]] for of, count in held) for held in set(stages)
        }
        reached = [0.0, *accumulate(work[held][0] for held in stages)]
        left = [0.0, *accumulate(work[held][1] for held in stages)]
        waits_for_gradients = layout.pp > 1 and not layout.splits_backward
        ranks: list[_Rank] = []
        for own in owned:
            held = [stages[stage] for stage in own]
            forward, backward, *parts = _added(map(work.__getitem__, held))
            idle = reached[own[0]] + (left[own[0]] if waits_for_gradients else 0.0)
            if not any(other.busy >= forward + backward and other.idle >= idle for other in ranks):
                ranks.append(_Rank(forward + backward, idle, parts, [each for of in held for each in of]))
        return ranks

    def _loads(self, point: LayoutPoint) -> dict[Any, Load]:
        worker = Worker(point.job_unchecked(self._base), self._machine, self._converted)
        loads: dict[Any, Load] = {"tok_embeddings": _load(*worker.table()), "output": _load(*worker.head())}
        for kind, layer in self._first.items():
            block = worker.block(layer)
            loads[kind] = _load(block.forward, block.recompute, block.inputs, block.weights)
        return loads

    def _pipeline(self, layout: ParallelismConfig) -> tuple[list[Held], list[list[int]]]:
        """What each stage holds, and the stages of each rank."""
        n_layers = self._base.model.n_layers
        parts = {f"layers.{layer}": kind for layer, kind in enumerate(self._kinds)}
        modules = split_modules(layout, n_layers)
        stages = [Counter(parts.get(name, name) for name in names) for names in modules]
        # The lists of modules do not name the block of multi-token prediction.
        stages[-1].update(self._kinds[n_layers:])
        # The time of the last norm is negligible.
        held = [tuple((of, count) for of, count in stage.items() if of != "norm") for stage in stages]
        return held, [stages_of_rank(layout, n_layers, rank) for rank in range(layout.pp)]
