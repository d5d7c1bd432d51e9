"""Ranks that compute longer than others for long. Imports no torch.

Only time in which a rank computes counts. Waiting for others does not: all ranks wait for the slow
one. Nor does waiting for a core: of ranks that share cores, one waits longer now, and another
later.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median

from harness.util.encoding import parse_object
from harness.util.errors import UserError

FILE = "slow_ranks.json"
KINDS = ("data", "forward", "backward", "optimizer")
"""Phases in which a rank does not wait for others."""
WINDOW = 5
"""Steps of which each rank takes the median, so that single slow steps do not count."""
IN_A_ROW = 3
"""Windows in which a rank must be slow."""
EXCESS = 0.15
"""Share of the others' median by which a rank is slow, in the mean of these windows; half of it in
each."""
SPREADS = 5.0
"""Standard deviations of the others' excesses by which it must also be larger: on busy machines all
vary."""


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
        sum(seconds for phase, seconds in phases.items() if phase.split(".")[0] == kind)
        for kind in KINDS
    ]


class SlowRanks:
    """Decide which ranks are slow.

    Args:
        stages: pipeline stage of each rank. Ranks of different stages have different work, so a
            rank is compared with the others of its stage only.
        names: host and device of each rank.
    """

    def __init__(self, stages: Sequence[object], names: Sequence[tuple[str, str]]) -> None:
        self._names = names
        self._peers: dict[int, list[int]] = {
            rank: [other for other, of in enumerate(stages) if of == stage and other != rank]
            for rank, stage in enumerate(stages)
        }
        self._excess: dict[int, deque[float]] = {
            rank: deque(maxlen=IN_A_ROW) for rank in self._peers
        }
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
            if not others or rank in self.slow or min(self._excess[rank]) <= EXCESS / 2:
                continue
            # The largest usual excess. A normal distribution's standard deviation is 1.4826 times
            # its median absolute deviation, a robust estimate.
            middle = median(others)
            usual = middle + SPREADS * 1.4826 * median(abs(each - middle) for each in others)
            if excess > max(EXCESS, usual):
                compared = [peer for peer in self._peers[rank] if peer in known]
                more = [
                    seconds[rank][kind] - median(seconds[peer][kind] for peer in compared)
                    for kind in range(len(KINDS))
                ]
                phase = KINDS[more.index(max(more))]
                found.append(SlowRank(rank, *self._names[rank], phase, round(excess, 3), step))
        self.found = [*self.found, *found]
        return found
