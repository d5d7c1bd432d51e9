"""An observer of the training loop: warns of jumps of the loss, and counts them."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.train.observer import Observer, Row, Run

FACTOR = 1.5


class Spikes(Observer):
    """Counts logged losses above FACTOR times the one before, in the column ``spikes``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._spikes, self._last = 0, float("inf")

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        return {"spikes": self._spikes}

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        if row["loss"] > FACTOR * self._last:
            self._spikes += 1
            self.run.message(
                f"WARNING step {row['step']}: the loss jumped from {self._last} to {row['loss']}"
            )
        self._last = row["loss"]
