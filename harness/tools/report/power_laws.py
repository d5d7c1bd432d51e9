"""Fit sums of power laws with an offset to losses, with bootstrap intervals. No torch, no scipy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

HUBER = 1e-3
"""Threshold of the Huber loss of logarithms (arXiv:2203.15556, approach 3)."""
MANY = 50
"""Fits to fewer points minimize squares: the Huber loss above is in effect the sum of absolute residuals, and
passes through as many points as it has parameters. Their bootstrap draws normal noise instead of points."""
LEVEL = 0.95
"""Coverage of intervals."""
REPLICATES = 1000
EXPONENTS = (0.1, 0.25, 0.4, 0.6, 0.9, 1.5)
"""Exponents that the search starts from."""
_STEPS, _TOLERANCE, _STILL = 400, 1e-10, 6
_SMALLEST_OFFSET = 1e-4


@dataclass(frozen=True)
class Law:
    """``L = E + sum over i of K_i / x_i ** g_i``, a power law of each variable.

    Attributes:
        name: its name.
        variables: names of x_i.
        coefficients: names of K_i.
        exponents: names of g_i.
    """

    name: str
    variables: tuple[str, ...]
    coefficients: tuple[str, ...]
    exponents: tuple[str, ...]

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of all parameters, in the order of a fit's values."""
        return ("E", *self.coefficients, *self.exponents)


CHINCHILLA = Law("Chinchilla law", ("N", "D"), ("A", "B"), ("alpha", "beta"))
"""``L = E + A / N ** alpha + B / D ** beta`` (arXiv:2203.15556, equation 2)."""
COMPUTE = Law("power law of compute", ("C",), ("K",), ("gamma",))
"""``L = E + K / C ** gamma``."""


@dataclass(frozen=True)
class Estimate:
    """A value with its interval."""

    value: float
    low: float
    high: float

    @property
    def sides(self) -> tuple[float, float]:
        """Distances to both ends of the interval; 0 if the value is outside, as by rounding."""
        return max(0.0, self.value - self.low), max(0.0, self.high - self.value)

    def is_within(self, factor: float) -> bool:
        """Whether the interval is positive and spans at most this factor."""
        return self.low > 0 and self.high <= factor * self.low

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high


@dataclass(frozen=True)
class Fit:
    """A law fitted to points.

    Attributes:
        law: the law.
        values: its parameters, by name.
        replicates: the same of each bootstrap replicate, a row each.
        residuals: measured minus fitted logarithms of the loss.
        scatter: standard deviation of the noise in the logarithm, for each replicate.
        objective: the minimized sum.
    """

    law: Law
    values: dict[str, float]
    replicates: Array = field(repr=False)
    residuals: Array = field(repr=False)
    scatter: Array = field(repr=False)
    objective: float = 0.0

    @property
    def rms(self) -> float:
        """Root mean square of the residuals, about the relative error of the fitted losses."""
        return float((self.residuals**2).mean() ** 0.5)

    def estimate(self, name: str) -> Estimate:
        """Return a parameter with its interval."""
        drawn = self.replicates[:, self.law.parameters.index(name)]
        return Estimate(self.values[name], *interval(drawn))

    def predict(self, variables: Sequence[Sequence[float]], *, noise: bool = False) -> list[Estimate]:
        """Return the loss at each point with its interval.

        Args:
            variables: values of the law's variables, one sequence for each point.
            noise: whether the interval is for a measurement, whose noise is added to the uncertainty of
                the curve.
        """
        import numpy as np

        logs = np.log(np.asarray(variables, float))
        value = np.exp(_log_losses(_internal(self.law, np.array([list(self.values.values())])), logs)[0])
        drawn = _log_losses(_internal(self.law, self.replicates), logs)
        if noise:
            drawn = drawn + np.random.default_rng(1).standard_normal(drawn.shape) * self.scatter[:, None]
        return [
            Estimate(float(each), *interval(np.exp(column)))
            for each, column in zip(value, drawn.T, strict=True)
        ]


def fit(
    law: Law, variables: Sequence[Sequence[float]], losses: Sequence[float], *, replicates: int = REPLICATES
) -> Fit:
    """Fit a law to losses, as in arXiv:2203.15556: the logarithm of the loss, from a grid of starts.

    Args:
        law: the law.
        variables: values of the law's variables, one sequence for each point.
        losses: the measured losses.
        replicates: number of bootstrap replicates.

    Raises:
        ValueError: there are not more points than parameters.
    """
    import numpy as np

    logs, targets = np.log(np.asarray(variables, float)), np.log(np.asarray(losses, float))
    count, size = len(targets), len(law.parameters)
    if count <= size:
        raise ValueError(f"{count} points do not determine {size} parameters")
    middle = logs.mean(axis=0)
    logs = logs - middle  # coefficients and exponents are less correlated there
    delta = HUBER if count >= MANY else np.inf
    starts = _starts(logs, targets)
    ones = np.ones((len(starts), count))
    found, objectives = _minimize(starts, logs, np.broadcast_to(targets, ones.shape), ones, delta)
    best = found[np.argmin(objectives)][None]
    residuals = targets - _log_losses(best, logs)[0]
    random = np.random.default_rng(0)
    freedom = count - size
    if count >= MANY:
        drawn = random.integers(count, size=(replicates, count))
        weights = np.stack([np.bincount(each, minlength=count) for each in drawn]).astype(float)
        noisy = np.broadcast_to(targets, weights.shape)
        scatter = np.full(replicates, np.sqrt((residuals**2).sum() / freedom))
    else:
        # The variance of the noise is estimated with few degrees of freedom, and drawn from its distribution.
        scatter = np.sqrt((residuals**2).sum() / random.chisquare(freedom, replicates))
        noisy = targets - residuals + scatter[:, None] * random.standard_normal((replicates, count))
        weights = np.ones_like(noisy)
    again, _ = _minimize(np.repeat(best, replicates, axis=0), logs, noisy, weights, delta)
    values = _external(law, best, middle)[0]
    return Fit(
        law,
        dict(zip(law.parameters, values.tolist(), strict=True)),
        _external(law, again, middle),
        residuals,
        scatter,
        float(objectives.min()),
    )


def interval(drawn: Array) -> tuple[float, float]:
    """Return the quantiles of bootstrap replicates that include ``LEVEL`` of them."""
    import numpy as np

    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _starts(logs: Array, targets: Array) -> Array:
    """Return starts: for each combination of exponents the best offset and coefficients, by linear squares.

    The law is linear in them (variable projection, arXiv:2603.22339).
    """
    import numpy as np

    losses, starts = np.exp(targets), []
    for exponents in product(EXPONENTS, repeat=logs.shape[1]):
        columns = np.exp(-logs * np.array(exponents))
        design = np.column_stack([np.ones(len(losses)), columns]) / losses[:, None]
        linear = np.linalg.lstsq(design, np.ones(len(losses)), rcond=None)[0]
        starts.append([*np.log(np.maximum(linear, 0.05 * losses.min())), *exponents])
    return np.array(starts)


def _log_losses(values: Array, logs: Array) -> Array:
    """Return the logarithm of the law, [fits, points], for internal values [fits, parameters]."""
    import numpy as np

    terms = _terms(values, logs)
    highest = terms.max(axis=2)
    return np.asarray(highest + np.log(np.exp(terms - highest[:, :, None]).sum(axis=2)))


def _terms(values: Array, logs: Array) -> Array:
    """Return the logarithm of each term, [fits, points, 1 + variables]."""
    import numpy as np

    count = logs.shape[1]
    offset = np.broadcast_to(values[:, None, :1], (len(values), len(logs), 1))
    powers = values[:, None, 1 : 1 + count] - values[:, None, 1 + count :] * logs[None]
    return np.concatenate([offset, powers], axis=2)


def _minimize(
    starts: Array, logs: Array, targets: Array, weights: Array, delta: float
) -> tuple[Array, Array]:
    """Minimize the weighted Huber loss of each row by Levenberg and Marquardt's method.

    Args:
        starts: [fits, parameters].
        logs: logarithms of the variables, [points, variables].
        targets: logarithms of the losses, [fits, points].
        weights: [fits, points].
        delta: threshold of the Huber loss; infinite: squares.

    Returns:
        the parameters, and the loss of each row.
    """
    import numpy as np

    values, damping = starts.copy(), np.full(len(starts), 1e-2)
    loss, residuals = _objective(values, logs, targets, weights, delta)
    floor = np.log(_SMALLEST_OFFSET) + targets.min(axis=1)
    still = np.zeros(len(starts), int)
    for _ in range(_STEPS):
        rows = np.flatnonzero(still <= _STILL)
        if not rows.size:
            break
        own = values[rows]
        trial = own + _step(own, logs, residuals[rows], weights[rows], delta, damping[rows])
        trial[:, 0] = np.maximum(trial[:, 0], floor[rows])
        lower, changed = _objective(trial, logs, targets[rows], weights[rows], delta)
        gain = (loss[rows] - lower) / np.maximum(loss[rows], 1e-300)
        better, there = gain > 0, rows[gain > 0]
        values[there], residuals[there], loss[there] = trial[better], changed[better], lower[better]
        still[rows] = np.where(gain > _TOLERANCE, 0, still[rows] + 1)
        damping[rows] = np.clip(damping[rows] * np.where(better, 0.25, 4.0), 1e-12, 1e8)
    return values, loss


def _objective(
    values: Array, logs: Array, targets: Array, weights: Array, delta: float
) -> tuple[Array, Array]:
    """Return the weighted Huber loss of each row, and its residuals."""
    import numpy as np

    residuals = targets - _log_losses(values, logs)
    size = np.abs(residuals)
    inside = np.minimum(size, delta)
    return (weights * inside * (size - inside / 2)).sum(axis=1), residuals


def _step(
    values: Array, logs: Array, residuals: Array, weights: Array, delta: float, damping: Array
) -> Array:
    """Return the damped Gauss-Newton step of each row."""
    import numpy as np

    terms = _terms(values, logs)
    shares = np.exp(terms - terms.max(axis=2, keepdims=True))
    shares /= shares.sum(axis=2, keepdims=True)
    slopes = np.concatenate([shares, -shares[:, :, 1:] * logs[None]], axis=2)
    # Squares with these weights touch the Huber loss from above.
    inner = weights * np.minimum(1.0, delta / np.maximum(np.abs(residuals), 1e-300))
    weighted = np.swapaxes(slopes * inner[:, :, None], 1, 2)
    normal, right = weighted @ slopes, weighted @ residuals[:, :, None]
    diagonal = np.einsum("fpp->fp", normal)
    ridge = damping[:, None] * (diagonal + 1e-9 * diagonal.max(axis=1, keepdims=True)) + 1e-300
    step = np.linalg.solve(normal + ridge[:, :, None] * np.eye(values.shape[1]), right)
    return np.asarray(np.clip(step[:, :, 0], -2, 2))


def _external(law: Law, internal: Array, middle: Array) -> Array:
    """Return parameters of the law: coefficients themselves instead of their logarithms, no shift."""
    import numpy as np

    count = len(law.variables)
    exponents = internal[:, 1 + count :]
    coefficients = np.exp(np.minimum(internal[:, 1 : 1 + count] + exponents * middle, 700.0))
    return np.concatenate([np.exp(internal[:, :1]), coefficients, exponents], axis=1)


def _internal(law: Law, external: Array) -> Array:
    import numpy as np

    count = len(law.variables)
    return np.concatenate([np.log(external[:, : 1 + count]), external[:, 1 + count :]], axis=1)
