"""Search the fastest layouts of a job: each legal point that fits is ranked, or proved to be slower.

Points that cannot fit are excluded. The others are fully planned in the order of their lower
bound on time (``prune.py``), until no remaining point can be among the best.
"""

from __future__ import annotations

import time
from bisect import insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from harness.tools.plan.constants import Calibration
from harness.tools.plan.legality import Legality
from harness.tools.plan.machine import device_of, machine_of
from harness.tools.plan.make import plan_memory, with_speed
from harness.tools.plan.plan import PARTS, Plan
from harness.tools.plan.prune import MemoryBounds, TimeBounds
from harness.tools.plan.render import mesh_of
from harness.tools.plan.space import MODES, Point, Space
from harness.util.errors import ConfigError, UserError
from harness.util.hardware import ACCELERATORS
from harness.util.tables import gib

MOST_LAYOUTS, MOST_POINTS = 20_000, 1_000_000
"""Limits of a search: a few minutes."""


@dataclass(frozen=True)
class Candidate:
    """A point that is legal and fits, with its plan."""

    point: Point
    plan: Plan

    @property
    def seconds(self) -> float:
        """Predicted time of a step."""
        assert self.plan.speed is not None, "a search knows its hardware"
        return self.plan.speed.step_seconds

    @property
    def parts(self) -> dict[str, float]:
        """Parts of that time."""
        assert self.plan.speed is not None, "a search knows its hardware"
        return self.plan.speed.parts

    @property
    def order(self) -> tuple[float, int, float]:
        """Sort key: time, then number of axes, then memory."""
        return rounded(self.seconds), self.point.axes, self.plan.peak


@dataclass
class Rejected:
    """Why points are not among the best; the counts add up to all other points."""

    illegal: Counter[str] = field(default_factory=Counter)
    """Illegal points by the field whose rule they break."""
    rules: dict[str, ConfigError] = field(default_factory=dict)
    """One broken rule of each field."""
    too_large: int = 0
    """Number of points that do not fit."""
    closest: tuple[float, Point] | None = None
    """The point closest to fitting, and a lower bound on its shortfall in bytes."""
    tied: int = 0
    """Number of points as fast as one of the best, with more axes or more memory."""
    slower: Counter[str] = field(default_factory=Counter)
    """Slower points, by the part of the step in which they lose most to the best."""

    def add_illegal(self, error: ConfigError) -> None:
        """Count a point that breaks a rule."""
        self.illegal[error.field] += 1
        self.rules.setdefault(error.field, error)

    def add_too_large(self, shortfall: float, point: Point) -> None:
        """Count a point whose shortfall is at least ``shortfall`` bytes."""
        self.too_large += 1
        if self.closest is None or shortfall < self.closest[0]:
            self.closest = shortfall, point


@dataclass(frozen=True)
class SearchResult:
    """Result of a search."""

    space: Space
    best: list[Candidate]
    """The fastest, first."""
    rejected: Rejected
    points: int
    """Number of all points."""
    layouts: int
    """Number of all meshes."""
    planned: int
    """Number of points that were fully planned; the bound was enough for the others."""
    seconds: float
    """Duration of the search."""


class NothingFits(UserError):
    """No legal point fits."""

    def __init__(self, space: Space, rejected: Rejected) -> None:
        assert rejected.closest is not None, "a point that does not fit has a shortfall"
        self.space, self.rejected = space, rejected
        shortfall, self.closest = rejected.closest
        layout = mesh_of(self.closest.layout(space.base.parallelism))
        super().__init__(
            f"none of the {rejected.too_large:,} legal ways to run {space.world} ranks fits; the closest is "
            f"at least {gib(shortfall)} GiB too large on its fullest rank ({layout}, {self.closest.mode})"
        )


def rounded(seconds: float) -> float:
    """Round to three digits: the plan cannot tell smaller differences."""
    return float(f"{seconds:.3g}")


def search(
    space: Space, top: int, calibration: Calibration | None = None, headroom: float = 0.0
) -> SearchResult:
    """Find the ``top`` fastest points of a space, with default constants or a calibration.

    A point fits if it leaves ``headroom`` of the usable memory, a fraction.

    Raises:
        UserError: no point is legal, none fits, or the hardware is unknown.
    """
    began = time.perf_counter()
    rejected, layouts = Rejected(), list(islice(space.layouts(), MOST_LAYOUTS + 1))
    if not layouts:
        raise _no_layout(space)
    if len(layouts) > MOST_LAYOUTS:
        raise _too_many(space, f"{MOST_LAYOUTS:,} layouts")
    legality = Legality(space.base)
    legal: list[Point] = []
    for degrees, ep in layouts:
        for point in space.points(degrees, ep):
            if len(legal) == MOST_POINTS:
                raise _too_many(space, f"{MOST_POINTS:,} ways to run {space.world} ranks")
            error = legality.broken(point)
            if error is None:
                legal.append(point)
            else:
                rejected.add_illegal(error)
    points = len(legal) + sum(rejected.illegal.values())
    if not legal:
        raise _none_is_legal(space, rejected)
    ranking = Ranking(space, legal, top, rejected, calibration, headroom)
    ranking.run()
    if not ranking.best:
        raise NothingFits(space, rejected) if rejected.closest else _none_is_legal(space, rejected)
    return SearchResult(
        space, ranking.best, rejected, points, len(layouts), ranking.planned, time.perf_counter() - began
    )


class Ranking:
    """Ranks legal points."""

    def __init__(
        self,
        space: Space,
        points: Sequence[Point],
        top: int,
        rejected: Rejected,
        calibration: Calibration | None,
        headroom: float,
    ) -> None:
        self.headroom = headroom
        self.base, self.top, self.rejected, self.calibration = space.base, top, rejected, calibration
        self.best: list[Candidate] = []
        self.planned = 0
        device, machine = (
            device_of(space.base, calibration),
            machine_of(points[0].job(space.base), calibration),
        )
        if device is None:
            rule = "a search ranks by speed, and the hardware of these ranks is unknown"
            value = space.base.cluster.accelerator
            raise ConfigError("cluster.accelerator", value, rule, ACCELERATORS)
        if machine is None:
            rule = "a search ranks by speed, and the network between these nodes is unknown"
            raise ConfigError("cluster.network_gbps", None, rule, "400, Gbit/s for each device")
        self._memory_bounds, self._time_bounds = (
            MemoryBounds(space.base, device, headroom),
            TimeBounds(space.base, machine, space.world),
        )
        may_fit = []
        for point in points:
            shortfall = self._memory_bounds.persistent_shortfall(point)
            if shortfall:
                rejected.add_too_large(shortfall, point)
            else:
                may_fit.append(point)
        bounded = [(self._time_bounds.seconds(point), point) for point in may_fit]
        self._bounded = sorted(bounded, key=lambda pair: pair[0])
        self._too_large: dict[tuple[object, ...], list[tuple[int, int, float]]] = {}
        self._dropped: list[Point | Candidate] = []

    def run(self) -> None:
        """Plan the points that may be among the best."""
        for seconds, point in self._bounded:
            # Lower bound on its sort key.
            least = rounded(seconds), point.axes
            if len(self.best) == self.top and least > self.best[-1].order[:2]:
                self._dropped.append(point)
            else:
                self._try(point)
        self._count_slower()

    def _try(self, point: Point) -> None:
        if self._is_known_to_lack(point):
            return
        shortfall = self._memory_bounds.shortfall(point)
        if shortfall:
            self._note_too_large(point, shortfall)
            return
        try:
            job = point.job(self.base)
        except ConfigError as error:
            self.rejected.add_illegal(error)
            return
        plan = plan_memory(job, self.calibration)
        self.planned += 1
        usable = None if plan.memory_limit is None else (1 - self.headroom) * plan.memory_limit
        if usable is not None and plan.peak > usable:
            self._note_too_large(point, plan.peak - usable)
            return
        self._insert(Candidate(point, with_speed(plan, self.calibration)))

    def _insert(self, new: Candidate) -> None:
        """Keep a candidate if it is among the best; among equally fast ones only the simplest."""
        tied = next((each for each in self.best if each.order[0] == new.order[0]), None)
        if tied is not None:
            self.rejected.tied += 1
            if tied.order <= new.order:
                return
            self.best.remove(tied)
        insort(self.best, new, key=lambda candidate: candidate.order)
        if len(self.best) > self.top:
            self._dropped.append(self.best.pop())

    # With all else equal, larger microbatches and less recomputation never take less memory.

    def _is_known_to_lack(self, point: Point) -> bool:
        """Whether a point takes at least as much memory as one that did not fit; if so, count it."""
        for size, kept, shortfall in self._too_large.get(_group(point), ()):
            if size <= point.rows and kept <= _kept(point):
                self.rejected.add_too_large(shortfall, point)
                return True
        return False

    def _note_too_large(self, point: Point, shortfall: float) -> None:
        self._too_large.setdefault(_group(point), []).append((point.rows, _kept(point), shortfall))
        self.rejected.add_too_large(shortfall, point)

    def _count_slower(self) -> None:
        """Count slower points by the part of the step in which they lose most to the best."""
        if not self.best:
            return
        fastest = self.best[0]
        bound = self._time_bounds.parts(fastest.point)
        for each in self._dropped:
            if isinstance(each, Candidate):
                parts, others = each.parts, fastest.parts
            else:
                parts, others = self._time_bounds.parts(each), bound
            worst = max(PARTS, key=lambda part: parts.get(part, 0.0) - others.get(part, 0.0))
            self.rejected.slower[worst] += 1


def _group(point: Point) -> tuple[object, ...]:
    """Fields shared by points that differ only in microbatch size and recomputation."""
    return point.degrees, point.ep, point.schedule, point.layers_per_stage


def _kept(point: Point) -> int:
    """Order of an activation checkpointing mode: a higher value saves more activations."""
    return -MODES.index(point.mode) if point.mode in MODES else 0


def _no_layout(space: Space) -> UserError:
    axes = ", ".join(sorted(field for field in space.typed if field.startswith("parallelism.")))
    return UserError(
        f"no layout has {space.world} ranks with the fields on the command line ({axes}); "
        "would work: fewer of these fields, or other values"
    )


def _too_many(space: Space, what: str) -> UserError:
    return UserError(
        f"cluster.ranks={space.world}: a search of more than {what} takes too long; would work: fewer ranks, "
        f"or fixed degrees such as parallelism.tp=8"
    )


def _none_is_legal(space: Space, rejected: Rejected) -> UserError:
    field, count = rejected.illegal.most_common(1)[0]
    points = sum(rejected.illegal.values())
    return UserError(
        f"none of the {points:,} ways to run {space.world} ranks is legal, for most of them ({count:,}): "
        f"{rejected.rules[field]}"
    )
