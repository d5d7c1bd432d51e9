"""Group the points of a sweep into job arrays by shape, within ``cluster.max_running`` over all arrays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.job import Job
from harness.launch.slurm import Shape, shape_of
from harness.launch.sweep.registry import Point

# SLURM's default MaxArraySize is 1001.
LARGEST_ARRAY = 1000


@dataclass(frozen=True)
class Array:
    """Points that are submitted as one job array.

    Attributes:
        points: the points, all of one shape.
        jobs: their jobs.
        at_once: maximum number of points that run at once.
        after: index of the array that must end first; None for an array that starts at once.
    """

    points: list[Point]
    jobs: list[Job]
    at_once: int
    after: int | None


def arrays_of(points: Sequence[tuple[Point, Job]], limit: int) -> list[Array]:
    """Group points into arrays of which at most ``limit`` points run at once, over all arrays.

    SLURM limits each array separately, so the limit is divided among the arrays. If there are more arrays
    than the limit, some wait until another one has ended.

    Args:
        points: the points to submit, with their jobs.
        limit: maximum number of points that run at once, at least 1.
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
    """Divide the limit: one for each array, then one at a time to the array with the longest queue."""
    shares = [1] * len(counts)
    for _ in range(limit - len(counts)):
        longest = max(range(len(counts)), key=lambda index: counts[index] / shares[index], default=None)
        if longest is None or counts[longest] <= shares[longest]:
            break
        shares[longest] += 1
    return shares


def _predecessors(counts: Sequence[int], limit: int) -> list[int | None]:
    """Return the array that each one waits for, so that at most ``limit`` arrays run at once."""
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
