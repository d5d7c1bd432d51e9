"""Compare the loss curves of techniques with those of a control, paired by seed. Imports no torch.

A seed determines initial values and data order. So with the same seed, a technique and the control
see the same batches from the same start, and the noise of batches cancels in their difference.
Seeds are independent of each other; consecutive steps are not. Therefore every measure has one
value per seed, and one interval over seeds.

* **Final loss**: relative difference of the mean loss of the last steps.
* **Learning speed**: by how much the technique runs ahead of the control. A technique that learns
  at ``1 + s`` times the control's speed has the loss ``L(t * (1 + s))`` at step ``t``, so its
  difference is close to ``s * t * L'(t)``. The value of a seed is the least-squares ``s`` over all
  steps, weighted by ``1 / t``, because curves that are the same up to rounding drift apart with
  time. It is most sensitive early in training, where the loss falls fast and the drift is small.
* **Gradient norm**: mean relative difference, weighted by ``1 / t`` too. It shows a constant factor
  on gradients, which AdamW removes from the losses. Only for techniques that claim the control's
  numerics.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.tools.study.techniques import ConvergeConfig

Losses = NDArray[np.float64]

EQUAL = "equal"
WORSE = "worse"
BETTER = "better"
DIFFERENT = "different"
UNDECIDED = "undecided"
FINAL = "final loss"
SPEED = "learning speed"
NORM = "gradient norm"
SLOPE_WIDTH = 0.3
"""Width of the window for the slope of the control, as a difference of ``log(step)``."""


@dataclass(frozen=True)
class Curves:
    """Losses of one technique, and gradient norms where they are known: by seed, each of shape [T].

    Args:
        steps: the steps at which losses were logged, ascending, shape [T].
    """

    steps: NDArray[np.int64]
    losses: dict[int, Losses] = field(default_factory=dict)
    norms: dict[int, Losses] = field(default_factory=dict)

    @cached_property
    def slope(self) -> Losses:
        """Slope of the mean curve against ``log(step)``."""
        return slope_of(self.steps, np.mean(list(self.losses.values()), axis=0))


class Estimate(NamedTuple):
    """Mean of values, one per seed, and the ends of its interval of level ``1 - 2 * level``."""

    values: Sequence[float]
    mean: float
    low: float
    high: float

    def is_inside(self, bound: float) -> bool:
        """Whether the whole interval is within the bound.

        This is the equivalence test by two one-sided tests at ``level`` each (Schuirmann 1987, "A
        comparison of the two one-sided tests procedure and the power approach", J. Pharmacokinetics
        and Biopharm. 15).
        """
        return -bound <= self.low and self.high <= bound

    def is_outside(self, bound: float) -> bool:
        """Whether the whole interval is beyond the bound, on one side."""
        return self.low > bound or self.high < -bound


def estimate(values: Sequence[float], level: float) -> Estimate:
    """Estimate the mean, with Student's t; a single value has an infinite interval."""
    from scipy.special import stdtrit

    mean = statistics.fmean(values)
    half = math.inf
    if len(values) > 1:
        error = statistics.stdev(values) / math.sqrt(len(values))
        half = float(stdtrit(len(values) - 1, 1 - level)) * error
    return Estimate(values, mean, mean - half, mean + half)


def differences(control: Curves, curves: Curves, config: ConvergeConfig) -> dict[str, Estimate]:
    """Return the paired differences of a technique, by measure; of at least one seed of the control.

    Of ``FINAL`` a positive one is worse, of ``SPEED`` a negative one.
    """
    weights = 1 / control.steps
    finals = final_losses(control, config.smooth_steps)
    measured: dict[str, list[float]] = {FINAL: [], SPEED: [], NORM: []}
    for seed, final in final_losses(curves, config.smooth_steps).items():
        measured[FINAL].append(final / finals[seed] - 1)
        apart = curves.losses[seed] - control.losses[seed]
        measured[SPEED].append(lead(control.steps, apart, control.slope))
        if seed in curves.norms and seed in control.norms:
            ratios = curves.norms[seed] / control.norms[seed]
            measured[NORM].append(float(np.average(ratios - 1, weights=weights)))
    return {name: estimate(values, config.level) for name, values in measured.items() if values}


def judge(
    estimates: Mapping[str, Estimate], bound: float, *, has_same_numerics: bool
) -> tuple[str, str]:
    """Return the verdict in a word, and the measure that decided or why none did.

    A technique is judged by itself: there is no correction for the number of techniques. It is
    equal if the intervals of all measures are within the bound. As all must be, one that is not
    equal is called equal with probability ``level`` at most, however many measures there are
    (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 24). It
    differs if the interval of one measure is beyond the bound as a whole. Otherwise it is
    undecided.
    """
    for name, each in estimates.items():
        if each.is_outside(bound):
            # A technique that claims the control's numbers and differs does not compute them.
            if has_same_numerics:
                return DIFFERENT, name
            return WORSE if (each.mean > 0) == (name == FINAL) else BETTER, name
    unsure = [name for name, each in estimates.items() if not each.is_inside(bound)]
    if not unsure:
        return EQUAL, ""
    return UNDECIDED, f"interval of {' and '.join(unsure)} exceeds the bound; needs more seeds"


def final_losses(curves: Curves, smooth_steps: int) -> dict[int, float]:
    """Return the mean loss of the last ``smooth_steps`` steps, by seed."""
    last = curves.steps > curves.steps[-1] - smooth_steps
    return {seed: float(losses[last].mean()) for seed, losses in curves.losses.items()}


def slope_of(steps: NDArray[np.int64], losses: Losses) -> Losses:
    """Slope of a loss against ``log(step)``, by local linear regression with Gaussian weights.

    Source: Cleveland 1979, "Robust locally weighted regression and smoothing scatterplots", JASA 74
    (without its robust iterations).
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
