"""The loader of a mixture: each row of a step is a sample of one of several sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch

from harness.data.batch import Batch, Loader, SourceLoader, stack
from harness.data.config import DataConfig
from harness.data.mixture import Shares, SourceOrder
from harness.data.mixture_config import errors_of_source, source_config, weights_by_step
from harness.data.streaming import RowStream
from harness.errors import DataError


class MixtureLoader(Loader):
    """Loader of samples from several sources.

    A source with random access is read by its own sample numbers, as if it were alone. A streamed source has
    a stream for each row of the global batch; a stream advances when its row draws the source.

    Args:
        order: assigns samples to sources.
        loaders: loaders of the sources, by name.
        indices: the index of each source in ``Batch.sources_B``.
        rows: this loader's rows of the global batch.
        global_batch_size: samples per step.
    """

    samples_per_epoch = None

    def __init__(
        self,
        order: SourceOrder,
        loaders: Mapping[str, SourceLoader],
        indices: Mapping[str, int],
        rows: range,
        global_batch_size: int,
    ) -> None:
        self._order, self._rows, self._global_batch_size = order, rows, global_batch_size
        self._loaders = [loaders[name] for name in order.names]
        self._indices = [indices[name] for name in order.names]
        self._first = 0
        self.damaged_documents = sum(loader.damaged_documents for loader in self._loaders)
        self.samples_per_epoch_of = {name: loader.samples_per_epoch for name, loader in loaders.items()}

    def next(self) -> Batch:
        samples, sources = [], []
        for row in self._rows:
            source, number = self._order.which(self._first + row)
            samples.append(self._loaders[source].sample(row, number))
            sources.append(self._indices[source])
        self._first += self._global_batch_size
        return stack(samples)._replace(sources_B=torch.tensor(sources))

    def state_dict(self) -> dict[str, Any]:
        """Return ``step``, ``samples``, the position of the order, and of all streams ``slots``."""
        state: dict[str, Any] = {
            "step": self._first // self._global_batch_size,
            "samples": self._first,
            "mixture": self._order.state_dict(self._first),
        }
        if streams := self._streams():
            state["global_batch_size"] = self._global_batch_size
            state["slots"] = {slot: stream.state_dict() for slot, stream in streams.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "mixture" not in state:
            raise DataError("the saved position is in one source, and data.kind is mixture")
        self._load_streams(state)
        self._first = state["samples"]
        self._order.load_state_dict(state["mixture"])

    def reset(self) -> None:
        self._order.reset()
        for stream in self._streams().values():
            stream.reset()
        self._first = 0

    def close(self) -> None:
        for loader in self._loaders:
            loader.close()

    def _streams(self) -> dict[str, RowStream]:
        """Streams by ``source/row``."""
        loaders = zip(self._order.names, self._loaders, strict=True)
        return {f"{name}/{row}": stream for name, loader in loaders for row, stream in loader.streams.items()}

    def _load_streams(self, state: dict[str, Any]) -> None:
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


def build_mixture_loader(
    data: DataConfig,
    build: Callable[[DataConfig], Loader],
    *,
    global_batch_size: int,
    seed: int,
    rows: range,
    split: str,
) -> Loader:
    """Build the loader of a mixture; ``build`` builds the loader of a source, as ``build_loader`` does.

    Validation takes equally many samples of every source that holds out documents, whatever the weights.
    """
    validating = split == "validation"
    if validating:
        data.require_validation()
    names = [name for name in data.source_names if not validating or data.sources[name].holds_out]
    loaders: dict[str, SourceLoader] = {}
    for name in names:
        with errors_of_source(name):
            loader = build(source_config(data, name))
        assert isinstance(loader, SourceLoader)
        loaders[name] = loader
    shares: Shares = [(0, dict.fromkeys(names, Fraction(1, len(names))))]
    if not validating:
        sizes = {name: loader.samples_per_epoch for name, loader in loaders.items()}
        by_step = weights_by_step(data, sizes)
        shares = [((step - 1) * global_batch_size, weights) for step, weights in by_step]
    indices = {name: index for index, name in enumerate(data.source_names)}
    order = SourceOrder(shares, block=global_batch_size, seed=seed)
    return MixtureLoader(order, loaders, indices, rows, global_batch_size)
