"""Spikes of the loss or the gradient norm, which ``debug.spikes`` asks for. Imports no torch."""

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any, NamedTuple

from harness.config.training import DebugConfig
from harness.util.errors import NonFiniteError

NORMAL = 1.4826
"""Standard deviation of normal values over their median absolute deviation."""
DELAY = 2
"""Steps between a step and the newest one that it is compared with: of the one before it, the host may not
have the values when it launches the step (``LATE_STEPS``)."""
MOST_IN_A_ROW = 10
"""Spikes in a row after which ``log`` takes them as usual, and ``skip`` stops the run."""
MOST_REWINDS = 10
"""Times that a run goes back to one checkpoint."""
STATE = "spike_window"


class Usual(NamedTuple):
    """Median and robust standard deviation of a value in steps before, and the most that is usual."""

    median: float
    deviation: float
    most: float

    def zscore(self, value: float) -> float:
        """How many deviations a value is above the median."""
        return (value - self.median) / self.deviation


def usual(values: Iterable[float], zscore: float) -> Usual:
    """Return what is usual among values, up to a z-score; after equal values nothing is a spike."""
    known = list(values)
    middle = median(known)
    deviation = NORMAL * median(abs(value - middle) for value in known) or math.inf
    return Usual(middle, deviation, middle + zscore * deviation)


class Limits(NamedTuple):
    """What is usual before a step."""

    loss: Usual
    grad_norm: Usual


class Spike(NamedTuple):
    """A step with a spike, and its z-scores."""

    step: int
    loss: float
    grad_norm: float
    loss_zscore: float
    grad_norm_zscore: float

    @property
    def row(self) -> dict[str, float]:
        """Its row of metrics."""
        return {
            "step": self.step,
            "spike.loss": self.loss_zscore,
            "spike.grad_norm": self.grad_norm_zscore,
        }

    def __str__(self) -> str:
        return (
            f"spike in step {self.step}: loss {self.loss:.4g} (z-score {self.loss_zscore:.1f}), "
            f"gradient norm {self.grad_norm:.4g} (z-score {self.grad_norm_zscore:.1f})"
        )


class SpikePolicy:
    """Finds spikes. Every rank has the same sums and finds the same, also after a resume.

    A spike is a step whose loss or gradient norm is more than ``debug.spike_zscore`` robust
    standard deviations above the median of ``debug.spike_window`` steps. These end ``DELAY`` steps
    before it. Spikes are not among them, nor steps that are not finite. There is no verdict before
    half of the window is known.
    """

    def __init__(self, debug: DebugConfig) -> None:
        self.action = debug.spikes
        self._zscore = debug.spike_zscore
        self._window = debug.spike_window
        self._values: deque[tuple[int, float, float]] = deque(maxlen=debug.spike_window + DELAY)
        self._rewinds = Counter[int]()

    def limits(self, step: int) -> Limits | None:
        """Return the limits of a step when it is launched or checked; None if there is no verdict."""
        known = [each for each in self._values if each[0] <= step - DELAY][-self._window :]
        if self.action == "off" or 2 * len(known) < self._window:
            return None
        _, losses, norms = zip(*known, strict=True)
        return Limits(usual(losses, self._zscore), usual(norms, self._zscore))

    def check(self, step: int, loss: float, norm: float) -> Spike | None:
        """Return the spike of a step that is finite and has one; steps come in their order.

        Raises:
            NonFiniteError: too many updates in a row were skipped.
        """
        if not math.isfinite(loss + norm):
            return None
        limits = self.limits(step)
        if limits is None or (loss <= limits.loss.most and norm <= limits.grad_norm.most):
            self._values.append((step, loss, norm))
            return None
        spike = Spike(step, loss, norm, limits.loss.zscore(loss), limits.grad_norm.zscore(norm))
        if step - self._values[-1][0] > MOST_IN_A_ROW:
            if self.action == "skip":
                raise NonFiniteError(
                    f"{spike}: more than {MOST_IN_A_ROW} in a row; "
                    "would work: debug.spikes=log, or a lower optimizer.lr"
                )
            self._values.clear()
        return spike

    def count_rewind(self, step: int | None, why: Spike) -> None:
        """Count that the run goes back to the checkpoint of a step, because of a spike.

        Raises:
            NonFiniteError: it did so too often, or there is no checkpoint.
        """
        if step is None:
            raise NonFiniteError(
                f"{why}: there is no checkpoint to go back to; would work: a smaller "
                "checkpoint.interval, or checkpoint.enable_first_step_checkpoint=true"
            )
        self._rewinds[step] += 1
        if self._rewinds[step] > MOST_REWINDS:
            raise NonFiniteError(
                f"{why}: the run has gone back {MOST_REWINDS} times to step {step}; "
                "would work: a larger debug.spike_batches or debug.spike_zscore, or a lower optimizer.lr"
            )

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint keeps: the values of the window."""
        return {} if self.action == "off" else {STATE: list(self._values)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the state of a checkpoint; one without a window begins an empty one."""
        self._values.clear()
        self._values.extend(state.get(STATE, []))
