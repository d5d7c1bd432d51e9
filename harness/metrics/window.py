"""Step times: a timer of single steps, and the window of steps over which throughput is measured.

Throughput covers training only. The window excludes steps of warm-up (compilation, allocation,
first use of every communicator) and profiled steps. A step's time excludes validation, saving and
writing traces.
"""

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.metrics.columns import Metric

DATA = "data"
VALIDATION = "validation"
CHECKPOINT = "checkpoint"
PROFILING = "profiling"
THROUGHPUT = "tokens/s: all tokens over all seconds of the steps after warm-up"
"""The definition of throughput, as tables name it; ``tokens/s/rank`` is this divided by the
ranks."""
SECTIONS = (DATA, VALIDATION, CHECKPOINT, PROFILING)
EXCLUDED = (VALIDATION, CHECKPOINT, PROFILING)

RATE = Metric(
    "tokens_per_second",
    "tokens/s",
    "Throughput of all ranks since the last row, without warm-up.",
    line="tokens/s {:,.0f}",
)
INTERVAL = (
    Metric("step_seconds", "s", "Mean time of the steps since the last row, warm-up included."),
    Metric(
        "data_share",
        "0 to 1",
        "Share of the step's time spent waiting for data.",
        line=lambda v: f"data {v:.1%}" if v >= 0.01 else "",
    ),
    Metric(
        "profiled_steps", "count", "Steps left out of throughput: a profiler ran.", "`profiling=on`"
    ),
)
SUMMARY = (
    Metric("window.window_steps", "count", "Steps after warm-up, without profiled ones."),
    Metric("window.window_seconds", "s", "Their total time."),
    Metric("window.window_tokens", "tokens", "Their total tokens."),
    Metric(
        "window.step_seconds_median",
        "s",
        "Median time of a step, as all quantiles of the last 1,000.",
    ),
    Metric("window.step_seconds_p10", "s", "10th percentile of the time of a step."),
    Metric("window.step_seconds_p90", "s", "90th percentile of the time of a step."),
    Metric("window.step_seconds_spread", "ratio", "(p90 - p10) / median."),
    Metric(
        "window.tokens_per_second", "tokens/s", "All tokens over all seconds, as in every table."
    ),
    Metric(
        "window.tokens_per_second_p10", "tokens/s", "10th percentile of the rates of single steps."
    ),
    Metric(
        "window.tokens_per_second_p90", "tokens/s", "90th percentile of the rates of single steps."
    ),
    Metric(
        "window.tokens_per_second_median", "tokens/s", "Mean tokens of a step over the median time."
    ),
    Metric("window.data_share", "0 to 1", "Share of the window spent waiting for data."),
    Metric(
        "window.profiled_steps", "count", "Steps left out because a profiler ran; null if none."
    ),
)


class StepTime(NamedTuple):
    """The time of one step, in seconds."""

    seconds: float
    """Without the sections ``EXCLUDED``."""
    spent: dict[str, float]
    """Time in each of ``SECTIONS``."""


class StepTimer:
    """Clock of the loop: the end of one step is the start of the next, so no time is lost between them.

        timer = StepTimer(synchronize=torch.cuda.synchronize)
        for step in steps:
            with timer.section("data"):
                batch = next(batches)
            train(batch)
            lap = timer.lap()
            window.add(lap.seconds, tokens, lap.spent["data"])
            with timer.section("checkpoint"):
                save()

    Args:
        synchronize: waits for the device. Kernels run asynchronously; without this wait at the
            start and end of validation and saving, their times would include kernels of earlier
            steps.
    """

    def __init__(
        self,
        synchronize: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        annotated: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._synchronize = synchronize
        self._annotated = annotated
        self._clock = clock
        self.restart()

    def restart(self) -> None:
        """Discard the time since the last lap; call it right before the first step."""
        self._started = self._clock()
        self._spent = dict.fromkeys(SECTIONS, 0.0)

    @contextmanager
    def section(self, name: str) -> Iterator[None]:
        """Add the time of the ``with`` block to section ``name``, one of SECTIONS, inside of no other."""
        started = self._edge(name)
        try:
            with self._annotated(name):
                yield
        finally:
            self._spent[name] += self._edge(name) - started

    def lap(self) -> StepTime:
        """End the step and begin the next one."""
        seconds = self._clock() - self._started - sum(self._spent[name] for name in EXCLUDED)
        spent = self._spent
        self.restart()
        return StepTime(seconds, spent)

    def _edge(self, name: str) -> float:
        """Return the time; first wait for the device if the step excludes the section."""
        if self._synchronize is not None and name in EXCLUDED:
            self._synchronize()
        return self._clock()


@dataclass(frozen=True, slots=True)
class _Step:
    seconds: float
    tokens: int
    data_seconds: float
    profiled: bool
    seq_len: int
    measured: bool


LATEST_STEPS = 1_000
"""Steps of which quantiles are computed; totals are those of all steps."""


class Window:
    """Steps of this process that count for its throughput.

    Warm-up starts with the first step of *this process*, not with step 1 of the run: a resumed run
    compiles and connects again.
    """

    def __init__(self, warmup_steps: int = 3) -> None:
        self._warmup_steps = warmup_steps
        self._seen = 0
        self._latest: deque[_Step] = deque(maxlen=LATEST_STEPS)
        self._unlogged: list[_Step] = []
        self._steps = self._profiled = 0
        self._seconds = self._data_seconds = 0.0
        self.lengths: Counter[int] = Counter()
        """Tokens by length of sequence, of the steps that ``summary`` measures."""
        self.interval_lengths: Counter[int] = Counter()
        """Tokens by length of sequence, of the steps that the last ``interval`` measured."""

    def add(
        self,
        seconds: float,
        tokens: int,
        data_seconds: float = 0.0,
        *,
        profiled: bool = False,
        warms_up: bool = False,
        seq_len: int = 0,
    ) -> None:
        """Add one step.

        Args:
            seconds: time of the step, without validation and saving.
            tokens: tokens of all ranks, without padding, each counted once.
            data_seconds: the part of ``seconds`` spent waiting for data.
            profiled: whether a profiler ran, which slows the step down.
            warms_up: whether the step counts as warm-up wherever it is: it compiles again.
        """
        self._seen += 1
        self._profiled += profiled
        measured = self._seen > self._warmup_steps and not warms_up and not profiled
        step = _Step(seconds, tokens, data_seconds, profiled, seq_len, measured)
        self._unlogged.append(step)
        if measured:
            self._latest.append(step)
            self._steps += 1
            self._seconds += seconds
            self._data_seconds += data_seconds
            self.lengths[seq_len] += tokens

    def interval(self) -> dict[str, float | int | None]:
        """Return ``RATE`` and ``INTERVAL`` since the last call (or the start), and begin the next interval.

        A value is None without a step to compute it from.
        """
        steps = self._unlogged
        self._unlogged = []
        measured = [step for step in steps if step.measured]
        self.interval_lengths = Counter()
        for step in measured:
            self.interval_lengths[step.seq_len] += step.tokens
        seconds = sum(step.seconds for step in measured)
        profiled = sum(step.profiled for step in steps)
        return {
            "step_seconds": _ratio(sum(step.seconds for step in steps), len(steps)),
            "tokens_per_second": _ratio(self.interval_lengths.total(), seconds),
            "data_share": _ratio(sum(step.data_seconds for step in measured), seconds),
            **({"profiled_steps": profiled} if profiled else {}),
        }

    def summary(self) -> dict[str, float | int | None]:
        """Return ``SUMMARY``, without the prefix; values other than counts are None without a step."""
        times = [step.seconds for step in self._latest]
        rates = [step.tokens / step.seconds for step in self._latest if step.seconds > 0]
        p10, middle, p90 = (_quantile(times, q) for q in (0.1, 0.5, 0.9))
        steps = self._steps
        tokens = self.lengths.total()
        seconds = self._seconds
        spread = _ratio(p90 - p10, middle) if p10 is not None and p90 is not None else None
        return {
            "window_steps": steps,
            "window_seconds": seconds if steps else None,
            "window_tokens": tokens if steps else None,
            "step_seconds_median": middle,
            "step_seconds_p10": p10,
            "step_seconds_p90": p90,
            "step_seconds_spread": spread,
            "tokens_per_second": _ratio(tokens, seconds),
            "tokens_per_second_p10": _quantile(rates, 0.1),
            "tokens_per_second_p90": _quantile(rates, 0.9),
            "tokens_per_second_median": _ratio(tokens / steps, middle) if steps else None,
            "data_share": _ratio(self._data_seconds, seconds),
            "profiled_steps": self._profiled or None,
        }


def _ratio(part: float, whole: float | None) -> float | None:
    return part / whole if whole else None


def _quantile(values: list[float], q: float) -> float | None:
    return float(np.quantile(values, q)) if values else None
