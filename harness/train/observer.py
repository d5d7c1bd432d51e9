"""Observers of the training loop: their interface, and their view of a run."""

import enum
import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.checkpoint.state import RankGroup
from harness.config.job import Job
from harness.config.training import Sizes
from harness.data.loader import Loader
from harness.data.tokenizer import Tokenizer
from harness.metrics.columns import Metric
from harness.metrics.window import VALIDATION
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.rows import Progress
from harness.train.step import StepOutcome

Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """The run that an observer watches, on this rank."""

    job: Job
    folder: Path
    engine: Engine
    tokenizer: Tokenizer
    ranks: RankGroup
    progress: Progress
    message: Callable[[str], None]
    """Shows a line to the user; does nothing on other ranks than 0."""

    @functools.cached_property
    def sizes(self) -> Sizes:
        """Batch size and sequence length of every step."""
        return self.job.sizes

    @functools.cached_property
    def compiles(self) -> bool:
        """Whether steps call the compiler."""
        return self.job.compiles(on_gpu=self.engine.device.type == "cuda")

    @functools.cached_property
    def validation_loader(self) -> Loader:
        """The loader of held-out samples, which observers share: reset it first. ``validation`` closes it."""
        return loader_of(self.job, self.tokenizer, self.engine.rows, "validation")

    def is_logged(self, step: int) -> bool:
        """Whether the step has a row in metrics.jsonl."""
        return self.is_due(step, self.job.metrics.log_interval)

    def is_due(self, step: int, interval: int) -> bool:
        """Whether the step is one of every ``interval``, the first of an attempt, or the last."""
        ends = (self.progress.start_step + 1, self.job.steps)
        return step in ends or step % interval == 0

    def limit_seconds(self, step: int) -> int:
        """Return the timeout of a step's collectives: longer in a step that is expected to compile."""
        longer = (
            self.compiles and self.sizes.changes_length(step)
        ) or self.progress.first_step_seconds is None
        cluster = self.job.cluster
        return cluster.start_timeout_seconds if longer else cluster.step_timeout_seconds


class Need(enum.Flag):
    """What an observer needs of the loop in a step."""

    NOTHING = 0
    ASIDE = enum.auto()
    """``end_step`` is called when the step's loss has been read, and its time does not count as
    training."""
    SLOWS = enum.auto()
    """The step takes longer because of the observer; throughput leaves it out."""


class Observer:
    """Watches the training loop of one rank; a job has as many on every rank, in the same order.

    Packages add observers by entry points of the group ``harness.observer``, and
    ``training.observers`` names them. An observer is made before the run's checkpoint is loaded, by
    all ranks together. It must change neither model nor optimizer: a run has the same numbers
    without it.
    """

    section = VALIDATION
    """The section (``harness.metrics.window``) that time aside counts for."""
    metrics: Sequence[Metric] = ()
    """Columns that it adds to rows, as the console and the documentation show them."""
    metrics_of_rank: Sequence[Metric] = ()
    """Columns that ``log`` adds to the values of this rank."""
    maxima: Sequence[str] = ()
    """Columns of ``end_step`` of which a row has the maximum over all ranks; each rank returns all of them
    or none."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def start(self) -> None:
        """Begin, right before the first step; ``run.progress.step`` is the last finished one.

        It is called again when a run goes back to a checkpoint (``debug.spikes=rewind``): later steps will
        come again, and one that has begun does not end.
        """

    def needs(self, step: int) -> Need:
        """Return what a step needs; a function of the step alone, equal on all ranks."""
        return Need.NOTHING

    def begin_step(self, step: int) -> Sequence[float]:
        """Begin a step that has its data; return numbers to sum over all ranks, as many on every rank."""
        return ()

    def before_update(self, step: int, outcome: StepOutcome) -> None:
        """Look at the gradients and weights of a step before its update; must not wait for the device."""

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        """End a step when it is launched (the device may not have finished it); or aside.

        Args:
            sums: of the numbers that ``begin_step`` returned.

        Returns:
            Columns for the step's row; with ``Need.ASIDE`` they are a row of their own.
        """
        return {}

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        """Take note of a step's row, on all ranks; may add columns to ``own``, the values of this rank."""

    def close(self, error: BaseException | None) -> None:
        """End, always: after ``error`` too, and if the run has not started."""


class Periodic(Observer, ABC):
    """Does something aside every ``interval`` steps and after the last one; 0 means never."""

    def __init__(self, run: Run, interval: int) -> None:
        super().__init__(run)
        self._interval = interval

    def needs(self, step: int) -> Need:
        is_due = self._interval > 0 and (step % self._interval == 0 or step == self.run.job.steps)
        return Need.ASIDE if is_due else Need.NOTHING

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        return self.act(step) if self.needs(step) else {}

    @abstractmethod
    def act(self, step: int) -> Row:
        """Do it, on all ranks together; return columns for a row of its own."""
