"""Fit sums of power laws and IsoFLOP parabolas to losses, with bootstrap intervals. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product

import numpy as np

Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

LEVEL = 0.95
"""Coverage of intervals."""
REPLICATES = 1000
EXPONENTS = (0.1, 0.25, 0.4, 0.6, 0.9, 1.5)
"""Exponents that the search starts from."""
_SMALLEST_OFFSET = 1e-4
SAME = 1.1
"""Runs whose compute differs by less than this factor from the next one have one budget."""
LEAST_SIZES = 4
"""Different sizes that a budget needs: one more than a parabola has parameters."""
LEAST_BUDGETS = 3
MOST_LOST = 0.05
"""Largest fraction of bootstrap replicates without a minimum."""


@dataclass(frozen=True)
class Law:
    """``L = E + sum over i of K_i / x_i ** g_i``: names of x_i, K_i and g_i."""

    name: str
    variables: tuple[str, ...]
    coefficients: tuple[str, ...]
    exponents: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of a fit's values."""
        return ("E", *self.coefficients, *self.exponents)

    @property
    def formula(self) -> str:
        """The law as text: ``L = E + K / C^gamma``."""
        terms = zip(self.coefficients, self.variables, self.exponents, strict=True)
        return " + ".join(["L = E", *(f"{k} / {x}^{g}" for k, x, g in terms)])


CHINCHILLA = Law("Chinchilla law", ("N", "D"), ("A", "B"), ("alpha", "beta"))
"""``L = E + A / N ** alpha + B / D ** beta`` (arXiv:2203.15556, equation 2)."""
COMPUTE = Law("power law of compute", ("C",), ("K",), ("gamma",))
"""``L = E + K / C ** gamma``."""


@dataclass(frozen=True)
class Interval:
    """A value with its interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, drawn: Array) -> Interval:
        """Return a value with the quantiles of bootstrap replicates that include ``LEVEL`` of them."""
        low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return cls(value, float(low), float(high))

    def is_within(self, factor: float) -> bool:
        """Whether the interval is positive and spans at most this factor."""
        return self.low > 0 and self.high <= factor * self.low

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Fit:
    """A law fitted to points.

    Attributes:
        values: its parameters, by name.
        replicates: the same of each bootstrap replicate, a row each.
        residuals: measured minus fitted logarithms of the loss.
        scatter: standard deviation of the noise in the logarithm, for each replicate.
    """

    law: Law
    values: dict[str, float]
    replicates: Array = field(repr=False)
    residuals: Array = field(repr=False)
    scatter: Array = field(repr=False)

    @property
    def rms(self) -> float:
        """Root mean square of the residuals, about the relative error of the fitted losses."""
        return float((self.residuals**2).mean() ** 0.5)

    def estimate(self, name: str) -> Interval:
        """Return a parameter with its interval."""
        return Interval.of(self.values[name], self.replicates[:, self.law.parameters.index(name)])

    def predict(
        self, variables: Sequence[Sequence[float]], *, noise: bool = False
    ) -> list[Interval]:
        """Return the loss at each point with its interval.

        Args:
            variables: values of the law's variables, one sequence for each point.
            noise: whether the interval is for a measurement, whose noise is added to the
                uncertainty of the curve.
        """
        logs = np.log(np.asarray(variables, float))
        count = 1 + len(self.law.variables)

        def log_losses(values: Array) -> Array:
            return _log_loss(np.concatenate([np.log(values[:count]), values[count:]]), logs)

        value = np.exp(log_losses(np.array(list(self.values.values()))))
        drawn = np.stack([log_losses(each) for each in self.replicates])
        if noise:
            drawn += np.random.default_rng(1).standard_normal(drawn.shape) * self.scatter[:, None]
        return list(map(Interval.of, value.tolist(), np.exp(drawn.T)))


def fit(
    law: Law,
    variables: Sequence[Sequence[float]],
    losses: Sequence[float],
    *,
    replicates: int = REPLICATES,
) -> Fit:
    """Fit a law to the logarithm of the loss by least squares, from a grid of starts.

    Args:
        variables: values of the law's variables, one sequence for each point.
        replicates: number of bootstrap replicates, with normal noise of the residuals' variance.

    Raises:
        ValueError: there are not more points than parameters.
    """
    logs = np.log(np.asarray(variables, float))
    targets = np.log(np.asarray(losses, float))
    count = len(targets)
    freedom = count - len(law.parameters)
    if freedom < 1:
        raise ValueError(f"{count} points do not determine {len(law.parameters)} parameters")
    middle = logs.mean(axis=0)
    logs = logs - middle  # coefficients and exponents are less correlated there
    tried = [_minimize(start, logs, targets) for start in _starts(logs, targets)]
    best = min(tried, key=lambda each: float(((_log_loss(each, logs) - targets) ** 2).sum()))
    fitted = _log_loss(best, logs)
    # The variance of the noise is estimated with few degrees of freedom, and drawn from its
    # distribution.
    random = np.random.default_rng(0)
    scatter = np.sqrt(((targets - fitted) ** 2).sum() / random.chisquare(freedom, replicates))
    noisy = fitted + scatter[:, None] * random.standard_normal((replicates, count))
    drawn = [_external(_minimize(best, logs, each), middle) for each in noisy]
    values = dict(zip(law.parameters, _external(best, middle).tolist(), strict=True))
    return Fit(law, values, np.stack(drawn), targets - fitted, scatter)


def _starts(logs: Array, targets: Array) -> list[Array]:
    """For each combination of exponents the best offset and coefficients, in which the law is linear.

    Variable projection, arXiv:2603.22339.
    """
    losses = np.exp(targets)
    starts = []
    for exponents in product(EXPONENTS, repeat=logs.shape[1]):
        columns = np.exp(-logs * np.array(exponents))
        design = np.column_stack([np.ones(len(losses)), columns]) / losses[:, None]
        linear = np.linalg.lstsq(design, np.ones(len(losses)), rcond=None)[0]
        starts.append(np.array([*np.log(np.maximum(linear, 0.05 * losses.min())), *exponents]))
    return starts


# Minimizers work on the logarithms of offset and coefficients, [1 + variables], followed by the
# exponents.


def _log_terms(values: Array, logs: Array) -> Array:
    """Return the logarithm of each term at each point, [points, 1 + variables]."""
    count = 1 + logs.shape[1]
    offset = np.zeros((len(logs), 1))
    values = np.clip(np.nan_to_num(values), -1e6, 1e6)  # of steps along directions without effect
    return np.asarray(values[:count] - np.concatenate([offset, values[count:] * logs], axis=1))


def _log_loss(values: Array, logs: Array) -> Array:
    return np.asarray(np.logaddexp.reduce(_log_terms(values, logs), axis=1))


def _minimize(start: Array, logs: Array, targets: Array) -> Array:
    """Return the parameters with the least squares."""
    from scipy.optimize import least_squares

    def slopes(values: Array) -> Array:
        terms = _log_terms(values, logs)
        shares = np.exp(terms - np.logaddexp.reduce(terms, axis=1)[:, None])
        return np.concatenate([shares, -shares[:, 1:] * logs], axis=1)

    found = least_squares(
        lambda values: _log_loss(values, logs) - targets, start, slopes, method="lm"
    ).x
    found[0] = max(found[0], np.log(_SMALLEST_OFFSET) + targets.min())  # log 0 is no number
    return np.asarray(found)


def _external(values: Array, middle: Array) -> Array:
    """Return parameters of the law: coefficients themselves instead of their logarithms, no shift."""
    count = 1 + len(middle)
    shift = np.concatenate([[0.0], values[count:] * middle])
    return np.concatenate([np.exp(np.minimum(values[:count] + shift, 700.0)), values[count:]])


@dataclass(frozen=True)
class Parabola:
    """The losses of a budget, over the logarithm of model size or tokens (arXiv:2203.15556, approach 2).

    Attributes:
        flops: mean compute of its runs.
        variable: model size, or tokens, of each run.
        losses: loss of each run.
        curve: loss = curve[0] u**2 + curve[1] u + curve[2], with u = log(variable).
        best: the variable at the minimum; None: the data do not have one.
        reason: why there is none.
    """

    flops: float
    variable: Array
    losses: Array
    curve: Array
    best: Interval | None
    reason: str = ""

    @property
    def lowest(self) -> float:
        """Loss at the minimum of the parabola."""
        return float(self.curve[2] - self.curve[1] ** 2 / (4 * self.curve[0]))


@dataclass(frozen=True)
class Frontier:
    """``best = factor * C ** exponent`` over the budgets; None with a reason if it is not determined."""

    parabolas: list[Parabola]
    exponent: Interval | None
    factor: float | None
    reason: str = ""


def budgets(flops: Sequence[float]) -> list[list[int]]:
    """Group runs of equal compute; return their indices, smallest budget first."""
    groups: list[list[int]] = []
    for index in sorted(range(len(flops)), key=lambda each: flops[each]):
        if groups and flops[index] <= SAME * flops[groups[-1][-1]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    return groups


def fit_frontier(
    flops: Sequence[float],
    variable: Sequence[float],
    losses: Sequence[float],
    *,
    replicates: int = REPLICATES,
) -> Frontier | None:
    """Fit a parabola to each budget with enough sizes, and a power law to their minima.

    Args:
        variable: the model size of each run, or its tokens.
        replicates: number of bootstrap replicates, with normal noise of the residuals' variance.

    Returns:
        None if no budget has four different values of the variable.
    """
    logs = np.log(np.asarray(variable, float))
    targets = np.asarray(losses, float)
    # Sizes that round to the same per cent are one.
    sizes = np.round(100 * logs)
    groups = [np.array(group) for group in budgets(flops) if len(set(sizes[group])) >= LEAST_SIZES]
    if not groups:
        return None
    curves = [np.polyfit(logs[group], targets[group], 2) for group in groups]
    fitted = [np.polyval(curve, logs[group]) for group, curve in zip(groups, curves, strict=True)]
    # Relative noise is taken to be equal at all budgets.
    residuals = 1 - np.concatenate(fitted) / np.concatenate([targets[group] for group in groups])
    random = np.random.default_rng(0)
    freedom = len(residuals) - 3 * len(groups)
    scatter = np.sqrt((residuals**2).sum() / random.chisquare(freedom, replicates))
    minima = []
    parabolas = []
    for group, curve, own in zip(groups, curves, fitted, strict=True):
        noise = scatter[:, None] * random.standard_normal((replicates, len(group)))
        drawn = _minimum(np.polyfit(logs[group], (own * (1 + noise)).T, 2))
        budget = float(np.mean(np.asarray(flops)[group]))
        made = _parabola(budget, np.exp(logs[group]), targets[group], curve, drawn)
        parabolas.append(made)
        if made.best is not None:
            minima.append((budget, made.best.value, drawn))
    if len(minima) < LEAST_BUDGETS:
        words = f"{len(minima)} of {len(parabolas)} budgets have a minimum, and {LEAST_BUDGETS} are needed"
        return Frontier(parabolas, None, None, words)
    compute, best, drawn_minima = zip(*minima, strict=True)
    slope, height = np.polyfit(np.log(compute), np.log(best), 1)
    drawn = np.stack(drawn_minima)
    known = np.log(drawn[:, ~np.isnan(drawn).any(axis=0)])
    slopes = np.polyfit(np.log(compute), known, 1)[0]
    return Frontier(parabolas, Interval.of(float(slope), slopes), float(np.exp(height)))


def _minimum(curves: Array) -> Array:
    """Return where each parabola is lowest; NaN if it opens downwards."""
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.where(curves[0] > 0, -curves[1] / (2 * curves[0]), np.nan)
    return np.asarray(np.exp(np.clip(logs, -700, 700)))


def _parabola(flops: float, variable: Array, losses: Array, curve: Array, drawn: Array) -> Parabola:
    at = float(_minimum(curve))
    lost = np.isnan(drawn)
    best = None
    reason = ""
    if np.isnan(at):
        reason = "the loss does not curve upwards"
    elif not variable.min() <= at <= variable.max():
        side = "smaller" if at < variable.min() else "larger"
        reason = f"the minimum is outside of the runs, at {side} values"
    elif lost.mean() > MOST_LOST:
        share = f"{lost.mean():.0%} of the bootstrap replicates"
        reason = f"noise hides the curvature: {share} have no minimum"
    else:
        best = Interval.of(at, drawn[~lost])
    return Parabola(flops, variable, losses, curve, best, reason)
