"""Bands around the plan's figures, from the errors of experiments/published/held_out.csv.

Rows of one source share a cluster, a trainer and what is wrong in both, so every source counts once. A class
with fewer than ``FEWEST`` sources has the band of all rows, or the hull of that and its hardware's, if the
hardware has as many. ``coverage`` counts rows inside of bands that were made without the row's own source.
"""

import csv
import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from harness.tools.plan.plan import Resolution
from harness.util.words import plural

FOLDER = Path(__file__).parents[1] / "published"
FILE = FOLDER / "held_out.csv"
FEWEST = 4
LOW, HIGH = 0.1, 0.9


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
            Held(**{name: _value(name, text) for name, text in raw.items()})
            for raw in csv.DictReader(file)
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


def evidence(rows: Sequence[Held], kind: Kind) -> dict[str, tuple[float, float, str]]:
    """The band of every class with published rows, and which rows it comes from."""
    error, class_of = kind
    known = [row for row in rows if error(row) is not None]
    found = {}
    for name in sorted({class_of(row) for row in known}):
        own = [row for row in known if class_of(row) == name]
        sources = len({row.source for row in own})
        low, high = _band(known, name, kind)
        by = f"{plural(len(own), 'published row')} of {name} ({plural(sources, 'source')})"
        if sources < FEWEST:
            by = f"all published rows ({name} have {len(own)}, of {plural(sources, 'source')})"
        found[name] = (round(low, 2), round(high, 2), by)
    return found


def _band(known: Sequence[Held], name: str, kind: Kind) -> tuple[float, float]:
    """Published over planned, from ``LOW`` to ``HIGH``, for a class."""
    error, class_of = kind

    def of(rows: Sequence[Held]) -> tuple[float, float]:
        return predicted(
            [1 / (1 + (error(row) or 0.0)) for row in rows], [row.source for row in rows]
        )

    alike = (
        [row for row in known if class_of(row).endswith(end)]
        for end in (name, name.partition(" on ")[2])
    )
    own, hardware = (
        of(rows) if len({row.source for row in rows}) >= FEWEST else None for rows in alike
    )
    if own is not None:
        return own
    bands = [of(known), *([hardware] if hardware is not None else [])]
    return min(low for low, _ in bands), max(high for _, high in bands)


def predicted(ratios: Sequence[float], sources: Sequence[str]) -> tuple[float, float]:
    """Interval from ``LOW`` to ``HIGH`` for a row of one more source, by one-way random effects.

    Logarithms of the ratios are normal around their source's mean, and these means around another one. What
    is predicted differs from the mean of k means by their variance times 1 + 1 / k (Higgins, Thompson and
    Spiegelhalter, J. R. Stat. Soc. A 172, 2009), and by the variance of a source's rows, less what the means
    have of it (Thomas and Hultquist, Ann. Stat. 6, 1978). The degrees of freedom of the sum are those of
    Satterthwaite (Biometrics Bulletin 2, 1946).
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for ratio, source in zip(ratios, sources, strict=True):
        groups[source].append(math.log(ratio))
    count, means = len(groups), [statistics.fmean(own) for own in groups.values()]
    several = [own for own in groups.values() if len(own) > 1]
    left = 1 - statistics.fmean(1 / len(own) for own in groups.values())
    parts = [(statistics.variance(means) * (1 + 1 / count), count - 1)]
    parts += [(statistics.variance(own) * left / len(several), len(own) - 1) for own in several]
    variance = sum(part for part, _ in parts)
    degrees = variance**2 / sum(part**2 / freedom for part, freedom in parts)
    middle, reach = statistics.fmean(means), student(HIGH, degrees) * math.sqrt(variance)
    return math.exp(middle - reach), math.exp(middle + reach)


def student(share: float, degrees: float) -> float:
    """A quantile above the median of Student's t distribution, by Simpson's rule and bisection."""

    def density(angle: float) -> float:
        return math.cos(angle) ** (degrees - 1)  # of atan(t / sqrt(degrees)), but for a factor

    def integral(end: float, pieces: int = 64) -> float:
        step = end / pieces
        inside = sum((4 if i % 2 else 2) * density(i * step) for i in range(1, pieces))
        return (density(0.0) + inside + density(end)) * step / 3

    whole = (
        math.sqrt(math.pi) * math.exp(math.lgamma(degrees / 2) - math.lgamma((degrees + 1) / 2)) / 2
    )
    low, high = 0.0, math.pi / 2
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if integral(middle) < (2 * share - 1) * whole else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


@dataclass(frozen=True)
class Coverage:
    """Shares of rows inside of the bands that the other sources give."""

    rows: float
    """Of all rows."""
    sources: float
    """Mean of the sources' shares: every source counts once, as in the bands."""
    by_class: dict[str, float]


def coverage(rows: Sequence[Held], kind: Kind) -> Coverage:
    """Count the rows inside of the bands that the other sources give."""
    error, class_of = kind
    known = [row for row in rows if error(row) is not None]
    inside = []
    for row in known:
        low, high = _band(
            [other for other in known if other.source != row.source], class_of(row), kind
        )
        inside.append(low <= 1 / (1 + (error(row) or 0.0)) <= high)

    def shares(keys: Sequence[str]) -> dict[str, float]:
        pairs = list(zip(keys, inside, strict=True))
        return {
            name: statistics.fmean(hit for key, hit in pairs if key == name)
            for name in sorted(set(keys))
        }

    sources = shares([row.source for row in known])
    return Coverage(
        rows=statistics.fmean(inside),
        sources=statistics.fmean(sources.values()),
        by_class=shares([class_of(row) for row in known]),
    )


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


def quantile(values: Sequence[float], weights: Sequence[float], share: float) -> float:
    """Weighted quantile; between the middles of two values' weights it is interpolated."""
    total, below, points = sum(weights), 0.0, []
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
