"""Student's t-test on a few values, and Holm's correction for several tests.

Standard library only: scipy, which has the t distribution, is no dependency. Tested against published tables.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


def t_within(t: float, freedom: int) -> float:
    """Probability that Student's t lies within ``-t`` and ``t``.

    Args:
        t: at least 0.
        freedom: degrees of freedom, an integer.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(t, math.sqrt(freedom))
    odd = freedom % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0
    for number in range(2 + odd, freedom + 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (number - 1) / number
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def t_quantile(probability: float, freedom: int) -> float:
    """Value that Student's t exceeds with probability ``1 - probability``; ``probability`` is above 0.5."""
    low, high = 0.0, 1.0
    while 0.5 + t_within(high, freedom) / 2 < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        if 0.5 + t_within(middle, freedom) / 2 < probability:
            low = middle
        else:
            high = middle
    return high


@dataclass(frozen=True)
class Estimate:
    """Mean of independent values, one per seed, with its uncertainty."""

    mean: float
    low: float
    """Lower end of the confidence interval of level ``1 - 2 * level``."""
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], level: float) -> Estimate:
        """Estimate the mean by Student's t; a single value has an infinite interval."""
        mean, half = statistics.fmean(values), math.inf
        if len(values) > 1:
            half = t_quantile(1 - level, len(values) - 1) * _error(values)
        return cls(mean, mean - half, mean + half, tuple(values))

    def p_of_zero(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is 0."""
        return self._p(abs(self.mean), two_sided=True)

    def p_of_at_most(self, bound: float) -> float:
        """One-sided p-value of the hypothesis that the mean is at most ``bound``."""
        return self._p(self.mean - bound, two_sided=False)

    def is_within(self, low: float, high: float) -> bool:
        """Whether the interval lies between ``low`` and ``high``.

        This is the equivalence test by two one-sided tests at ``level`` each (Schuirmann 1987, "A comparison
        of the two one-sided tests procedure and the power approach", J. Pharmacokinetics and Biopharm. 15).
        """
        return low <= self.low and self.high <= high

    def _p(self, distance: float, *, two_sided: bool) -> float:
        if len(self.values) < 2:
            return 1.0
        error = _error(self.values)
        t = distance / error if error else math.copysign(math.inf, distance) if distance else 0.0
        outside = 1 - t_within(abs(t), len(self.values) - 1)
        if two_sided:
            return outside
        return outside / 2 if t > 0 else 1 - outside / 2


def _error(values: Sequence[float]) -> float:
    """Standard error of the mean."""
    return statistics.stdev(values) / math.sqrt(len(values))


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values for their number, so that any false rejection has at most the level's probability.

    Source: Holm 1979, "A simple sequentially rejective multiple test procedure", Scand. J. Statistics 6.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=p_values.__getitem__)):
        largest = max(largest, (len(p_values) - rank) * p_values[index])
        adjusted[index] = min(1.0, largest)
    return adjusted
