"""Compare the loss curves of techniques with those of a control, paired by seed. Imports no torch.

A seed determines initial values and data order. So with the same seed, a technique and the control see the
same batches from the same start, and the noise of batches cancels in their difference. Seeds are independent
of each other; consecutive steps are not. Therefore every statistic is one value per seed, and is tested over
seeds.

* **Final loss**: relative difference of the mean loss of the last steps.
* **Learning speed**: by how much the technique runs ahead of the control. A technique that learns at
  ``1 + s`` times the control's speed has the loss ``L(t * (1 + s))`` at step ``t``, so its difference is
  close to ``s * t * L'(t)``. The value of a seed is the least-squares ``s`` over all steps, weighted by
  ``1 / t``, because curves that are the same up to rounding drift apart with time. It is most sensitive
  early in training, where the loss falls fast and the drift is small.
* **Departure**: size of the differences, whatever their sign, over that of a twin, which computes the
  control's numbers in another order: of losses or of gradient norms, whichever is larger. Norms show a
  constant factor on some gradients, which AdamW removes from the losses. It is a test for techniques with the
  control's numerics, which claim to differ from it by rounding only.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from harness.tools.study.techniques import ConvergeConfig

Losses = NDArray[np.float64]

EQUAL, WORSE, BETTER, DIFFERENT, UNDECIDED = "equal", "worse", "better", "different", "undecided"
SLOPE_WIDTH = 0.3
"""Width of the window for the slope of the control, as a difference of ``log(step)``."""
LEAST_DEPARTURE = 2.0**-24
"""Relative differences below this count as this: rounding a loss to float32 changes it by up to as much.
Without it, no technique with rounding of its own could equal a control whose twin has the same bits."""


@dataclass(frozen=True)
class Estimate:
    """Mean of independent values, one per seed, with its uncertainty by Student's t."""

    mean: float
    low: float
    """Lower end of the confidence interval of level ``1 - 2 * level``."""
    high: float
    values: tuple[float, ...]

    @classmethod
    def of(cls, values: Sequence[float], level: float) -> Estimate:
        """Estimate the mean; a single value has an infinite interval."""
        from scipy.special import stdtrit

        mean, half = statistics.fmean(values), math.inf
        if len(values) > 1:
            half = float(stdtrit(len(values) - 1, 1 - level)) * _error(values)
        return cls(mean, mean - half, mean + half, tuple(values))

    def p_of_zero(self) -> float:
        """Two-sided p-value of the hypothesis that the mean is 0."""
        return self._p(0.0, one_sided=False)

    def p_of_at_most(self, bound: float) -> float:
        """One-sided p-value of the hypothesis that the mean is at most ``bound``."""
        return self._p(bound, one_sided=True)

    def is_within(self, low: float, high: float) -> bool:
        """Whether the interval lies between ``low`` and ``high``.

        This is the equivalence test by two one-sided tests at ``level`` each (Schuirmann 1987, "A comparison
        of the two one-sided tests procedure and the power approach", J. Pharmacokinetics and Biopharm. 15).
        """
        return low <= self.low and self.high <= high

    def _p(self, mean: float, *, one_sided: bool) -> float:
        if len(self.values) < 2:
            return 1.0
        if len(set(self.values)) == 1:  # the t statistic is infinite, or 0 / 0
            is_other = self.mean > mean if one_sided else self.mean != mean
            return 0.0 if is_other else 1.0
        from scipy.special import stdtr

        t, freedom = (self.mean - mean) / _error(self.values), len(self.values) - 1
        return float(stdtr(freedom, -t) if one_sided else 2 * stdtr(freedom, -abs(t)))


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


@dataclass(frozen=True)
class Curves:
    """Losses of one technique, and gradient norms where they are known: by seed, each of shape [T].

    Args:
        steps: the steps at which losses were logged, ascending, shape [T].
        same_numerics: whether the technique claims to compute the control's numbers.
    """

    steps: NDArray[np.int64]
    losses: Mapping[int, Losses]
    same_numerics: bool = False
    norms: Mapping[int, Losses] = field(default_factory=dict)


@dataclass(frozen=True)
class TechniqueVerdict:
    """Result of comparing one technique with the control.

    Attributes:
        word: ``equal``, ``worse``, ``better``, ``different`` or ``undecided``.
        final: relative difference of the final loss; positive is worse.
        speed: relative difference of the learning speed; negative is worse.
        departure: decimal logarithm of the departure over the twin's; None if not tested.
        p: smallest p-value of these tests, adjusted for all tests of the report.
        reason: the statistic that decided.
    """

    word: str
    final: Estimate
    speed: Estimate
    departure: Estimate | None
    p: float
    reason: str


def judge(
    control: Curves, twin: Curves | None, techniques: Mapping[str, Curves], config: ConvergeConfig
) -> dict[str, TechniqueVerdict]:
    """Compare every technique with the control.

    The null hypothesis of each test is that the technique's mean statistic over all seeds is 0 (two-sided;
    departure: at most ``rounding_factor``, one-sided). A technique differs if a hypothesis is rejected at
    ``level``, with Holm's correction for all tests, and the estimate exceeds its bound.

    The null hypothesis of equality is that the mean of at least one statistic is outside its bounds. It is
    rejected if the confidence intervals of all statistics are within the bounds. As all must be, a technique
    that is not equal is called equal with probability ``level`` at most, however many statistics there are
    (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 24). There is no
    correction for the number of techniques.

    Otherwise the technique is undecided. So is one with the control's numerics if the twin has none of its
    seeds.

    Args:
        twin: curves of the control's numbers, computed in another order; None: test no departure.
        techniques: curves by name, each with at least one seed, all of them seeds of the control.
    """
    slope = slope_of(control.steps, np.mean(list(control.losses.values()), axis=0))
    measured = {
        name: _measure(control, slope, None if curves is twin else twin, curves, config)
        for name, curves in techniques.items()
    }
    tests = [(name, number) for name, own in measured.items() for number in range(len(own.p_values))]
    adjusted = holm([measured[name].p_values[number] for name, number in tests])
    p_values: dict[str, list[float]] = {name: [] for name in measured}
    for (name, _), p in zip(tests, adjusted, strict=True):
        p_values[name].append(p)
    return {name: _decide(own, p_values[name], config) for name, own in measured.items()}


@dataclass(frozen=True)
class _Measured:
    final: Estimate
    speed: Estimate
    departure: Estimate | None
    p_values: list[float]
    needs_twin: bool
    same_numerics: bool


def _measure(
    control: Curves, slope: Losses, twin: Curves | None, curves: Curves, config: ConvergeConfig
) -> _Measured:
    steps, pairs = control.steps, {seed: (own, control.losses[seed]) for seed, own in curves.losses.items()}
    ours, theirs = (final_losses(each, config.smooth_steps) for each in (curves, control))
    final = Estimate.of([loss / theirs[seed] - 1 for seed, loss in ours.items()], config.level)
    speed = Estimate.of([lead(steps, own - other, slope) for own, other in pairs.values()], config.level)
    departure, p_values, needs_twin = None, [final.p_of_zero(), speed.p_of_zero()], False
    if twin is not None and curves.same_numerics:
        ratios = [
            max(
                log_departure(steps, own[seed], other[seed], config.smooth_steps)
                - log_departure(steps, twins[seed], other[seed], config.smooth_steps)
                for own, twins, other in (
                    (curves.losses, twin.losses, control.losses),
                    (curves.norms, twin.norms, control.norms),
                )
                if seed in own and seed in twins and seed in other
            )
            for seed in pairs
            if seed in twin.losses
        ]
        if ratios:
            departure = Estimate.of(ratios, config.level)
            p_values.append(departure.p_of_at_most(math.log10(config.rounding_factor)))
        needs_twin = not ratios
    return _Measured(
        final, speed, departure, p_values, needs_twin=needs_twin, same_numerics=curves.same_numerics
    )


def _decide(measured: _Measured, p_values: list[float], config: ConvergeConfig) -> TechniqueVerdict:
    final, speed, departure = measured.final, measured.speed, measured.departure
    most = math.log10(config.rounding_factor)
    is_significant = [p < config.level for p in p_values]

    def verdict(word: str, reason: str) -> TechniqueVerdict:
        return TechniqueVerdict(word, final, speed, departure, min(p_values), reason)

    # A technique that claims the control's numbers and learns faster does not compute them.
    gain = DIFFERENT if measured.same_numerics else BETTER
    if is_significant[0] and abs(final.mean) > config.final_bound:
        return verdict(WORSE if final.mean > 0 else gain, "final loss")
    if is_significant[1] and abs(speed.mean) > config.speed_bound:
        return verdict(WORSE if speed.mean < 0 else gain, "learning speed")
    if departure is not None and is_significant[2]:
        return verdict(DIFFERENT, "departs farther than rounding")
    open_ends = [
        name
        for name, estimate, low, high in (
            ("final loss", final, -config.final_bound, config.final_bound),
            ("learning speed", speed, -config.speed_bound, config.speed_bound),
            ("departure", departure, -math.inf, most),
        )
        if estimate is not None and not estimate.is_within(low, high)
    ]
    if open_ends:
        reason = f"interval of {' and '.join(open_ends)} exceeds the bound; needs more seeds"
        return verdict(UNDECIDED, reason if len(final.values) > 1 else "one seed; needs more seeds")
    if measured.needs_twin:
        return verdict(UNDECIDED, "the twin has no curve of these seeds")
    small = {"final loss": is_significant[0], "learning speed": is_significant[1]}
    significant = [name for name, found in small.items() if found]
    return verdict(EQUAL, f"significant, below the bound: {' and '.join(significant)}" if significant else "")


def final_losses(curves: Curves, smooth_steps: int) -> dict[int, float]:
    """Return the mean loss of the last ``smooth_steps`` steps, by seed."""
    last = curves.steps > curves.steps[-1] - smooth_steps
    return {seed: float(losses[last].mean()) for seed, losses in curves.losses.items()}


def slope_of(steps: NDArray[np.int64], losses: Losses) -> Losses:
    """Slope of a loss against ``log(step)``, by local linear regression with Gaussian weights.

    Source: Cleveland 1979, "Robust locally weighted regression and smoothing scatterplots", JASA 74 (without
    its robust iterations).
    """
    x = np.log(steps.astype(np.float64))
    slope = np.empty_like(x)
    for index, here in enumerate(x):
        weights = np.exp(-0.5 * ((x - here) / SLOPE_WIDTH) ** 2)
        weights /= weights.sum()
        apart = x - weights @ x
        slope[index] = (weights * apart) @ losses / ((weights * apart) @ apart)
    return slope


def lead(steps: NDArray[np.int64], difference: Losses, slope: Losses) -> float:
    """Least-squares ``s`` in ``difference = s * slope``, with steps weighted by ``1 / step``."""
    weighted = slope / steps
    return float(weighted @ difference / (weighted @ slope))


def log_departure(steps: NDArray[np.int64], ours: Losses, theirs: Losses, block_steps: int) -> float:
    """Mean over blocks of the decimal logarithm of the root mean square of relative differences.

    Rounding differences grow by the same factor from block to block, whatever their origin. So the mean of
    logarithms compares their origins, while a mean of squares would see the last block only.
    """
    squares, blocks = (ours / theirs - 1) ** 2, (steps - 1) // block_steps
    found = [max(math.sqrt(squares[blocks == block].mean()), LEAST_DEPARTURE) for block in np.unique(blocks)]
    return float(np.mean(np.log10(found)))
