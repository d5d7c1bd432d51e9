"""A launched step: its loss and gradient norm, which the device may not have computed yet."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, InitVar, dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from harness.config.job import Job
from harness.data.batch import AnyBatch, Batch, valid_by_source
from harness.metrics.spikes import Limits
from harness.parallelism.loss import Loss
from harness.train.probe import Activations
from harness.train.rows import Row

HOST = torch.device("cpu")


class HostCopy:
    """A copy of a tensor in host memory, which the device may not have made yet."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to(HOST, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if values.is_cuda else None

    @property
    def is_made(self) -> bool:
        return self._copied is None or self._copied.query()

    def read(self) -> Tensor:
        """Return the copy; waits for it, but not for work queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


@dataclass(eq=False)
class StepOutcome:
    """Loss and gradient norm of one step; the same on every rank, except ``local_loss``.

    The device may not have computed the values yet. The first access to one of them waits until
    they are copied to the host, but not for work queued later.

    Args:
        sums: summed over the world, on the device: square of the gradient norm, loss, the loss of
            multi-token prediction if the model has it, and of a mixture each source's share of the
            loss.
        own_loss: this rank's share of the loss.
        squares: this rank's share of each gradient's squared norm.
        needed: ``Balance.take_needed``; its sum over the world is the last one of ``sums``, if it is not
            empty.
        tokens: tokens of the global batch, without padding.
        valid_tokens: those that the loss counts.
        source_tokens: the same for each source of a mixture.
        local_weight: factor from ``own_loss`` to the mean loss of this rank's tokens; None on ranks
            that compute no loss.
        batch: this rank's rows of the global batch, on the device.
        activations: what a QK-clip has measured on the batch; None: it had no need.
        stop_requested: whether any rank was asked to stop.
        beside: sums of the values that were summed beside these.
    """

    sums: InitVar[Tensor]
    own_loss: InitVar[Tensor]
    squares: Tensor
    needed: Tensor
    _: KW_ONLY
    tokens: int
    valid_tokens: int
    source_tokens: Sequence[int]
    local_weight: float | None
    batch: AnyBatch
    activations: Activations | None = None
    stop_requested: bool
    beside: Sequence[float] = ()

    def __post_init__(self, sums: Tensor, own_loss: Tensor) -> None:
        square_sum, *loss_sums = sums.unbind()
        all_needed = [loss_sums.pop()] if len(self.needed) else []
        # The one number that decides about the update: it is not finite if a loss is not finite, or
        # if rows of experts had no room.
        self.norm = (square_sum + 0 * sum(loss_sums)).sqrt()
        for each in all_needed:
            self.norm = self.norm.where(each == 0, torch.nan)
        values = torch.stack([square_sum.sqrt(), own_loss.double(), *loss_sums, *all_needed])
        self._num_values = len(values) - len(all_needed)
        self._on_device = values
        self._values = HostCopy(values)

    def drop_above(self, limits: Limits) -> None:
        """Have the update dropped, as one that is not finite, if a value exceeds its limit."""
        is_usual = self._on_device[0] <= limits.grad_norm.most
        is_usual &= self._on_device[2] <= limits.loss.most
        self.norm = self.norm.where(is_usual, torch.nan)

    @property
    def loss(self) -> float:
        """Mean loss per valid token of the global batch, nats."""
        return self._value(2)

    @property
    def mtp_loss(self) -> float | None:
        """Loss of multi-token prediction per valid token; None if the model has none."""
        return self._value(3) if self._num_values > 3 + len(self.source_tokens) else None

    @property
    def source_losses(self) -> list[float | None]:
        """Mean loss per valid token of each source of a mixture; None for a source without one."""
        first = self._num_values - len(self.source_tokens)
        return [
            self._value(first + index) * self.valid_tokens / tokens if tokens else None
            for index, tokens in enumerate(self.source_tokens)
        ]

    @property
    def grad_norm(self) -> float:
        """Global 2-norm of the gradients before clipping."""
        return self._value(0)

    @property
    def local_loss(self) -> float | None:
        """Mean loss per valid token of this rank's rows; None on ranks that compute no loss."""
        return None if self.local_weight is None else self._value(1) * self.local_weight

    @property
    def is_finite(self) -> bool:
        """Whether losses and norm are finite; the same on every rank, because they are global sums."""
        return all(map(math.isfinite, (self.loss, self.grad_norm, self.mtp_loss or 0.0)))

    @property
    def has_room(self) -> bool:
        """Whether all rows of experts had room; the same on every rank."""
        return not len(self.needed) or self._value(self._num_values) == 0

    def _value(self, index: int) -> float:
        return float(self._values.read()[index])


class LossSum(NamedTuple):
    """Sum of the losses of valid tokens, and their number."""

    loss: float
    tokens: float

    @property
    def mean(self) -> float:
        """Mean loss per valid token; 0 without one."""
        return self.loss / max(1, self.tokens)


def add_up(batches: Sequence[Sequence[LossSum]]) -> list[LossSum]:
    """Add up the sums of several batches."""
    return [LossSum(*map(sum, zip(*sums, strict=True))) for sums in zip(*batches, strict=True)]


class SourceLosses:
    """This rank's share of the loss and of the valid tokens of each source.

    Without a mixture all lists are empty and nothing is computed.
    """

    def __init__(self, job: Job, loss: Loss) -> None:
        self.names = job.data.source_names
        self._loss = loss

    @contextmanager
    def recorded(self, batch: AnyBatch) -> Iterator[list[Tensor]]:
        """Context manager for the passes of a batch; the list receives the losses of rows."""
        if batch.sources_B is None:
            yield []
            return
        with self._loss.recording() as rows:
            yield rows

    def losses(self, batch: AnyBatch, rows: Sequence[Tensor]) -> list[Tensor]:
        """Add up recorded losses of rows by source, on the device; 0 on ranks that compute no loss."""
        if batch.sources_B is None:
            return []
        by_source = torch.zeros(len(self.names), dtype=torch.float64, device=batch.sources_B.device)
        if rows:
            by_source.index_add_(0, batch.sources_B, torch.cat(list(rows)).double())
        return list(by_source)

    def tokens(self, batch: AnyBatch) -> list[int]:
        """Return the valid tokens of each source."""
        if batch.sources_B is None:
            return []
        assert isinstance(batch, Batch)
        found = valid_by_source(batch)
        return [found.get(index, 0) for index in range(len(self.names))]


LATE_STEPS = {"cpu": 0, "cuda": 1}
"""How many steps later the host reads the values of a step and writes its row, unless needed before.

So the host does not wait for the device to finish its queue, and is never more than one step ahead
of it. On a CPU there is no device to wait for."""


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
