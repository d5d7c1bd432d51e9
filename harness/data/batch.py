"""Batches: a rank's rows of one global step, their counts, and their copy to the device. Imports no torch.

B is the number of a rank's rows, T the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

IGNORE_INDEX = -100
"""The label of a position that does not count towards the loss."""
PADDING = -1
"""The document number of padding: no position learns from it, and no other attends to it."""


class Batch(NamedTuple):
    """A rank's rows of one global step, in row order; all int64.

    Labels are shifted: ``labels_BT[b, t]`` is the target for ``inputs_BT[b, t]``, or IGNORE_INDEX.
    """

    inputs_BT: Tensor
    labels_BT: Tensor
    documents_BT: Tensor | None = None
    """With data.attend_across_documents=false: the number of each input's document within its row,
    or PADDING."""
    sources_B: Tensor | None = None
    """With data.kind=mixture: the index of each row's source in ``DataConfig.source_names``."""
    real_B: Tensor | None = None
    """After ``fill``: false for the empty rows, which routers and counts leave out; attention does
    not, so that its mask stays as it is. None: no row of any rank is empty."""

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.inputs_BT.shape
        return rows, length

    def each(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every tensor."""
        columns = (None if tensor is None else function(tensor) for tensor in self)
        return Batch(*columns)  # type: ignore[arg-type]


class OtherBatch(Protocol):
    """A rank's rows of one global step, in row order, of something else than tokens of documents."""

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def sources_B(self) -> None:
        """Samples come from one source."""

    def count_valid(self) -> int: ...

    def each(self, function: Callable[[Tensor], Tensor]) -> OtherBatch: ...

    def to(self, device: torch.device) -> OtherBatch: ...


AnyBatch = Batch | OtherBatch


class DeviceBatch(Batch):
    """A batch on the device; its labels and tokens were counted on the host before the copy."""

    valid_by_source: dict[int, int]
    counts: tuple[int, int]


def count_valid(batch: AnyBatch) -> int:
    """Number of tokens that have a loss: labels that are not ignored."""
    return sum(valid_by_source(batch).values()) if isinstance(batch, Batch) else batch.count_valid()


def count_tokens(batch: AnyBatch) -> tuple[int, int]:
    """Number of tokens, without padding, and of the rows that have some."""
    if isinstance(batch, DeviceBatch):
        return batch.counts
    rows, length = batch.shape
    if not isinstance(batch, Batch):
        return rows * length, rows
    if batch.documents_BT is None:
        rows = rows if batch.real_B is None else int(batch.real_B.sum())
        return rows * length, rows
    tokens_B = (batch.documents_BT != PADDING).sum(1)
    return int(tokens_B.sum()), int(tokens_B.count_nonzero())


def valid_by_source(batch: Batch) -> dict[int, int]:
    """Number of labels that are not ignored, by the index of their source; 0 without ``sources_B``."""
    if isinstance(batch, DeviceBatch):
        return batch.valid_by_source
    numbers = (batch.labels_BT != IGNORE_INDEX).sum(1).tolist()
    sources = [0] * len(numbers) if batch.sources_B is None else batch.sources_B.tolist()
    counts = dict.fromkeys(sources, 0)
    for source, number in zip(sources, numbers, strict=True):
        counts[source] += number
    return counts


def fill(batch: Batch, rows: int) -> Batch:
    """Append empty rows to a rank's, so that it has ``rows``: no label counts, and all is padding.

    Their losses and gradients are 0. The scales of a float8 tensor may see their values.
    """

    def filled(tensor: Tensor, value: int) -> Tensor:
        longer = tensor.new_full((rows, *tensor.shape[1:]), value)
        longer[: len(tensor)] = tensor
        return longer

    documents_BT = batch.documents_BT
    sources_B = batch.sources_B
    whole = Batch(
        filled(batch.inputs_BT, 0),
        filled(batch.labels_BT, IGNORE_INDEX),
        None if documents_BT is None else filled(documents_BT, PADDING),
        None if sources_B is None else filled(sources_B, 0),
        filled(batch.inputs_BT.new_ones(batch.shape[0]), 0).bool(),
    )
    if not isinstance(batch, DeviceBatch):
        return whole
    on_device = DeviceBatch(*whole)
    on_device.valid_by_source = batch.valid_by_source
    on_device.counts = batch.counts
    return on_device


def place(batch: AnyBatch, device: torch.device) -> Any:
    """Count a batch's labels and tokens; copy it to the device asynchronously, by pinned memory."""
    if isinstance(batch, DeviceBatch):
        return batch
    if not isinstance(batch, Batch):
        return batch.to(device)
    copy = batch
    if device.type != "cpu":
        copy = batch.each(lambda tensor: tensor.pin_memory().to(device, non_blocking=True))
    on_device = DeviceBatch(*copy)
    on_device.valid_by_source = valid_by_source(batch)
    on_device.counts = count_tokens(batch)
    return on_device
