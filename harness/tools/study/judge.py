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

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

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
class Estimate:
    """Mean of values, one per seed, with its interval by Student's t, and the bound of equality."""

    mean: float
    low: float
    """Lower end of the confidence interval of level ``1 - 2 * level``."""
    high: float
    values: tuple[float, ...]
    bound: float

    @classmethod
    def of(cls, values: Sequence[float], bound: float, level: float) -> Estimate:
        """Estimate the mean; a single value has an infinite interval."""
        from scipy.special import stdtrit

        mean = statistics.fmean(values)
        half = math.inf
        if len(values) > 1:
            error = statistics.stdev(values) / math.sqrt(len(values))
            half = float(stdtrit(len(values) - 1, 1 - level)) * error
        return cls(mean, mean - half, mean + half, tuple(values), bound)

    @property
    def is_inside(self) -> bool:
        """Whether the whole interval is within the bound.

        This is the equivalence test by two one-sided tests at ``level`` each (Schuirmann 1987, "A
        comparison of the two one-sided tests procedure and the power approach", J. Pharmacokinetics
        and Biopharm. 15).
        """
        return -self.bound <= self.low and self.high <= self.bound

    @property
    def is_outside(self) -> bool:
        """Whether the whole interval is beyond the bound, on one side."""
        return self.low > self.bound or self.high < -self.bound


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

    @cached_property
    def slope(self) -> Losses:
        """Slope of the mean curve against ``log(step)``."""
        return slope_of(self.steps, np.mean(list(self.losses.values()), axis=0))


@dataclass(frozen=True)
class TechniqueVerdict:
    """Result of comparing one technique with the control.

    Attributes:
        word: ``equal``, ``worse``, ``better``, ``different`` or ``undecided``.
        estimates: differences by measure: of ``FINAL`` a positive one is worse, of ``SPEED`` a
            negative one.
        reason: the measure that decided.
    """

    word: str
    estimates: dict[str, Estimate]
    reason: str


def judge(control: Curves, curves: Curves, config: ConvergeConfig) -> TechniqueVerdict:
    """Compare a technique with the control, by itself: there is no correction for the number of techniques.

    It is equal if the intervals of all measures are within their bounds. As all must be, one that
    is not equal is called equal with probability ``level`` at most, however many measures there are
    (Berger 1982, "Multiparameter hypothesis testing and acceptance sampling", Technometrics 24). It
    differs if the interval of one measure is beyond its bound as a whole. Otherwise it is
    undecided.

    Args:
        curves: at least one seed, all of them seeds of the control.
    """
    estimates = measure(control, curves, config)
    word, reason = decide(estimates, same_numerics=curves.same_numerics)
    return TechniqueVerdict(word, estimates, reason)


def measure(control: Curves, curves: Curves, config: ConvergeConfig) -> dict[str, Estimate]:
    """Return the paired differences of a technique, by measure."""
    steps = control.steps
    finals = final_losses(curves, config.smooth_steps)
    finals_of_control = final_losses(control, config.smooth_steps)
    differences = []
    leads = []
    for seed, losses in curves.losses.items():
        differences.append(finals[seed] / finals_of_control[seed] - 1)
        leads.append(lead(steps, losses - control.losses[seed], control.slope))
    found = {
        FINAL: Estimate.of(differences, config.final_bound, config.level),
        SPEED: Estimate.of(leads, config.speed_bound, config.level),
    }
    norms = []
    for seed, own in curves.norms.items():
        if seed in control.norms:
            norms.append(float(np.average(own / control.norms[seed] - 1, weights=1 / steps)))
    if norms and curves.same_numerics:
        found[NORM] = Estimate.of(norms, config.norm_bound, config.level)
    return found


def decide(estimates: Mapping[str, Estimate], *, same_numerics: bool) -> tuple[str, str]:
    """Return the verdict and the measure that decided, or why none did."""
    for name, estimate in estimates.items():
        if not estimate.is_outside:
            continue
        # A technique that claims the control's numbers and differs does not compute them.
        if same_numerics:
            return DIFFERENT, name
        is_worse = estimate.mean > 0 if name == FINAL else estimate.mean < 0
        return WORSE if is_worse else BETTER, name
    unsure = [name for name, estimate in estimates.items() if not estimate.is_inside]
    if not unsure:
        return EQUAL, ""
    if len(estimates[FINAL].values) < 2:
        return UNDECIDED, "one seed; needs more seeds"
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
