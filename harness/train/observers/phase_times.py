"""Times of the phases of a step: marks of a device's events or of a CPU's clock.

A mark is a point in time at which the phase changes: a CUDA event on the current stream, or the
clock on a CPU. The time of a phase is the time from its marks to the next ones. So times are
exclusive, add up to the step, and a collective counts only while computation waits for it.

The host never waits for an event. Times of a step are read when its last event is done. On a CPU a
mark also reads how long the kernel let this thread wait for a core.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from harness.metrics.window import EXCLUDED
from harness.util.annotation import SUMS

HOST = "host"
"""Time in no other phase: launching, reading values, writing metrics."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds waiting for one, and turns, of the thread that opens it (Linux,
Documentation/scheduler/sched-stats.rst)."""


class PhaseSpan(NamedTuple):
    """A time in one phase without interruption, in seconds from the start of the step."""

    start: float
    end: float
    phase: str
    stage: int
    queued: float = 0.0
    """Seconds of it in which the thread could run and had no core; 0.0 where the system does not
    say."""


@dataclass(frozen=True)
class StepPhases:
    """Phases of one step on one rank."""

    step: int
    spans: list[PhaseSpan]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        return total_of((span.phase, span.end - span.start) for span in self.spans)

    @property
    def passes(self) -> dict[int, dict[str, float]]:
        """Seconds of the forward and backward phases of each pipeline stage."""
        of_stage: dict[int, list[PhaseSpan]] = defaultdict(list)
        for span in self.spans:
            if span.phase.startswith(("forward.", "backward.")):
                of_stage[span.stage].append(span)
        return {stage: StepPhases(self.step, of_stage[stage]).seconds for stage in sorted(of_stage)}

    @property
    def on_core(self) -> dict[str, float]:
        """Seconds of each phase, without those in which the thread waited for a core."""
        # A thread that loses its core between both readings of a mark has waited in the next span.
        return total_of(
            (span.phase, max(0.0, span.end - span.start - span.queued)) for span in self.spans
        )

    @property
    def aligned_at(self) -> float:
        """End of the last sum over the world, which is the same moment on all ranks; 0.0 without one."""
        return max((span.end for span in self.spans if span.phase == SUMS), default=0.0)


class Phases:
    """Record the phases of every step.

    Args:
        device: whose time counts: events on a GPU, else the clock.
        stage: pipeline stage of phases that name none.
    """

    def __init__(self, device: torch.device, stage: int = 0) -> None:
        self._stamps: Any = _Events() if device.type == "cuda" else _Clock()
        self.sees_queue: bool = self._stamps.sees_queue
        """Whether spans have the time in which the thread waited for a core."""
        self._open = [(HOST, stage)]
        self._marks: list[tuple[Any, str, int]] = []
        self._ended: deque[tuple[int, list[tuple[Any, str, int]], Any]] = deque()
        self._mark()

    def enter(self, phase: str, stage: int | None = None) -> None:
        """Begin a phase, which interrupts the one before until ``leave``.

        Passes and collectives of validation and saving are a part of these.
        """
        around, of = self._open[-1]
        self._open.append((around if around in EXCLUDED else phase, of if stage is None else stage))
        self._mark()

    def leave(self) -> None:
        """End the phase that began last, and continue the one before."""
        self._open.pop()
        self._mark()

    def change(self, phase: str) -> None:
        """Begin a phase in place of the one that began last, until ``leave``."""
        self._open[-1] = (phase, self._open[-1][1])
        self._mark()

    def inside(self, phase: str, stage: int | None = None) -> _Inside:
        """Count the ``with`` block, or each call of a decorated function, as a phase."""
        return _Inside(self, phase, stage)

    def close(self) -> None:
        """Release what reads the time; no mark may follow."""
        self._stamps.close()

    def restart(self) -> None:
        """Discard the marks of an incomplete step."""
        self._stamps.free([stamp for stamp, _, _ in self._marks])
        self._marks = []
        self._mark()

    def end_step(self, step: int) -> None:
        """End a step; the next one begins."""
        marks = self._marks
        self._marks = []
        self._mark()
        self._ended.append((step, marks, self._marks[0][0]))

    def take(self) -> Iterator[StepPhases]:
        """Remove and yield the ended steps that the device has finished, oldest first."""
        while self._ended and self._stamps.is_done(self._ended[0][2]):
            step, marks, end = self._ended.popleft()
            yield StepPhases(step, self._spans(marks, end))
            self._stamps.free([stamp for stamp, _, _ in marks])

    def _mark(self) -> None:
        self._marks.append((self._stamps.now(), *self._open[-1]))

    def _spans(self, marks: list[tuple[Any, str, int]], end: Any) -> list[PhaseSpan]:
        spans: list[PhaseSpan] = []
        since = 0.0
        lengths = self._stamps.lengths([stamp for stamp, _, _ in marks] + [end])
        for (_, phase, stage), (seconds, queued) in zip(marks, lengths, strict=True):
            until = since + seconds
            if spans and spans[-1].phase == phase and spans[-1].stage == stage:
                last = spans[-1]
                spans[-1] = PhaseSpan(last.start, until, phase, stage, last.queued + queued)
            elif until > since:
                spans.append(PhaseSpan(since, until, phase, stage, queued))
            since = until
        return spans


@dataclass
class _Inside(AbstractContextManager[None], contextlib.ContextDecorator):
    """The ``with`` block of a phase; a generator would take longer than the mark."""

    phases: Phases
    phase: str
    stage: int | None

    def __enter__(self) -> None:
        self.phases.enter(self.phase, self.stage)

    def __exit__(self, *_: object) -> None:
        self.phases.leave()


class _Clock:
    """The host's clock, and the time that this thread has waited for a core."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # not Linux, or a kernel without CONFIG_SCHED_INFO
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)
        self.sees_queue = self._file is not None

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def now(self) -> tuple[float, bytes]:
        return time.perf_counter(), b"" if self._file is None else os.pread(self._file, 64, 0)

    def is_done(self, _stamp: tuple[float, bytes]) -> bool:
        return True

    def lengths(self, stamps: list[tuple[float, bytes]]) -> list[tuple[float, float]]:
        read = [(at, int(found.split()[1]) / 1e9 if found else 0.0) for at, found in stamps]
        return [(end[0] - start[0], end[1] - start[1]) for start, end in pairwise(read)]

    def free(self, stamps: list[tuple[float, bytes]]) -> None: ...


class _Events:
    """CUDA events, used again: making one takes longer than recording it."""

    sees_queue = False

    def __init__(self) -> None:
        self._free: list[torch.cuda.Event] = []

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def lengths(self, events: list[torch.cuda.Event]) -> list[tuple[float, float]]:
        return [(start.elapsed_time(end) / 1000, 0.0) for start, end in pairwise(events)]

    def free(self, events: list[torch.cuda.Event]) -> None:
        self._free += events

    def close(self) -> None: ...


def total_of(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Add up the seconds of each phase."""
    total: dict[str, float] = defaultdict(float)
    for phase, seconds in times:
        total[phase] += seconds
    return dict(total)
