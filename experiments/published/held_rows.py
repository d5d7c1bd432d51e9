"""Bands around the plan's figures, from the errors of held_out.csv.

Rows of one source share a cluster, a trainer and what is wrong in both, so every source counts once: a row
has the weight 1 / (rows of its source). A band of a class comes from the rows of that class if they have at
least ``FEWEST`` sources, else from the rows of all classes: a tenth of fewer sources lies inside of one. A
plan stands for one more source, which may be farther off than all of them: half of its weight, ``NEXT``, is
put below all rows and half above, so few sources have a wider band. ``coverage`` judges the rule: it counts
rows inside of bands that were made without the row's own source, and ``NEXT`` was chosen by it.
"""

from __future__ import annotations

import csv
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.plan.evidence import Evidence, Resolution

FILE = Path(__file__).with_name("held_out.csv")
FEWEST = 4
LOW, HIGH = 0.1, 0.9
NEXT = 0.5


@dataclass(frozen=True)
class Held:
    """A published row, and its plan with constants that were fitted without its source."""

    table: str
    source: str
    """Table that stands for all tables of this source."""
    of: str
    """Class of the job."""
    layout: str
    """The fields that a search would choose."""
    setting: str
    """Name of the other fields; rows of one setting are comparable."""
    doubt: str
    """Why the row is evidence neither for nor against the plan; empty for most rows."""
    inexpressible: str
    """Why no options of the harness have this job's memory; empty for most rows."""
    published: float | None
    """Tokens per second and GPU."""
    planned: float
    published_gib: float | None
    planned_gib: float

    @property
    def speed(self) -> float | None:
        """Error of the throughput, as a fraction."""
        return None if self.published is None else self.planned / self.published - 1

    @property
    def memory(self) -> float | None:
        """Error of the peak memory, as a fraction; None if it was not published or is not expressible."""
        if self.published_gib is None or self.inexpressible:
            return None
        return self.planned_gib / self.published_gib - 1

    @property
    def kind(self) -> str:
        """The class without its hardware; memory depends little on that."""
        return self.of.partition(" on ")[0]


def read(path: Path = FILE) -> list[Held]:
    """Return the rows of held_out.csv."""
    with path.open(newline="") as file:
        return [
            Held(**{name: _value(name, text) for name, text in raw.items()}) for raw in csv.DictReader(file)
        ]


def _value(name: str, text: str) -> Any:
    if name not in ("published", "planned", "published_gib", "planned_gib"):
        return text
    return float(text) if text else None


Kind = tuple[Callable[[Held], float | None], Callable[[Held], str]]
SPEED: Kind = (lambda row: row.speed, lambda row: row.of)
"""Error and class of throughput."""
MEMORY: Kind = (lambda row: row.memory, lambda row: row.kind)
"""Error and class of memory."""


def evidence(rows: Sequence[Held], kind: Kind) -> dict[str, Evidence]:
    """The band of every class with published rows."""
    error, class_of = kind
    known = [row for row in rows if error(row) is not None]
    found = {}
    for name in sorted({class_of(row) for row in known}):
        own = [row for row in known if class_of(row) == name]
        sources = len({row.source for row in own})
        low, high = _band(known, name, kind)
        found[name] = Evidence(len(own), sources, round(low, 2), round(high, 2), pooled=sources < FEWEST)
    return found


def _band(known: Sequence[Held], name: str, kind: Kind) -> tuple[float, float]:
    """Published over planned, from ``LOW`` to ``HIGH``, for a class."""
    error, class_of = kind
    own = [row for row in known if class_of(row) == name]
    rows = own if len({row.source for row in own}) >= FEWEST else known
    ratios = [1 / (1 + (error(row) or 0.0)) for row in rows]
    weights = _weights([row.source for row in rows])
    low, high = (quantile(ratios, weights, share, outside=NEXT) for share in (LOW, HIGH))
    return low, high


def coverage(rows: Sequence[Held], kind: Kind) -> tuple[float, dict[str, float]]:
    """Share of rows inside of the band that the other sources give: of all rows, and by class."""
    error, class_of = kind
    known = [row for row in rows if error(row) is not None]
    inside: dict[str, list[bool]] = defaultdict(list)
    for row in known:
        low, high = _band([other for other in known if other.source != row.source], class_of(row), kind)
        inside[class_of(row)].append(low <= 1 / (1 + (error(row) or 0.0)) <= high)
    by_class = {name: sum(own) / len(own) for name, own in sorted(inside.items())}
    return sum(map(sum, inside.values())) / len(known), by_class


def resolution(rows: Sequence[Held]) -> Resolution:
    """How far the plan's ratio of two layouts of one table is off, in four of five pairs."""
    found = pairs(rows)
    weights = _weights([table for table, _ in found])
    off = quantile([amount for _, amount in found], weights, 0.8)
    return Resolution(round(off, 3), len(found), len({table for table, _ in found}))


def pairs(rows: Sequence[Held]) -> list[tuple[str, float]]:
    """Pairs of layouts of one setting: their table, and the amount by which the plan's ratio of their
    throughputs is off."""
    return [
        (a.table, abs(math.expm1(math.log((a.planned / a.published) / (b.planned / b.published)))))
        for a, b in combinations(rows, 2)
        if a.published and b.published and (a.table, a.setting) == (b.table, b.setting)
        if a.layout != b.layout
    ]


def quantile(
    values: Sequence[float], weights: Sequence[float], share: float, *, outside: float = 0.0
) -> float:
    """Weighted quantile; between the middles of two values' weights it is interpolated. Half of the weight
    ``outside`` is below all values, and half above."""
    total, below, points = sum(weights) + outside, outside / 2, []
    for value, weight in sorted(zip(values, weights, strict=True)):
        points.append(((below + weight / 2) / total, value))
        below += weight
    for (start, first), (end, second) in pairwise(points):
        if share <= end:
            return first + (second - first) * max(0.0, share - start) / (end - start)
    return points[-1][1]


def _weights(groups: Sequence[str]) -> list[float]:
    """Weights with which every group counts once."""
    sizes = Counter(groups)
    return [1 / sizes[group] for group in groups]
