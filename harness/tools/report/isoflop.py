"""IsoFLOP parabolas: the best model size and tokens at each compute budget, and how they grow. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.tools.report.power_laws import REPLICATES, Estimate, interval

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

SAME = 1.1
"""Runs whose compute differs by less than this factor from the next one have one budget."""
LEAST_SIZES = 4
"""Different sizes that a budget needs: one more than a parabola has parameters."""
LEAST_BUDGETS = 3
MOST_LOST = 0.05
"""Largest fraction of bootstrap replicates without a minimum."""


@dataclass(frozen=True)
class Valley:
    """The parabola of a budget, in the logarithm of the variable (arXiv:2203.15556, approach 2).

    Attributes:
        flops: mean compute of its runs.
        variable: model size, or tokens, of each run.
        losses: loss of each run.
        curve: loss = curve[0] u**2 + curve[1] u + curve[2], with u = log(variable).
        best: the variable at the minimum; None: the data do not have one.
        why_not: the reason, in words.
    """

    flops: float
    variable: Array
    losses: Array
    curve: Array
    best: Estimate | None
    why_not: str = ""

    @property
    def lowest(self) -> float:
        """Loss at the minimum of the parabola."""
        return float(self.curve[2] - self.curve[1] ** 2 / (4 * self.curve[0]))


@dataclass(frozen=True)
class Growth:
    """``best = factor * C ** exponent`` over the budgets; None with a reason if it is not determined."""

    valleys: list[Valley]
    exponent: Estimate | None
    factor: float | None
    why_not: str = ""


def budgets(flops: Sequence[float]) -> list[list[int]]:
    """Group runs of equal compute; return their indices, smallest budget first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(flops)), key=lambda each: flops[each]):
        if groups and flops[index] <= SAME * flops[groups[-1][-1]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def growth(
    flops: Sequence[float],
    variable: Sequence[float],
    losses: Sequence[float],
    *,
    replicates: int = REPLICATES,
) -> Growth | None:
    """Fit a parabola to each budget with enough sizes, and a power law to their minima.

    Args:
        flops: compute of each run.
        variable: its model size, or its tokens.
        losses: its loss.
        replicates: number of bootstrap replicates, with normal noise of the residuals' variance.

    Returns:
        None if no budget has four different values of the variable.
    """
    import numpy as np

    groups = [np.array(group) for group in budgets(flops)]
    groups = [group for group in groups if _count_sizes(variable, group) >= LEAST_SIZES]
    if not groups:
        return None
    logs, targets = np.log(np.asarray(variable, float)), np.asarray(losses, float)
    curves = [np.polyfit(logs[group], targets[group], 2) for group in groups]
    left = [
        targets[group] - np.polyval(curve, logs[group]) for group, curve in zip(groups, curves, strict=True)
    ]
    # Relative noise is taken to be equal at all budgets.
    freedom = sum(len(group) - 3 for group in groups)
    squares = sum(float(((r / targets[g]) ** 2).sum()) for r, g in zip(left, groups, strict=True))
    random = np.random.default_rng(0)
    scatter = np.sqrt(squares / random.chisquare(freedom, replicates))
    minima, valleys = [], []
    for group, curve, residuals in zip(groups, curves, left, strict=True):
        fitted = targets[group] - residuals
        noise = scatter[:, None] * random.standard_normal((replicates, len(group)))
        drawn = np.polyfit(logs[group], (fitted * (1 + noise)).T, 2)
        minima.append(_minimum(drawn))
        budget = float(np.mean(np.asarray(flops)[group]))
        valleys.append(_valley(budget, np.exp(logs[group]), targets[group], curve, minima[-1]))
    return _grown(valleys, minima)


def _count_sizes(variable: Sequence[float], group: Array) -> int:
    """Count the different values of runs; those that round to the same per cent are one."""
    import numpy as np

    return len({round(100 * float(np.log(variable[int(index)]))) for index in group})


def _minimum(curves: Array) -> Array:
    """Return the logarithm at the minimum of each parabola; NaN if it opens downwards."""
    import numpy as np

    with np.errstate(divide="ignore", invalid="ignore"):
        return np.asarray(np.where(curves[0] > 0, -curves[1] / (2 * curves[0]), np.nan))


def _valley(flops: float, variable: Array, losses: Array, curve: Array, drawn: Array) -> Valley:
    import numpy as np

    at = float(np.exp(min(float(_minimum(curve)), 700.0))) if curve[0] > 0 else None
    lost = float(np.isnan(drawn).mean())
    if at is None:
        why = "the loss does not curve upwards"
    elif not variable.min() <= at <= variable.max():
        why = (
            f"the minimum is outside of the runs, at {'smaller' if at < variable.min() else 'larger'} values"
        )
    elif lost > MOST_LOST:
        why = f"noise hides the curvature: {lost:.0%} of the bootstrap replicates have no minimum"
    else:
        low, high = interval(np.exp(np.clip(drawn[~np.isnan(drawn)], -700, 700)))
        return Valley(flops, variable, losses, curve, Estimate(at, low, high))
    return Valley(flops, variable, losses, curve, None, why)


def _grown(valleys: list[Valley], minima: list[Array]) -> Growth:
    import numpy as np

    kept = [index for index, valley in enumerate(valleys) if valley.best is not None]
    if len(kept) < LEAST_BUDGETS:
        words = f"{len(kept)} of {len(valleys)} budgets have a minimum, and {LEAST_BUDGETS} are needed"
        return Growth(valleys, None, None, words)
    compute = np.log([valleys[index].flops for index in kept])
    best = np.log([each.value for index in kept if (each := valleys[index].best) is not None])
    slope, height = np.polyfit(compute, best, 1)
    drawn = np.stack([minima[index] for index in kept])
    slopes = np.polyfit(compute, drawn[:, ~np.isnan(drawn).any(axis=0)], 1)[0]
    return Growth(valleys, Estimate(float(slope), *interval(slopes)), float(np.exp(height)))
