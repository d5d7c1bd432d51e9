"""Norms of every tensor, into a file of their own."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch.distributed as dist

from harness.metrics.tensor_file import TensorFile
from harness.model.spec import parameter_shapes
from harness.train.observer import Observer, Row, Run
from harness.train.step import HostCopy, StepOutcome
from harness.train.tensor_norms import NORMS, TensorNorms


class TensorValues(Observer):
    """Writes ``tensors.bin`` every ``metrics.tensors_interval`` steps (``harness.metrics.tensor_file``)."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._norms = TensorNorms(run.engine)
        self._unread = deque[tuple[int, HostCopy]]()
        self._outcome: StepOutcome | None = None
        self._file: TensorFile | None = None

    def start(self) -> None:
        if dist.get_rank() == 0:
            shapes = parameter_shapes(self.run.job.model)
            sizes = [prod(shape) for shape in shapes.values()]
            start_step = self.run.progress.step
            self._file = TensorFile(
                self.run.folder, list(NORMS), self._norms.names, sizes, start_step
            )

    def before_update(self, step: int, outcome: StepOutcome) -> None:
        ends = (self.run.progress.start_step + 1, self.run.job.steps)
        if step in ends or step % self.run.job.metrics.tensors_interval == 0:
            self._norms.before_update()
            self._outcome = outcome

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        if self._outcome is not None:
            norms = self._norms.after_update(self._outcome.squares)
            self._outcome = None
            if self._file is not None:
                self._unread.append((step, HostCopy(norms)))
        return {}

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        # The step of the row has ended, so its copies have too.
        while self._unread and self._unread[0][0] <= row["step"]:
            assert self._file is not None
            step, norms = self._unread.popleft()
            self._file.write(step, norms.read().numpy())

    def close(self, error: BaseException | None) -> None:
        if self._file is not None:
            self._file.close()
