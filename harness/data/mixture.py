"""Mixtures: the source of every sample.

``SourceOrder`` assigns samples to sources by Tijdeman's rule (R. Tijdeman, "The chairman assignment
problem", Discrete Mathematics 32, 1980). With k sources, after every n samples the number of
samples of each source differs from its target, the sum of its share over the n samples, by at most
1 - 1/(2k - 2), which is the best possible bound. Shares may change with the sample number.

The rule alone is periodic: with two equal shares it alternates, and a row of the global batch would
see one source only. So samples are shuffled within blocks of a global batch, and the bound holds
after each block.
"""

from collections.abc import Mapping, Sequence
from fractions import Fraction
from math import lcm
from typing import Any

from harness.data.samples import random_stream

Shares = Sequence[tuple[int, Mapping[str, Fraction]]]
"""First sample, and the shares of the sources from there on; ascending, the first from sample 0."""


class SourceOrder:
    """Which source a sample comes from, and which sample of this source it is.

    Both are functions of the shares, the block and the seed. Only counts are kept, so a position is
    loaded without a replay; in return, sample numbers must not go back to an earlier block.

    Args:
        shares: share of every source; they add up to 1.
        block: number of samples that are shuffled together; fewer where the shares change next.
    """

    def __init__(self, shares: Shares, *, block: int, seed: int) -> None:
        self.names = sorted(shares[0][1])
        self._shares = shares
        self._block = block
        self._seed = seed
        self._rule = {
            "shares": [[first, _as_text(by_name)] for first, by_name in shares],
            "block": block,
            "seed": seed,
        }
        self.reset()

    def reset(self) -> None:
        self._begin(0, dict.fromkeys(self.names, 0))

    def which(self, number: int) -> tuple[int, int]:
        """Return the index of a sample's source in ``names``, and the sample's number in that source.

        Raises:
            ValueError: the sample is before the current block.
        """
        if number < self._first:
            raise ValueError(
                f"sample {number} is before the current block, which begins at {self._first}"
            )
        while number >= self._end:
            self._enter_block(self._end, self._target.counts)
        return self._members[number - self._first]

    def counts(self, number: int) -> dict[str, int]:
        """Return how many of the samples before ``number`` come from each source."""
        if number == self._end:
            return dict(zip(self.names, self._target.counts, strict=True))
        self.which(number)
        counts = list(self._counts)
        for source, _ in self._members[: number - self._first]:
            counts[source] += 1
        return dict(zip(self.names, counts, strict=True))

    def state_dict(self, number: int) -> dict[str, Any]:
        """Return the position before sample ``number``, JSON-serializable."""
        counts = self.counts(number)
        return {
            "samples": number,
            "counts": counts,
            "block": {
                "first": self._first,
                "counts": dict(zip(self.names, self._counts, strict=True)),
            },
            "origin": self._origin,
            "rule": self._rule,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        If the rule has changed since, targets are counted from this position on; every source
        continues with its next sample.
        """
        if state["rule"] != self._rule:
            self._begin(
                state["samples"], {name: state["counts"].get(name, 0) for name in self.names}
            )
            return
        self._begin(state["origin"]["samples"], state["origin"]["counts"])
        counts = [state["block"]["counts"][name] for name in self.names]
        self._enter_block(state["block"]["first"], counts)

    def _begin(self, number: int, counts: dict[str, int]) -> None:
        self._origin = {"samples": number, "counts": counts}
        self._target = _Target(self._shares, number, [counts[name] for name in self.names])
        self._enter_block(number, self._target.counts)

    def _enter_block(self, first: int, counts: list[int]) -> None:
        changes = (change for change, _ in self._shares if change > first)
        self._first = first
        self._end = min([first + self._block, *changes])
        self._counts = list(counts)
        self._target.seek(first, counts)
        sources = [self._target.next() for _ in range(self._end - first)]
        shuffled = random_stream("mixture", self._seed, first).permutation(len(sources))
        taken = list(counts)
        self._members = []
        for index in shuffled:
            source = sources[index]
            self._members.append((source, taken[source]))
            taken[source] += 1


def _as_text(shares: Mapping[str, Fraction]) -> dict[str, str]:
    return {name: str(share) for name, share in shares.items()}


class _Target:
    """Tijdeman's rule in integers: a share is a numerator over the common denominator ``whole``.

    Sample c of a source (from 0) may be assigned once the source's target has reached c + 1/(2k -
    2), and must be assigned before the target exceeds c + 1 - 1/(2k - 2). Among the sources that
    may have the next sample, it goes to the one with the earliest such limit.
    """

    def __init__(self, shares: Shares, origin: int, counts: Sequence[int]) -> None:
        names = sorted(shares[0][1])
        self._whole = 1
        for _, by_name in shares:
            self._whole = lcm(self._whole, *(share.denominator for share in by_name.values()))
        self._units = max(1, 2 * len(names) - 2)
        begins = [max(first, origin) for first, _ in shares]
        ends: list[int | None] = [*begins[1:], None]
        self._base = list(counts)
        # Per source: (begin, end, numerator of the share) of every interval after the origin.
        self._intervals: list[list[tuple[int, int | None, int]]] = [[] for _ in names]
        for begin, end, (_, by_name) in zip(begins, ends, shares, strict=True):
            if end is None or end > begin:
                for intervals, name in zip(self._intervals, names, strict=True):
                    intervals.append((begin, end, int(by_name[name] * self._whole)))
        self.seek(origin, counts)

    def seek(self, number: int, counts: Sequence[int]) -> None:
        self._number = number
        self.counts = list(counts)
        self._windows = [self._window(source) for source in range(len(self.counts))]

    def next(self) -> int:
        """Assign the next sample; return the index of its source."""
        may = [source for source, (begin, _) in enumerate(self._windows) if begin <= self._number]
        source = min(may, key=lambda source: (self._windows[source][1], source))
        self.counts[source] += 1
        self._windows[source] = self._window(source)
        self._number += 1
        return source

    def _window(self, source: int) -> tuple[float, float]:
        """First and last sample number at which the source's next sample may be assigned."""
        goal = (self.counts[source] - self._base[source]) * self._units
        if self._units == 1:
            return 0, 0
        begin = self._first_with(source, (goal + 1) * self._whole)
        return begin, self._first_with(source, (goal + self._units - 1) * self._whole + 1)

    def _first_with(self, source: int, wanted: int) -> float:
        """Smallest n such that target(n + 1) * units >= wanted."""
        reached = 0
        for begin, end, share in self._intervals[source]:
            share *= self._units
            if share:
                steps = max(1, -(-(wanted - reached) // share))
                if end is None or begin + steps <= end:
                    return begin + steps - 1
                reached += (end - begin) * share
        return float("inf")
