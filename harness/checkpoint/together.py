"""Calls that all ranks make together, and that fail on all when they fail on one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.errors import HarnessError, MachineError, UserError
from harness.loop.setup import CHECKPOINT_GROUP

T = TypeVar("T")


class RankZeroFailed(MachineError):
    """Rank 0 could not do what it does for all; it says what."""

    kind = "peer"


class Together:
    """The ranks of a job, as saving and loading see them.

    They have a process group of their own: saving goes on in a thread beside training's collectives, and may
    take longer than any of those.

    Args:
        timeout_seconds: longest wait for each other.
    """

    def __init__(self, timeout_seconds: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds), group_desc=CHECKPOINT_GROUP
        )

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """What rank 0's call returns, on all ranks.

        Raises:
            HarnessError: what it raised on rank 0, on all.
            DamagedCheckpoint: likewise.
        """
        if self.rank == 0:
            try:
                value = function()
            except BaseException as error:
                self._broadcast(_sendable(error))
                raise
            self._broadcast(("value", value))
            return value
        kind, value = self._broadcast(None)
        if kind == "value":
            return value
        raise {"damaged": DamagedCheckpoint, "user": UserError}.get(kind, RankZeroFailed)(value)

    def everywhere(self, function: Callable[[], Any]) -> None:
        """Calls on every rank; a failure of the disk on one is one on all.

        Raises:
            OSError: with what the first that failed says.
        """
        failure = None
        try:
            function()
        except OSError as error:
            failure = f"{error} (rank {self.rank})"
        first = next((each for each in self.gather(failure) if each is not None), None)
        if first is not None:
            raise OSError(first)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, on all ranks."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _broadcast(self, value: Any) -> Any:
        box = [value]
        if self.size > 1:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]


def _sendable(error: BaseException) -> tuple[str, str]:
    """An exception as kind and text: not every one can be pickled and made again."""
    if isinstance(error, DamagedCheckpoint):
        return "damaged", str(error)
    return (error.kind if isinstance(error, HarnessError) else "bug"), str(error)
