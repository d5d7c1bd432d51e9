"""Compare results: errors, rank correlation, and the effect of one change. No torch."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from typing import Any

from harness.tools.report.published import ASKED, Recipe

Row = dict[str, Any]
_FIELDS = tuple(Recipe.__dataclass_fields__)


def delta(value: float | None, reference: float | None) -> float | None:
    """Return ``value / reference - 1``; None if either is unknown or the reference is 0."""
    return None if value is None or not reference else value / reference - 1


@dataclass(frozen=True)
class Errors:
    """Summary of relative errors, without their signs, as fractions."""

    count: int
    median: float
    worst: float


def errors_of(rows: Sequence[Row], key: str) -> Errors | None:
    """Summarize the errors under ``key``; None if no row has one."""
    values = [abs(row[key]) for row in rows if row.get(key) is not None]
    if not values:
        return None
    return Errors(len(values), statistics.median(values), max(values))


def spearman(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Spearman's rank correlation, mean ranks for ties; None below 3 pairs or without variation."""
    if len(pairs) < 3:
        return None
    left, right = (_ranks([pair[side] for pair in pairs]) for side in (0, 1))
    middle = (len(pairs) + 1) / 2
    products = sum((a - middle) * (b - middle) for a, b in zip(left, right, strict=True))
    spread = sqrt(sum((a - middle) ** 2 for a in left) * sum((b - middle) ** 2 for b in right))
    return products / spread if spread else None


def _ranks(values: Sequence[float]) -> list[float]:
    return [1 + sum(other < value for other in values) + (values.count(value) - 1) / 2 for value in values]


@dataclass(frozen=True)
class Effect:
    """Effect of one change on throughput, published and predicted."""

    what: str
    """``compile``, ``float8``, ``async TP`` or ``schedule``."""
    words: str
    """The change of a schedule, ``1F1B to ZBV``; empty for other changes."""
    published: float
    """Gain as a fraction."""
    predicted: float | None

    @property
    def is_right(self) -> bool | None:
        """Whether the prediction has the same sign; None without a prediction."""
        return None if self.predicted is None else (self.predicted > 0) == (self.published > 0)


def effects(rows: Sequence[tuple[Recipe, Row]]) -> list[Effect]:
    """Return the effect for every pair of rows that differ in one field only, if it is in ``ASKED``."""
    found = []
    for (before, first), (after, second) in combinations(rows, 2):
        changed = [name for name in _FIELDS if getattr(before, name) != getattr(after, name)]
        if len(changed) == 1 and changed[0] in ASKED:
            [name] = changed
            rate = "tokens_per_second_per_rank"
            gains = [
                delta(second.get(f"{kind}.{rate}"), first.get(f"{kind}.{rate}"))
                for kind in ("published", "predicted")
            ]
            assert gains[0] is not None, "published rows have a throughput"
            words = f"{getattr(before, name)} to {getattr(after, name)}" if name == "schedule" else ""
            found.append(Effect(ASKED[name], words, gains[0], gains[1]))
    return found
