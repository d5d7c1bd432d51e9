"""Times of the phases of a step on one rank, and ranks that are slower than others. Imports no torch.

A mark is a point in time at which the phase changes: a CUDA event on the current stream, or the clock on a
CPU. The time of a phase is the time from its marks to the next ones. So times are exclusive, add up to the
step, and a collective counts only while computation waits for it.

The host never waits for an event. Times of a step are read when its last event is done. On a CPU a mark also
reads how long the kernel let this thread wait for a core.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.metrics.window import EXCLUDED
from harness.util.encoding import parse_object
from harness.util.errors import UserError

if TYPE_CHECKING:
    import torch

HOST = "host"
"""Time in no other phase: launching, reading values, writing metrics."""
SUMS = "sums"
"""Sums over the world. They end at the same time on all ranks."""
_SCHEDSTAT = "/proc/thread-self/schedstat"
"""Nanoseconds on a core, nanoseconds waiting for one, and turns, of the thread that opens it (Linux,
Documentation/scheduler/sched-stats.rst)."""


class Span(NamedTuple):
    """A time in one phase without interruption, in seconds from the start of the step."""

    start: float
    end: float
    phase: str
    stage: int
    queued: float = 0.0
    """Seconds of it in which the thread could run and had no core; 0.0 where the system does not say."""


@dataclass(frozen=True)
class StepPhases:
    """Phases of one step on one rank."""

    step: int
    spans: list[Span]

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of each phase."""
        total: dict[str, float] = defaultdict(float)
        for start, end, phase, _, _ in self.spans:
            total[phase] += end - start
        return dict(total)

    @property
    def passes(self) -> dict[int, dict[str, float]]:
        """Seconds of the forward and backward phases of each pipeline stage."""
        total: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for start, end, phase, stage, _ in self.spans:
            if phase.startswith(("forward.", "backward.")):
                total[stage][phase] += end - start
        return {stage: dict(total[stage]) for stage in sorted(total)}

    @property
    def on_core(self) -> dict[str, float]:
        """Seconds of each phase, without those in which the thread waited for a core."""
        total: dict[str, float] = defaultdict(float)
        for start, end, phase, _, queued in self.spans:
            # A thread that loses its core between both readings of a mark has waited in the next span.
            total[phase] += max(0.0, end - start - queued)
        return dict(total)

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

    def inside(self, phase: str, stage: int | None = None) -> AbstractContextManager[None]:
        """Count the ``with`` block as a phase."""
        return _Inside(self, phase, stage)

    @property
    def sees_queue(self) -> bool:
        """Whether spans have the time in which the thread waited for a core."""
        return self._stamps.sees_queue  # type: ignore[no-any-return]

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
        marks, self._marks = self._marks, []
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

    def _spans(self, marks: list[tuple[Any, str, int]], end: Any) -> list[Span]:
        spans: list[Span] = []
        since = 0.0
        lengths = self._stamps.lengths([stamp for stamp, _, _ in marks] + [end])
        for (_, phase, stage), (seconds, queued) in zip(marks, lengths, strict=True):
            until = since + seconds
            if spans and spans[-1].phase == phase and spans[-1].stage == stage:
                last = spans[-1]
                spans[-1] = Span(last.start, until, phase, stage, last.queued + queued)
            elif until > since:
                spans.append(Span(since, until, phase, stage, queued))
            since = until
        return spans


class _Inside(AbstractContextManager[None]):
    """The ``with`` block of a phase; a generator would take longer than the mark."""

    def __init__(self, phases: Phases, phase: str, stage: int | None) -> None:
        self._phases, self._phase, self._stage = phases, phase, stage

    def __enter__(self) -> None:
        self._phases.enter(self._phase, self._stage)

    def __exit__(self, *_: object) -> None:
        self._phases.leave()


class _Clock:
    """The host's clock, and the time that this thread has waited for a core."""

    def __init__(self) -> None:
        self._file: int | None = None
        with contextlib.suppress(OSError):  # not Linux, or a kernel without CONFIG_SCHED_INFO
            self._file = os.open(_SCHEDSTAT, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def sees_queue(self) -> bool:
        return self._file is not None

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
        from torch.cuda import Event

        self._new, self._free = functools.partial(Event, enable_timing=True), list[Event]()

    def now(self) -> torch.cuda.Event:
        event = self._free.pop() if self._free else self._new()
        event.record()
        return event

    def is_done(self, event: torch.cuda.Event) -> bool:
        return event.query()

    def lengths(self, events: list[torch.cuda.Event]) -> list[tuple[float, float]]:
        return [(start.elapsed_time(end) / 1000, 0.0) for start, end in pairwise(events)]

    def free(self, events: list[torch.cuda.Event]) -> None:
        self._free += events

    def close(self) -> None: ...


FILE = "slow_ranks.json"
KINDS = ("data", "forward", "backward", "optimizer")
"""Phases in which a rank does not wait for others."""
WINDOW = 5
"""Steps of which each rank takes the median, so that single slow steps do not count."""
IN_A_ROW = 3
"""Windows in which a rank must be slow."""
EXCESS = 0.15
"""Share of the others' median by which a rank is slow, in the mean of these windows; half of it in each."""
SPREADS = 5.0
"""Standard deviations of the others' excesses by which it must also be larger: on busy machines all vary."""


@dataclass(frozen=True)
class SlowRank:
    """A rank that has become slow, as in ``slow_ranks.json``."""

    rank: int
    host: str
    device: str
    phase: str
    """The one of ``KINDS`` with the largest excess."""
    excess: float
    """Excess over the median of the other ranks, as a share of it."""
    step: int
    """Step in which it was found."""
    until: int | None = None
    """Step in which it was no longer slow; None: it still was at the end."""

    def __str__(self) -> str:
        until = "" if self.until is None else f", until step {self.until}"
        return (
            f"rank {self.rank} ({self.host}, {self.device}) computes {self.excess:.0%} longer than the other "
            f"ranks, most in {self.phase}; found in step {self.step}{until}"
        )


def slow_ranks(run_dir: Path) -> list[SlowRank]:
    """Return the ranks that the last attempt of a run found slow."""
    path = run_dir / FILE
    try:
        found = parse_object(path.read_bytes())["slow"] if path.is_file() else []
        return [SlowRank(**each) for each in found]
    except (ValueError, TypeError, KeyError) as error:
        raise UserError(f"{path}: is damaged ({error}); remove it to continue") from error


def own_seconds(phases: Mapping[str, float]) -> list[float]:
    """Return the seconds of each of ``KINDS``, from the seconds of all phases of a step."""
    return [
        sum(seconds for phase, seconds in phases.items() if phase.split(".")[0] == kind) for kind in KINDS
    ]


class SlowRanks:
    """Decide which ranks compute longer than others for long.

    Only time in which a rank computes counts. Waiting for others does not: all ranks wait for the slow one.
    Nor does waiting for a core: of ranks that share cores, one waits longer now, and another later.

    Args:
        stages: pipeline stage of each rank. Ranks of different stages have different work, so a rank is
            compared with the others of its stage only.
        names: host and device of each rank.
    """

    def __init__(self, stages: Sequence[object], names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self._peers: dict[int, list[int]] = {
            rank: [other for other, of in enumerate(stages) if of == stage and other != rank]
            for rank, stage in enumerate(stages)
        }
        self._excess: dict[int, deque[float]] = {rank: deque(maxlen=IN_A_ROW) for rank in self._peers}
        self.found: list[SlowRank] = []
        """Ranks that were or are slow."""

    @property
    def slow(self) -> dict[int, SlowRank]:
        """Ranks that are slow now."""
        return {each.rank: each for each in self.found if each.until is None}

    def observe(self, seconds: Sequence[Sequence[float]], step: int) -> list[SlowRank]:
        """Take the medians of a window, and return the ranks that have become slow with it.

        Args:
            seconds: of each rank the seconds of each of ``KINDS``; zeros: unknown.
        """
        known = {rank for rank in self._peers if sum(seconds[rank])}
        for rank in known:
            peers = [sum(seconds[peer]) for peer in self._peers[rank] if peer in known]
            if not peers:
                continue
            last = self._excess[rank]
            last.append(sum(seconds[rank]) / median(peers) - 1)
            if last[-1] <= EXCESS / 2:
                self.found = [
                    replace(each, until=step) if each.rank == rank and each.until is None else each
                    for each in self.found
                ]
        means = {rank: mean(last) for rank, last in self._excess.items() if len(last) == IN_A_ROW}
        found = []
        for rank, excess in means.items():
            others = [means[peer] for peer in self._peers[rank] if peer in means]
            steadily = bool(others) and min(self._excess[rank]) > EXCESS / 2
            if steadily and excess > max(EXCESS, _usual_most(others)) and rank not in self.slow:
                compared = [peer for peer in self._peers[rank] if peer in known]
                more = [
                    seconds[rank][kind] - median(seconds[peer][kind] for peer in compared)
                    for kind in range(len(KINDS))
                ]
                phase = KINDS[more.index(max(more))]
                found.append(SlowRank(rank, *self._names[rank], phase, round(excess, 3), step))
        self.found = [*self.found, *found]
        return found


def _usual_most(excesses: Sequence[float]) -> float:
    """Return the largest usual excess: the median and SPREADS standard deviations, estimated robustly."""
    middle = median(excesses)
    # A normal distribution's standard deviation is 1.4826 times its median absolute deviation.
    return middle + SPREADS * 1.4826 * median(abs(each - middle) for each in excesses)
