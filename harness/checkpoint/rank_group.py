"""Calls that all ranks make, and that fail on all ranks if they fail on one."""

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
    """Rank 0 failed on behalf of all ranks; the message is rank 0's."""

    kind = "peer"


class RankGroup:
    """The ranks of a job, with a process group of their own for saving and loading.

    Saving runs in a thread beside training's collectives, and needs a longer timeout than those.

    Args:
        timeout_seconds: timeout of the group's collectives.
    """

    def __init__(self, timeout_seconds: int) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(
            backend="gloo", timeout=timedelta(seconds=timeout_seconds), group_desc=CHECKPOINT_GROUP
        )

    def on_rank_zero(self, function: Callable[[], T]) -> T:
        """Call ``function`` on rank 0 and return its result on all ranks.

        Raises:
            UserError, DamagedCheckpoint: on all ranks, if rank 0 raised one.
            RankZeroFailed: on the other ranks, if rank 0 raised anything else.
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
        """Call ``function`` on every rank; an OSError on one is raised on all.

        Raises:
            OSError: with the message of the first rank that failed.
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
        """Return the values of all ranks, on all ranks."""
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
    """An exception as kind and text, because not every exception can be pickled."""
    if isinstance(error, DamagedCheckpoint):
        return "damaged", str(error)
    return (error.kind if isinstance(error, HarnessError) else "bug"), str(error)
