"""The loader of a mixture: each row of a step is a sample of one of several sources."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import torch

from harness.config.data import DataConfig
from harness.config.mixture import errors_of_source, source_config, weights_by_step
from harness.config.training import Sizes
from harness.data.batch import Batch, Cursor, Loader, SourceLoader, stack
from harness.data.mixture import Shares, SourceOrder
from harness.data.streaming import RowStream
from harness.data.token_files import holds_out
from harness.util.errors import DataError


class MixtureLoader(Loader):
    """Loader of samples from several sources.

    A source with random access is read by its own sample numbers, as if it were alone. A streamed source has
    a stream for each row of the global batch; a stream advances when its row draws the source.

    Args:
        order: assigns samples to sources.
        loaders: loaders of the sources, by name.
        indices: the index of each source in ``Batch.sources_B``.
        rows: this loader's rows of the largest global batch.
        sizes: sizes of all steps.
    """

    samples_per_epoch = None

    def __init__(
        self,
        order: SourceOrder,
        loaders: Mapping[str, SourceLoader],
        indices: Mapping[str, int],
        rows: range,
        sizes: Sizes,
    ) -> None:
        self._order, self._cursor, self._batch_size = order, Cursor(rows, sizes), sizes.batch_size
        self._loaders = [loaders[name] for name in order.names]
        self._indices = [indices[name] for name in order.names]
        self.damaged_documents = sum(loader.damaged_documents for loader in self._loaders)
        self.note = "\n".join(f"{name}: {each.note}" for name, each in loaders.items() if each.note) or None
        self.samples_per_epoch_of = {name: loader.samples_per_epoch for name, loader in loaders.items()}

    def next(self) -> Batch:
        read, sources = [], []
        for piece in self._cursor.advance():
            source, number = self._order.which(piece.number)
            read.append(self._loaders[source].read(piece._replace(number=number)))
            sources.append(self._indices[source])
        return stack(read)._replace(sources_B=torch.tensor(sources))

    def state_dict(self) -> dict[str, Any]:
        """Return ``step``, ``samples``, the position of the order, and of all streams ``slots``."""
        state: dict[str, Any] = self._cursor.state_dict()
        state["mixture"] = self._order.state_dict(state["samples"])
        if streams := self._streams():
            state["global_batch_size"] = self._batch_size
            state["slots"] = {slot: stream.state_dict() for slot, stream in streams.items()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "mixture" not in state:
            raise DataError("the saved position is in one source, and data.kind is mixture")
        self._load_streams(state)
        self._cursor.load_state_dict(state)
        self._order.load_state_dict(state["mixture"])

    def reset(self) -> None:
        self._order.reset()
        for stream in self._streams().values():
            stream.reset()
        self._cursor.reset()

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
        size = state.get("global_batch_size", self._batch_size)
        if streams and size != self._batch_size:
            raise DataError(
                f"streamed sources are split by rows of the global batch, so they cannot resume with "
                f"training.global_batch_size={self._batch_size}; the state was saved with {size}"
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
    sizes: Sizes,
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
    names = [name for name in data.source_names if not validating or _holds_out(data, name)]
    names = names or data.source_names[:1]  # whose error says so
    loaders: dict[str, SourceLoader] = {}
    for name in names:
        with errors_of_source(data, name):
            loader = build(source_config(data, name))
        assert isinstance(loader, SourceLoader)
        loaders[name] = loader
    shares: Shares = [(0, dict.fromkeys(names, Fraction(1, len(names))))]
    if not validating:
        per_epoch = {name: loader.samples_per_epoch for name, loader in loaders.items()}
        by_step = weights_by_step(data, per_epoch)
        # A step that begins inside of a sample has other weights from the next sample on.
        shares = [(-(-sizes.position(step - 1) // sizes.seq_len), weights) for step, weights in by_step]
    indices = {name: index for index, name in enumerate(data.source_names)}
    order = SourceOrder(shares, block=sizes.batch_size, seed=seed)
    return MixtureLoader(order, loaders, indices, rows, sizes)


def _holds_out(data: DataConfig, name: str) -> bool:
    source = data.sources[name]
    if source.kind != "tokens":
        return source.holds_out
    with errors_of_source(data, name):
        return holds_out(source)
