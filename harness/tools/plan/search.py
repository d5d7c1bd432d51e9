"""Search the fastest layouts of a job: estimate the time of every legal point, and plan the fastest.

An estimate adds up parts of the plan that many points share. Points are planned in the order of
their estimates until none of the others is estimated to be among the best: a hundred of a hundred
thousand.
"""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby, islice
from operator import itemgetter
from typing import Any, NamedTuple

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import split_modules, stages_of_rank
from harness.metrics.console import progress
from harness.model.architecture import block_kinds
from harness.tools.plan.block_cost import Worker
from harness.tools.plan.collectives import Pass, sharing_of_block
from harness.tools.plan.constants import DEFAULTS, Calibration
from harness.tools.plan.evidence import RESOLUTION
from harness.tools.plan.machine import Machine, device_of, machine_of
from harness.tools.plan.make import make_plan
from harness.tools.plan.memory import memory_limit, ranks_in_turn
from harness.tools.plan.parameters import BYTES, Memo, groups_of, parameters_of
from harness.tools.plan.plan import Plan, RankMemory
from harness.tools.plan.space import Key, LayoutPoint, Space
from harness.util.errors import ConfigError, UserError
from harness.util.hardware import ACCELERATORS
from harness.util.words import gib, plural

MOST_LAYOUTS = 20_000
MOST_POINTS = 1_000_000
"""Limits of a search: a few minutes."""


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


class Shortfall(NamedTuple):
    """A point that does not fit."""

    is_bound: bool
    """Whether only the least memory of the point is known."""
    bytes: float
    """What its first rank that does not fit lacks, at least."""
    point: LayoutPoint


def rounded(seconds: float) -> float:
    """Round to three digits: the plan cannot tell smaller differences."""
    return float(f"{seconds:.3g}")


def search(
    space: Space, top: int, calibration: Calibration = DEFAULTS, headroom: float = 0.0
) -> Search:
    """Find the ``top`` fastest points of a space that leave ``headroom``, a fraction of the usable memory.

    Raises:
        UserError: no point is legal, none fits, or the hardware is unknown.
    """
    began = time.perf_counter()
    found = Search(space, top, calibration, headroom)
    if legal := found.legal_groups():
        found.rank(legal)
    if not found.best and found.closest:
        closest = found.closest
        raise UserError(
            f"none of {plural(found.too_large, 'legal way')} to run {space.world} ranks fits; the closest is "
            f"at least {gib(closest.bytes)} GiB too large on its fullest rank; would work: more ranks, or "
            f"what harness plan says to {' '.join(closest.point.overrides(space.base.parallelism))}"
        )
    if not found.best:
        [(name, count)] = found.illegal.most_common(1)
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
    calibration: Calibration = DEFAULTS
    headroom: float = 0.0
    fitting: list[Candidate] = field(default_factory=list)
    """All that were planned and fit, the fastest first."""
    best: list[Candidate] = field(default_factory=list)
    """The ``top`` fastest; of equal ones the simplest."""
    layouts: int = 0
    """Number of all meshes."""
    points: int = 0
    """Number of all points: the best, the slower ones, and those that the following count."""
    illegal: Counter[str] = field(default_factory=Counter)
    """Illegal points by the field whose rule they break."""
    rules: dict[str, ConfigError] = field(default_factory=dict)
    """One broken rule of each field."""
    too_large: int = 0
    """Number of points that do not fit."""
    seconds: float = 0.0
    """Duration of the search."""
    _short: dict[Key, list[Shortfall]] = field(default_factory=dict)
    """Points that do not fit, by family."""

    @property
    def error(self) -> float | None:
        """The plan does not order layouts whose times differ by less; None if nothing is published."""
        return None if self.best[0].plan.is_calibrated else RESOLUTION.off

    @property
    def most(self) -> float:
        """Longest step within the error of the first."""
        return (1 + (self.error or 0.0)) * self.best[0].seconds

    @property
    def simplest(self) -> Candidate:
        """The simplest within the error of the first, and of equally simple ones the fastest."""
        alike = [candidate for candidate in self.fitting if candidate.seconds <= self.most]
        return min(alike, key=lambda candidate: candidate.order[1])

    @property
    def fastest(self) -> dict[str, Candidate]:
        """The fastest layout of each kind of data parallelism."""
        fastest: dict[str, Candidate] = {}
        for candidate in self.fitting:
            if kind := candidate.point.data_parallelism:
                fastest.setdefault(kind, candidate)
        return fastest

    @property
    def shown(self) -> dict[str, Candidate]:
        """The best by number; then by name the fastest of each kind and the simplest, if not among them."""
        shown = {f"{number}": candidate for number, candidate in enumerate(self.best, start=1)}
        for name, candidate in (*sorted(self.fastest.items()), ("simplest", self.simplest)):
            if candidate not in shown.values():
                shown[name] = candidate
        return shown

    @property
    def slower(self) -> int:
        """Number of points that are slower, by their plan or estimate, or as fast and less simple."""
        return self.points - len(self.best) - self.too_large - self.illegal.total()

    @property
    def closest(self) -> Shortfall | None:
        """The point closest to fitting."""
        shortfalls = chain.from_iterable(self._short.values())
        return min(shortfalls, key=lambda shortfall: shortfall[:2], default=None)

    def legal_groups(self) -> list[list[LayoutPoint]]:
        """Return the points of the meshes and schedules that are legal; count the others."""
        space = self.space
        layouts = list(islice(space.layouts(), MOST_LAYOUTS + 1))
        if len(layouts) > MOST_LAYOUTS:
            raise self._too_many(f"{MOST_LAYOUTS:,} layouts")
        if not layouts:
            axes = ", ".join(
                sorted(name for name in space.typed if name.startswith("parallelism."))
            )
            raise UserError(
                f"no layout has {plural(space.world, 'rank')} with the fields on the command line ({axes}); "
                "would work: fewer of these fields, or other values"
            )
        self.layouts = len(layouts)
        groups = []
        legal = 0
        for layout in layouts:
            for group in space.groups(*layout):
                self.points += len(group)
                if error := self._broken(group):
                    self._count_illegal(error, len(group))
                else:
                    groups.append(group)
                    legal += len(group)
            if legal > MOST_POINTS:
                raise self._too_many(f"{MOST_POINTS:,} ways to run {plural(space.world, 'rank')}")
        return groups

    def _too_many(self, what: str) -> UserError:
        return UserError(
            f"cluster.ranks={self.space.world}: a search of more than {what} takes too long; would work: "
            "fewer ranks, or fixed degrees such as parallelism.tp=8"
        )

    def _broken(self, group: Sequence[LayoutPoint]) -> ConfigError | None:
        """The rule that a mesh and schedule breaks with passes of every size; None if one size is legal."""
        first: ConfigError | None = None
        passes: dict[tuple[int, int], LayoutPoint] = {}
        for point in group:
            passes.setdefault((point.local_batch_size, point.microbatch_size), point)
        for point in passes.values():
            try:
                point.job(self.space.base)
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
        estimates = Estimates(base, machine)
        points = list(self._with_methods(groups, estimates))
        least: dict[Key, LayoutPoint] = {}
        for point in points:
            least.setdefault(point.family, point)
        with progress(2, seconds=10.0) as begin:
            begin(f"estimates of {plural(self.points, 'way')}")
            estimated = [(rounded(estimates.seconds(point)), point) for point in points]
            estimated.sort(key=itemgetter(0))
            begin("plans of the fastest")
            for seconds, point in estimated:
                if self._may_matter(seconds, point):
                    self._plan(point, least[point.family])

    def _with_methods(
        self, groups: Sequence[Sequence[LayoutPoint]], estimates: Estimates
    ) -> Iterator[LayoutPoint]:
        """Yield the points with the methods of context parallel that may be the fastest.

        Gathered keys take memory: besides them a point has the fastest of the other methods.
        """
        found: dict[Key, list[str | None]] = {}
        for group in groups:
            point = group[-1]
            split = point.cp, point.tp
            if split not in found:
                found[split] = self._methods(point, estimates)
            self.points += len(group) * (len(found[split]) - 1)
            for method in found[split]:
                for point in group:
                    yield point._replace(method=method)

    def _methods(self, point: LayoutPoint, estimates: Estimates) -> list[str | None]:
        if point.cp == 1:
            return [None]
        seconds = {}
        for method in self.space.methods(point):
            seconds[method] = estimates.seconds(point._replace(method=method))
        first, *others = sorted(seconds, key=seconds.__getitem__)
        if first == "gather" and others:
            # The plan cannot tell smaller differences.
            is_faster = (1 + RESOLUTION.off) * seconds[first] < seconds[others[0]]
            return [others[0], first] if is_faster else [others[0]]
        return [first]

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

    def _plan(self, point: LayoutPoint, least: LayoutPoint) -> None:
        """Plan a point, and keep it if it fits. ``least`` takes the least memory of its family."""
        if point.family not in self._short:
            self._short[point.family] = []
            if not self._may_hold(least):
                self.too_large += 1
                return
            # Its first rank is enough: of a family that fits, all ranks would be computed for nothing.
            # The smallest passes may be illegal: then other points say what fits.
            with suppress(ConfigError):
                self._ranks_that_fit(least, least.job(self.space.base), ranks=1)
        for _, _, known in self._short[point.family]:
            if known.rows <= point.rows and known.saved <= point.saved:
                self.too_large += 1
                return
        try:
            job = point.job(self.space.base)
            ranks = self._ranks_that_fit(point, job)
            if ranks is None:
                self.too_large += 1
                return
            plan = make_plan(job, self.calibration, ranks)
        except ConfigError as error:
            self._count_illegal(error)
            return
        insort(self.fitting, Candidate(point, plan), key=lambda candidate: candidate.order)
        equal = groupby(self.fitting, key=lambda candidate: candidate.order[0])
        self.best = [next(group) for _, group in islice(equal, self.top)]

    def _usable(self, job: Job) -> float:
        limit = memory_limit(job, device_of(job))
        return math.inf if limit is None else (1 - self.headroom) * limit

    def _may_hold(self, point: LayoutPoint) -> bool:
        """Whether the first rank has room for parameters, gradients and optimizer state, without passes."""
        job = point.job_unchecked(self.space.base)
        if job.parallelism.cpu_offload:
            return True
        held = parameters_of(job, 0)
        size = 2 * held.parameter_bytes + held.optimizer_bytes  # gradients are as large
        if point.pp > 1 and job.fsdp_ranks > 1:
            # A pipeline sums up unsharded gradients.
            parameters = chain.from_iterable(groups_of(held.held_modules).values())
            unsharded = sum(tensor.gathered_elements for tensor in parameters)
            size += unsharded * BYTES[job.precision.reduce_dtype]
        lacks = size - self._usable(job)
        if lacks > 0:
            self._short[point.family].append(Shortfall(True, lacks, point))
        return lacks <= 0

    def _ranks_that_fit(
        self, point: LayoutPoint, job: Job, ranks: int | None = None
    ) -> list[RankMemory] | None:
        """The memory of a point's pipeline ranks, or of the first ``ranks``; None if one does not fit."""
        usable = self._usable(job)
        memories = []
        for memory in islice(ranks_in_turn(job, self.calibration.software), ranks):
            if memory.peak > usable:
                shortfall = Shortfall(False, memory.peak - usable, point)
                self._short[point.family].append(shortfall)
                return None
            memories.append(memory)
        return memories


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
        loads_key = ("loads", *point[3:6], point.rows, point.mode, point.pp > 1, point.method)
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
        size = point.data_parallel * point.local_batch_size
        passes = -(-self._base.global_batch_size // size)
        microbatches = passes * point.local_batch_size // point.rows
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
