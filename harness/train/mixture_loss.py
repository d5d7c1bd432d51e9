"""Losses and tokens of the sources of a mixture."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from harness.config.job import Job
from harness.data.batch import AnyBatch, Batch
from harness.data.prefetch import valid_by_source
from harness.parallelism.loss import Loss


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
        self.names, self._loss = job.data.source_names, loss

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
