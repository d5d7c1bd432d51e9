"""Which rank orthogonalizes which matrices, and when (no torch): the same on every rank."""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.optimizer import NEWTON_SCHULZ_STEPS

ROUND_VALUES = 2**24
"""Values that a rank orthogonalizes in one round, or one matrix if that has more. Rounds overlap: the
matrices of the next one are sent while those of this one are computed."""


@dataclass(frozen=True)
class Matrices:
    """The matrices of one tensor that the same ranks hold pieces of."""

    count: int
    rows: int
    columns: int
    holders: int
    """Number of these ranks; replicas count."""

    @property
    def values(self) -> int:
        """Values of one matrix."""
        return self.rows * self.columns


@dataclass(frozen=True)
class MatrixGroup:
    """Consecutive matrices of one tensor, which one rank orthogonalizes."""

    tensor: int
    """Index of the tensor."""
    first: int
    stop: int
    owner: int
    """Index of the rank among the holders."""

    @property
    def count(self) -> int:
        """Number of matrices."""
        return self.stop - self.first


def assign(tensors: Sequence[Matrices]) -> list[list[MatrixGroup]]:
    """Give every matrix to one of its holders, so that all have about the same FLOPs.

    The largest units come first, each to the rank with the least work (Graham's rule, longest
    processing time first). Tensors with different numbers of holders are balanced separately.

    Returns:
        The units of each round.
    """
    if not tensors:
        return []
    capacity = max(ROUND_VALUES, *(tensor.values for tensor in tensors))
    rounds: list[list[MatrixGroup]] = []
    for holders in sorted({tensor.holders for tensor in tensors}, reverse=True):
        own: list[list[MatrixGroup]] = []
        work = [(0.0, owner) for owner in range(holders)]
        filled = [(0, 0)] * holders  # the rank's last round, and its values there
        for tensor, first, stop in _pieces(tensors, holders, capacity):
            done, owner = heapq.heappop(work)
            matrices = tensors[tensor]
            flops = (stop - first) * orthogonalization_flops(matrices.rows, matrices.columns)
            heapq.heappush(work, (done + flops, owner))
            number, values = filled[owner]
            size = (stop - first) * matrices.values
            number, values = (
                (number, values + size) if values + size <= capacity else (number + 1, size)
            )
            filled[owner] = number, values
            own += [[] for _ in range(len(own), number + 1)]
            own[number].append(MatrixGroup(tensor, first, stop, owner))
        rounds += own
    return rounds


def _pieces(tensors: Sequence[Matrices], holders: int, capacity: int) -> list[tuple[int, int, int]]:
    """Return ``(tensor, first, stop)`` of the units of tensors with so many holders, most FLOPs first."""
    found = []
    for index, tensor in enumerate(tensors):
        if tensor.holders != holders:
            continue
        length = max(1, min(-(-tensor.count // holders), capacity // tensor.values))
        for first in range(0, tensor.count, length):
            stop = min(first + length, tensor.count)
            flops = (stop - first) * orthogonalization_flops(tensor.rows, tensor.columns)
            found.append((flops, index, first, stop))
    found.sort(key=lambda each: (-each[0], *each[1:]))
    return [piece for _, *piece in found]  # type: ignore[misc]


def orthogonalization_flops(rows: int, columns: int) -> float:
    """FLOPs of Newton-Schulz on one matrix: in each step X X', its square, and their product with X."""
    short, long = sorted((rows, columns))
    return NEWTON_SCHULZ_STEPS * (4.0 * short * short * long + 2.0 * short**3)
