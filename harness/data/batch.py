"""Batches, and the interface of loaders.

B is the number of a rank's rows, T the sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.streaming import RowStream


class Batch(NamedTuple):
    """A rank's rows of one global step, in row order; all int64.

    Labels are shifted: ``labels_BT[b, t]`` is the target for ``inputs_BT[b, t]``, or IGNORE_INDEX.
    """

    inputs_BT: Tensor
    labels_BT: Tensor
    documents_BT: Tensor | None = None
    """With data.attend_across_documents=false: the number of each input's document within its row."""
    sources_B: Tensor | None = None
    """With data.kind=mixture: the index of each row's source in ``DataConfig.source_names``."""

    def each(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every tensor."""
        documents, sources = (
            None if tensor is None else function(tensor) for tensor in (self.documents_BT, self.sources_B)
        )
        return Batch(function(self.inputs_BT), function(self.labels_BT), documents, sources)


class Loader(ABC):
    """An endless sequence of batches of one split.

    Attributes:
        samples_per_epoch: samples per epoch, over all rows; None if unknown (streams) or meaningless
            (synthetic data).
        damaged_documents: number of documents that were not UTF-8, and were repaired or left out by
            data.encoding_errors.
        samples_per_epoch_of: the same for each source of a mixture; empty without a mixture.
    """

    samples_per_epoch: int | None
    damaged_documents: int = 0
    samples_per_epoch_of: Mapping[str, int | None] = MappingProxyType({})

    @abstractmethod
    def next(self) -> Batch:
        """Return this loader's rows of the next global step."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-serializable; combine the states of all ranks with ``merge_states``."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which ``state`` was saved.

        Raises:
            DataError: the state is from a stream or a mixture and this loader is not, or the reverse; or, for
                streams, it is from another global batch size or does not contain this loader's rows.
        """

    @abstractmethod
    def reset(self) -> None:
        """Return to global step 0."""

    def close(self) -> None:
        """Stop background work."""
        return


class SourceLoader(Loader):
    """A loader of one source, whose samples a mixture reads one by one."""

    @property
    def streams(self) -> Mapping[int, RowStream]:
        """Streams by row of the global batch; empty for a source with random access."""
        return {}

    @abstractmethod
    def sample(self, row: int, number: int) -> tuple[np.ndarray, ...]:
        """Return sample ``number`` of the source; for a stream, the row's next sample."""


def stack(samples: list[tuple[np.ndarray, ...]]) -> Batch:
    """Make a batch of the samples of its rows."""
    return Batch(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*samples, strict=True)))
