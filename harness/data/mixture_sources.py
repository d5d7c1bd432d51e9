"""The sources of a mixture, read in the order of ``SourceOrder``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from harness.data.config import DataConfig
from harness.data.mixture import Shares, SourceOrder
from harness.data.mixture_config import errors_of_source, source_config, weights_by_step
from harness.data.streaming import RowStream
from harness.errors import DataError


class SourceLoader(Protocol):
    """A loader of one source, which a mixture reads sample by sample.

    A source with random access has its samples by number, as if it were alone.
    """

    samples_per_epoch: int | None
    damaged_documents: int

    @property
    def streams(self) -> Mapping[int, RowStream]:
        """Streams by row of the global batch; empty for a source with random access."""
        ...

    def sample(self, row: int, number: int) -> tuple[np.ndarray, ...]:
        """Return sample ``number`` of the source; of a stream, the next sample of ``row``."""
        ...

    def close(self) -> None:
        """Stop background work."""
        ...


class Mixture:
    """Several sources.

    Args:
        order: assigns samples to sources.
        loaders: loaders of the sources, by name.
        indices: the index of each source in ``Batch.sources_B``.
        global_batch_size: rows of the global batch.
    """

    def __init__(
        self,
        order: SourceOrder,
        loaders: Mapping[str, SourceLoader],
        indices: Mapping[str, int],
        global_batch_size: int,
    ) -> None:
        self._order, self._global_batch_size = order, global_batch_size
        self._loaders = [loaders[name] for name in order.names]
        self._indices = [indices[name] for name in order.names]
        self.damaged_documents = sum(loader.damaged_documents for loader in self._loaders)
        self.samples_per_epoch_of = {name: loader.samples_per_epoch for name, loader in loaders.items()}

    def sample(self, row: int, number: int) -> tuple[tuple[np.ndarray, ...], int]:
        """Return a sample of the mixture, and the index of its source.

        Args:
            row: row of the global batch; its stream advances if the source is streamed.
            number: the sample; see ``SourceOrder.which``.
        """
        source, own = self._order.which(number)
        return self._loaders[source].sample(row, own), self._indices[source]

    def state_dict(self, number: int) -> dict[str, Any]:
        """Return the position before sample ``number``: of the order, and of all streams (``slots``)."""
        state: dict[str, Any] = {"mixture": self._order.state_dict(number)}
        if streams := self._streams():
            state["global_batch_size"] = self._global_batch_size
            state["slots"] = {slot: stream.state_dict() for slot, stream in streams.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position.

        Raises:
            DataError: see ``Loader.load_state_dict``.
        """
        if "mixture" not in state:
            raise DataError("the saved position is in one source, and data.kind is mixture")
        saved, known = state.get("slots", {}), state["mixture"]["counts"]
        streams = self._streams()
        size = state.get("global_batch_size", self._global_batch_size)
        if streams and size != self._global_batch_size:
            raise DataError(
                f"streamed sources are split by rows of the global batch, so they cannot resume with "
                f"training.global_batch_size={self._global_batch_size}; the state was saved with {size}"
            )
        for slot, stream in streams.items():
            if slot in saved:
                stream.load_state_dict(saved[slot])
            elif slot.rpartition("/")[0] in known:
                raise DataError(
                    f"the saved position has no {slot} (source/row); merge the states of all ranks"
                )
            else:
                stream.reset()  # a new source
        self._order.load_state_dict(state["mixture"])

    def reset(self) -> None:
        """Return to sample 0."""
        self._order.reset()
        for stream in self._streams().values():
            stream.reset()

    def close(self) -> None:
        """Stop background work."""
        for loader in self._loaders:
            loader.close()

    def _streams(self) -> dict[str, RowStream]:
        """Streams by ``source/row``."""
        return {
            f"{name}/{row}": stream
            for name, loader in zip(self._order.names, self._loaders, strict=True)
            for row, stream in loader.streams.items()
        }


def open_mixture(
    data: DataConfig, build: Callable[[DataConfig], Any], *, global_batch_size: int, seed: int, split: str
) -> Mixture:
    """Open the sources of a mixture.

    Validation takes equally many samples of every source that holds out documents, whatever the weights.

    Args:
        data: the mixture.
        build: builds the ``SourceLoader`` of a source, as for a source alone.
        global_batch_size: samples per step.
        seed: seed of the order.
        split: "train" or "validation".
    """
    validating = split == "validation"
    if validating:
        data.require_validation()
    names = [name for name in data.source_names if not validating or data.sources[name].holds_out]
    loaders: dict[str, SourceLoader] = {}
    for name in names:
        with errors_of_source(name):
            loaders[name] = build(source_config(data, name))
    shares: Shares = [(0, dict.fromkeys(names, Fraction(1, len(names))))]
    if not validating:
        sizes = {name: loader.samples_per_epoch for name, loader in loaders.items()}
        by_step = weights_by_step(data, sizes)
        shares = [((step - 1) * global_batch_size, weights) for step, weights in by_step]
    indices = {name: index for index, name in enumerate(data.source_names)}
    order = SourceOrder(shares, block=global_batch_size, seed=seed)
    return Mixture(order, loaders, indices, global_batch_size)
