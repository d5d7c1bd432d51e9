"""Job arrays of a sweep: points of one shape make one, and together they keep to ``cluster.max_running``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.cluster.slurm import Shape, shape_of
from harness.job import Job
from harness.sweep.registry import Point

# SLURM's MaxArraySize is 1001 unless a site says otherwise.
LARGEST_ARRAY = 1000


@dataclass(frozen=True)
class Array:
    """Points that are submitted as one job array.

    Attributes:
        points: the points, all of one shape.
        jobs: their jobs.
        at_once: how many of them may run at once.
        after: index of the array that has to end first; None for an array that starts right away.
    """

    points: list[Point]
    jobs: list[Job]
    at_once: int
    after: int | None


def arrays_of(points: Sequence[tuple[Point, Job]], limit: int) -> list[Array]:
    """Arrays of which at most ``limit`` points run at once, all arrays together.

    SLURM limits each array for itself. So arrays share the limit; where there are more of them than it
    allows, some wait for the end of another.

    Args:
        points: what to submit.
        limit: how many points may run at once, at least 1.
    """
    groups: dict[Shape, list[tuple[Point, Job]]] = {}
    for point, job in points:
        groups.setdefault(shape_of(job), []).append((point, job))
    pieces = [
        group[start : start + LARGEST_ARRAY]
        for group in groups.values()
        for start in range(0, len(group), LARGEST_ARRAY)
    ]
    counts = [len(piece) for piece in pieces]
    after = _predecessors(counts, limit)
    at_once = _shares(counts, limit) if len(pieces) <= limit else [1] * len(pieces)
    return [
        Array([point for point, _ in piece], [job for _, job in piece], share, before)
        for piece, share, before in zip(pieces, at_once, after, strict=True)
    ]


def _shares(counts: Sequence[int], limit: int) -> list[int]:
    """Shares out the limit: one to each array, then one at a time to the array with the longest queue."""
    shares = [1] * len(counts)
    for _ in range(limit - len(counts)):
        longest = max(range(len(counts)), key=lambda index: counts[index] / shares[index], default=None)
        if longest is None or counts[longest] <= shares[longest]:
            break
        shares[longest] += 1
    return shares


def _predecessors(counts: Sequence[int], limit: int) -> list[int | None]:
    """The array that each one waits for, so that no more than ``limit`` arrays run at once."""
    chains = min(limit, len(counts))
    last: list[int | None] = [None] * chains
    lengths = [0] * chains
    after = []
    for index, count in enumerate(counts):
        shortest = lengths.index(min(lengths))
        after.append(last[shortest])
        last[shortest] = index
        lengths[shortest] += count
    return after
