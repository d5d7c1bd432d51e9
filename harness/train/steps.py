"""Launched steps whose values the host has not read yet."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from harness.data.loader import Batch
from harness.train.rows import Row
from harness.train.step_outcome import HostCopy, StepOutcome

LATE_STEPS = {"cpu": 0, "cuda": 1}
"""How many steps later the host may read the values of a step. On a CPU there is no device to wait for."""


@dataclass(frozen=True)
class Noted:
    """Values of a step's row beside its outcome, as they were before the next step was launched."""

    columns: Row
    """Of the observers."""
    maxima: Row
    """This rank's values of columns that have the maximum over all ranks."""
    sources: Row
    """Tokens and epochs of the sources of a mixture."""
    loads: HostCopy | None
    """``Balance.load_ME``."""


@dataclass(frozen=True)
class Step:
    """A step that the host has launched; the device may not have finished it."""

    number: int
    batch: Batch
    outcome: StepOutcome
    lr: float
    noted: Noted | None = None
    """None if no row of it is logged."""


class StepQueue:
    """Steps to read, oldest first.

    On a GPU, values are read, and their row is written, when the next step is launched, unless they are
    needed before. So the host does not wait for the device to finish its queue, and is never more than one
    step ahead of it.
    """

    def __init__(self, device_type: str) -> None:
        self._late = LATE_STEPS[device_type]
        self._steps: deque[Step] = deque()

    def add(self, step: Step) -> None:
        """Add the step that was just launched."""
        self._steps.append(step)

    def __len__(self) -> int:
        return len(self._steps)

    def due(self, *, drain: bool) -> Iterator[Step]:
        """Remove and yield the steps to read now; with ``drain`` all of them."""
        while len(self._steps) > (0 if drain else self._late):
            yield self._steps.popleft()
