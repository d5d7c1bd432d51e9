"""Calls that all ranks make, and that fail on all ranks if they fail on one."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from harness.checkpoint.catalog import DamagedCheckpoint
from harness.util.errors import HarnessError, MachineError, UserError

T = TypeVar("T")
CHECKPOINT_GROUP = "checkpoint"


class PeerFailed(MachineError):
    """Another rank failed; the message is that rank's."""

    kind = "peer"


_RAISED: dict[str, type[Exception]] = {"damaged": DamagedCheckpoint, "user": UserError}


class RankGroup:
    """The ranks of a job, with a process group of their own for saving and loading.

    Saving runs in a thread beside training's collectives, and needs a longer timeout than those.
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
            PeerFailed: on the other ranks, if rank 0 raised anything else.
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
        raise _RAISED.get(kind, PeerFailed)(value)

    def everywhere(self, function: Callable[[], Any]) -> None:
        """Call ``function`` on every rank; an error on one is raised on all.

        Args:
            function: calls no collectives, because another rank may have failed before it.

        Raises:
            UserError, DamagedCheckpoint, OSError: the one of the first rank that failed, with that rank.
            PeerFailed: the first rank raised anything else.
        """
        failure = None
        try:
            function()
        except Exception as error:
            failure = error
        found = self.gather(None if failure is None else _sendable(failure))
        if failure is not None and not isinstance(failure, UserError | DamagedCheckpoint | OSError):
            raise failure
        for rank, first in enumerate(found):
            if first is not None:
                kind, text = first
                raise (_RAISED | {"os": OSError}).get(kind, PeerFailed)(f"{text} (rank {rank})") from failure

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
    if isinstance(error, HarnessError):
        return error.kind, str(error)
    if isinstance(error, DamagedCheckpoint):
        return "damaged", str(error)
    return ("os" if isinstance(error, OSError) else "bug"), str(error)
