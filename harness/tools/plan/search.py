"""Search the fastest layouts of a job: estimate the time of every legal point, and plan the fastest.

An estimate adds up parts of the plan that many points share. Points are planned in the order of
their estimates until none of the others is estimated to be among the best: a hundred of a hundred
thousand.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import split_modules, stages_of_rank
from harness.metrics.console import progress
from harness.model.architecture import block_kinds
from harness.tools.plan.block_cost import Worker
from harness.tools.plan.collectives import Pass, sharing_of_block
from harness.tools.plan.constants import Calibration
from harness.tools.plan.evidence import RESOLUTION
from harness.tools.plan.machine import Machine, device_of, machine_of
from harness.tools.plan.make import make_plan
from harness.tools.plan.memory import memory_limit, ranks_in_turn
from harness.tools.plan.parameters import BYTES, Memo, parameters_of
from harness.tools.plan.plan import Plan, RankMemory
from harness.tools.plan.space import Key, LayoutPoint, Space
from harness.util.errors import ConfigError, UserError
from harness.util.hardware import ACCELERATORS
from harness.util.words import gib, plural

MOST_LAYOUTS = 20_000
MOST_POINTS = 1_000_000
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


def search(
    space: Space, top: int, calibration: Calibration | None = None, headroom: float = 0.0
) -> Search:
    """Find the ``top`` fastest points of a space that leave ``headroom``, a fraction of the usable memory.

    Raises:
        UserError: no point is legal, none fits, or the hardware is unknown.
    """
    began = time.perf_counter()
    found = Search(space, top, calibration, headroom)
    legal = found.legal_groups()
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
    """The point closest to fitting, and the least bytes that it is too large."""
    tied: int = 0
    """Number of points as fast as one of the best, less simple or with more memory."""
    slower: int = 0
    """Number of points that are slower, planned or by their estimate."""
    planned: int = 0
    """Number of points that were fully planned."""
    seconds: float = 0.0
    """Duration of the search."""
    _known: dict[Key, list[tuple[int, int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    """Points that did not fit, by family: rows, saved activations, bytes too many."""
    _by_held: list[tuple[float, LayoutPoint]] = field(default_factory=list)
    """The smallest point of each family that cannot hold its parameters, and the least bytes it lacks."""
    _passes: Memo = field(default_factory=Memo)

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
        alike = [each for each in self.fitting if each.seconds <= self.most]
        return min(alike, key=lambda each: each.order[1])

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

    def legal_groups(self) -> list[list[LayoutPoint]]:
        """Return the points of the meshes and schedules that are legal; count the others."""
        space = self.space
        layouts = list(islice(space.layouts(), MOST_LAYOUTS + 1))
        if len(layouts) > MOST_LAYOUTS:
            raise _too_many(space, f"{MOST_LAYOUTS:,} layouts")
        if not layouts:
            axes = ", ".join(
                sorted(name for name in space.typed if name.startswith("parallelism."))
            )
            raise UserError(
                f"no layout has {plural(space.world, 'rank')} with the fields on the command line ({axes}); "
                "would work: fewer of these fields, or other values"
            )
        self.layouts = len(layouts)
        groups = list[list[LayoutPoint]]()
        legal = 0
        for layout in layouts:
            for group in space.groups(*layout):
                self.points += len(group)
                if error := self._broken(group):
                    self._count_illegal(error, len(group))
                    continue
                groups.append(group)
                legal += len(group)
            if legal > MOST_POINTS:
                raise _too_many(space, f"{MOST_POINTS:,} ways to run {space.world} ranks")
        return groups

    def _broken(self, group: Sequence[LayoutPoint]) -> ConfigError | None:
        """The rule that a mesh and schedule breaks with passes of every size; None if one size is legal."""
        first: ConfigError | None = None
        passes: dict[tuple[int, int], LayoutPoint] = {}
        for point in group:
            passes.setdefault((point.local_batch_size, point.microbatch_size), point)
        for point in passes.values():
            try:
                point.legal_job(self.space.base)
                return None
            except ConfigError as error:
                first = first or error
        return first

    def rank(self, groups: Sequence[Sequence[LayoutPoint]]) -> None:
        """Plan the points in the order of their estimates, as long as one may be among the best."""
        base = self.space.base
        device = device_of(base)
        machine = machine_of(groups[0][0].job_unchecked(base), self.calibration)
        if device is None:
            rule = "a search ranks by speed, and the hardware of these ranks is unknown"
            raise ConfigError("cluster.accelerator", base.cluster.accelerator, rule, ACCELERATORS)
        if machine is None:
            rule = "a search ranks by speed, and the network between these nodes is unknown"
            raise ConfigError("cluster.network_gbps", None, rule, "400, Gbit/s for each device")
        least: dict[Key, LayoutPoint] = {}
        for point in chain.from_iterable(groups):
            least.setdefault(point.family, point)
        with progress(2, seconds=10.0) as begin:
            begin(f"estimates of {plural(self.points, 'way')}")
            estimates = Estimates(base, machine)
            estimated = [
                (rounded(estimates.seconds(point)), point) for point in chain.from_iterable(groups)
            ]
            estimated.sort(key=lambda pair: pair[0])
            begin("plans of the fastest")
            for seconds, point in estimated:
                if not self._may_matter(seconds, point):
                    self.slower += 1
                elif self._known_shortfall(point, least[point.family]) or self._plan(point):
                    self.too_large += 1
        self._measure_closest()
        as_fast = sum(each.order[0] <= self.best[-1].order[0] for each in self.fitting)
        self.tied = as_fast - len(self.best)
        self.slower += len(self.fitting) - as_fast

    def _may_matter(self, seconds: float, point: LayoutPoint) -> bool:
        """Whether a point that takes about this time may be shown."""
        estimate = (seconds, point.complexity)
        kind = point.data_parallelism
        if len(self.best) < self.top or estimate <= self.best[-1].order[:2]:
            return True
        if kind and (kind not in self.fastest or estimate <= self.fastest[kind].order[:2]):
            return True
        return seconds <= self.most and estimate[::-1] < self.simplest.order[1::-1]

    def _count_illegal(self, error: ConfigError, points: int = 1) -> None:
        self.illegal[error.field] += points
        self.rules.setdefault(error.field, error)

    def _known_shortfall(self, point: LayoutPoint, least: LayoutPoint) -> float:
        """Bytes that a point lacks at least, by others of its family; 0 if it may fit."""
        if point.family not in self._known:
            self._known[point.family] = []
            if lacks := self._held_shortfall(least):
                self._known[point.family].append((least.rows, least.saved, lacks))
                self._by_held.append((lacks, least))
                return lacks
            # Its first rank is enough: of a family that fits, all ranks would be computed for nothing.
            # The smallest passes may be illegal: then other points say what fits.
            with suppress(ConfigError):
                self._memory(least, least.legal_job(self.space.base), ranks=1)
        for rows, saved, lacks in self._known[point.family]:
            if rows <= point.rows and saved <= point.saved:
                return lacks
        return 0.0

    def _measure_closest(self) -> None:
        """Compute the memory of excluded points, as long as one may be the closest."""
        for held, point in sorted(self._by_held, key=itemgetter(0)):
            if self.closest is not None and held >= self.closest[0]:
                break
            try:
                self._memory(point, point.legal_job(self.space.base), ranks=1)
            except ConfigError:
                # The smallest passes may be illegal. Then only what is held without them is known.
                self.closest = self.closest or (held, point)

    def _held_shortfall(self, point: LayoutPoint) -> float:
        """Bytes that a point lacks at least, by what its first rank holds at the end of a step; no passes."""
        job = point.job_unchecked(self.space.base)
        limit = memory_limit(job, device_of(job))
        if limit is None or job.parallelism.cpu_offload:
            return 0.0
        held = parameters_of(job, 0)
        size = 2 * held.parameter_bytes + held.optimizer_bytes  # gradients are as large
        if point.pp > 1 and job.fsdp_ranks > 1:
            # A pipeline sums up unsharded gradients.
            parameters = chain.from_iterable(
                chain.from_iterable(module.groups.values()) for module in held.held_modules
            )
            unsharded = sum(tensor.gathered_elements for tensor in parameters)
            size += unsharded * BYTES[job.precision.reduce_dtype]
        return max(0.0, size - (1 - self.headroom) * limit)

    def _memory(
        self, point: LayoutPoint, job: Job, ranks: int | None = None
    ) -> tuple[float, list[RankMemory]]:
        """Bytes that a point lacks, 0 if it fits; and the memory of its pipeline ranks, or of the first
        ``ranks``, up to the first rank that lacks some."""
        limit = memory_limit(job, device_of(job))
        usable = math.inf if limit is None else (1 - self.headroom) * limit
        known = self._known[point.family]
        memories = []
        software = None if self.calibration is None else self.calibration.software
        for memory in islice(ranks_in_turn(job, software, self._passes), ranks):
            memories.append(memory)
            if memory.peak > usable:
                lacks = memory.peak - usable
                known.append((point.rows, point.saved, lacks))
                if self.closest is None or lacks < self.closest[0]:
                    self.closest = lacks, point
                return lacks, memories
        return 0.0, memories

    def _plan(self, point: LayoutPoint) -> float:
        """Plan a point and keep it if it fits; return the bytes that it lacks."""
        base = self.space.base
        try:
            lacks, ranks = self._memory(point, point.legal_job(base))
            if lacks == 0.0:
                plan = make_plan(point.job(base), self.calibration, ranks)
        except ConfigError as error:
            self._count_illegal(error)
            return 0.0
        if lacks == 0.0:
            self.planned += 1
            insort(self.fitting, Candidate(point, plan), key=lambda each: each.order)
            equal = groupby(self.fitting, key=lambda each: each.order[0])
            self.best = [next(group) for _, group in islice(equal, self.top)]
        return lacks


def _too_many(space: Space, what: str) -> UserError:
    return UserError(
        f"cluster.ranks={space.world}: a search of more than {what} takes too long; would work: fewer ranks, "
        "or fixed degrees such as parallelism.tp=8"
    )


Parts = Counter[Any]
"""Numbers of blocks by kind, of embeddings and of heads."""


class Estimates(Memo):
    """About the time of a step for many points of one job, from parts of the plan that many points share.

    A pipeline rank runs the passes of its stages once per microbatch. Before its first pass, the
    microbatch goes through the earlier stages. If backward is not split, the gradients go back
    through them after its last pass. FSDP's collectives slow down the computation that hides them.
    """

    def __init__(self, base: Job, machine: Machine) -> None:
        super().__init__()
        self._base = base
        self._machine = machine
        self._kinds = block_kinds(base.model)
        self._first = {kind: layer for layer, kind in reversed(list(enumerate(self._kinds)))}

    def seconds(self, point: LayoutPoint) -> float:
        layout = self.once(
            ("layout", point.placement), lambda: point.layout(self._base.parallelism)
        )
        loads_key = ("loads", *point[3:6], point.rows, point.mode, point.pp > 1)
        ranks_key = ("ranks", point.pp, point.schedule, point.layers_per_stage)

        def work() -> list[tuple[float, float, Parts]]:
            loads = self.once(loads_key, lambda: self._loads(point))
            returns = layout.pp > 1 and not layout.splits_backward
            found = []
            for own, earlier in self.once(ranks_key, lambda: self._ranks(layout)):
                busy = sum(count * sum(loads[part]) for part, count in own.items())
                idle = sum(
                    count * (loads[part][0] + returns * loads[part][1])
                    for part, count in earlier.items()
                )
                found.append((busy, idle, own))
            return found

        sharing = self.once(
            ("sharing", point.degrees, point.ep), lambda: self._sharing(point, layout)
        )
        sequences = self._base.global_batch_size // point.data_parallel
        microbatches = sequences // point.rows
        passes = sequences // point.local_batch_size
        longest = 0.0
        for busy, idle, own in self.once((*loads_key, *ranks_key), work):
            shared = sum(count * sharing.get(part, 0.0) for part, count in own.items())
            longest = max(longest, microbatches * busy + idle + passes * shared)
        return longest

    def _loads(self, point: LayoutPoint) -> dict[Any, tuple[float, float]]:
        """Seconds of one microbatch's forward and backward by part."""
        worker = Worker(point.job_unchecked(self._base), self._machine)
        loads: dict[Any, tuple[Pass, Pass]] = {
            "tok_embeddings": worker.table(),
            "output": worker.head(),
        }
        for kind, layer in self._first.items():
            block = worker.block(layer)
            loads[kind] = block.forward, block.recompute + block.inputs + block.weights
        return {part: (there.seconds, back.seconds) for part, (there, back) in loads.items()}

    def _sharing(self, point: LayoutPoint, layout: ParallelismConfig) -> dict[Any, float]:
        """Seconds that FSDP takes for a block of each kind in one pass over a local batch."""
        job = point.job_unchecked(self._base)
        contention = min(1.0, self._machine.contention)
        gathers = 1 + layout.reshards_after_forward
        sharing = {}
        for kind, layer in self._first.items():
            block = sharing_of_block(job, self._machine, layer)
            moving = gathers * sum(each.seconds for each in block.gather)
            moving += sum(each.seconds for each in block.reduce)
            sharing[kind] = contention * moving + gathers * block.copying
        return sharing

    def _ranks(self, layout: ParallelismConfig) -> list[tuple[Parts, Parts]]:
        """What each pipeline rank holds, and what is before its first stage."""
        n_layers = self._base.model.n_layers
        parts: dict[str, Any] = {f"layers.{layer}": kind for layer, kind in enumerate(self._kinds)}
        parts |= {"tok_embeddings": "tok_embeddings", "output": "output"}
        stages = []
        for names in split_modules(layout, n_layers):
            stages.append(Parts(parts[name] for name in names if name in parts))
        # The lists of modules do not name the block of multi-token prediction.
        stages[-1].update(self._kinds[n_layers:])
        ranks = []
        for rank in range(layout.pp):
            own = stages_of_rank(layout, n_layers, rank)
            held = sum((stages[stage] for stage in own), Parts())
            ranks.append((held, sum(stages[: own[0]], Parts())))
        return ranks
