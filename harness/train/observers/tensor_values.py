"""Numbers of every tensor, or of every block, into files of their own."""

from collections import deque
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch.distributed as dist
from torch import Tensor

from harness.metrics.tensor_file import ACTIVATIONS, TENSORS, TensorFile
from harness.model.spec import parameter_shapes
from harness.train.observer import Need, Observer, Row, Run
from harness.train.probe import STATISTICS, Probe
from harness.train.step import HostCopy, StepOutcome
from harness.train.tensor_norms import NORMS, TensorNorms


class Records(Observer):
    """Writes a record every ``metrics.tensors_interval`` steps, when the device has computed it."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._unread = deque[tuple[int, HostCopy]]()
        self._file: TensorFile | None = None

    def is_recorded(self, step: int) -> bool:
        """Whether a step has a record."""
        return self.run.is_due(step, self.run.job.metrics.tensors_interval)

    def open(self, name: str, values: Sequence[str], names: list[str], sizes: list[int]) -> None:
        """Open the file, on rank 0; arguments as of ``TensorFile``."""
        if dist.get_rank() == 0:
            start_step = self.run.progress.step
            self.close(None)  # if the run has gone back
            self._file = TensorFile(self.run.folder, list(values), names, sizes, start_step, name)

    def keep(self, step: int, numbers: Tensor) -> None:
        """Keep the numbers of a step, which are on the device, until they can be written."""
        if self._file is not None:
            self._unread.append((step, HostCopy(numbers)))

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        self._write(0)
        return {}

    def log(self, row: Mapping[str, Any], own: Row) -> None:
        # The step of the row has ended, so its copies have too.
        self._write(row["step"])

    def close(self, error: BaseException | None) -> None:
        self._write(self.run.job.steps if error is None else 0)
        if self._file is not None:
            self._file.close()

    def _write(self, until: int) -> None:
        """Write the records up to a step, and those after it that are in host memory."""
        while self._unread and (self._unread[0][0] <= until or self._unread[0][1].is_made):
            assert self._file is not None
            step, numbers = self._unread.popleft()
            self._file.write(step, numbers.read().numpy())


class TensorValues(Records):
    """Norms of every tensor, into ``tensors.bin`` (``harness.metrics.tensor_file``)."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._norms = TensorNorms(run.engine)

    def start(self) -> None:
        shapes = parameter_shapes(self.run.job.model)
        sizes = [prod(shape) for shape in shapes.values()]
        self.open(TENSORS, NORMS, self._norms.names, sizes)

    def before_update(self, step: int, outcome: StepOutcome) -> None:
        if self.is_recorded(step):
            self._norms.before_update()
            self._squares = outcome.squares

    def end_step(self, step: int, sums: Sequence[float]) -> Row:
        if self.is_recorded(step):
            self.keep(step, self._norms.after_update(self._squares))
        return super().end_step(step, sums)


class ActivationValues(Records):
    """Statistics of activations, into ``activations.bin``."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._probe = Probe(run.engine)

    def start(self) -> None:
        self.open(ACTIVATIONS, STATISTICS, self._probe.names, [])

    def needs(self, step: int) -> Need:
        return Need.SLOWS if self.is_recorded(step) else Need.NOTHING

    def before_update(self, step: int, outcome: StepOutcome) -> None:
        if self.is_recorded(step):
            seen = outcome.activations or self._probe(outcome.batch)
            self.keep(step, seen.statistics)
