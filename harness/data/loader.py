"""The loader: the samples of every step, and resuming.

Row j of global step s is sample s * global_batch_size + j, a function of (data, tokenizer, seed) and that
number. A rank is assigned rows and reads only those, so neither the loss curve of a run nor its state depends
on the number of ranks.

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

from harness.data.cache import open_cache
from harness.data.config import DataConfig
from harness.data.mixture_sources import Mixture, open_mixture
from harness.data.samples import IGNORE_INDEX, PackedSamples, Samples, SyntheticSamples
from harness.data.sources import open_dataset, require_column, source_of
from harness.data.streaming import RowStream
from harness.data.tokenizer import Tokenizer
from harness.data.vocabulary import check_vocab_size
from harness.errors import DataError

__all__ = ["IGNORE_INDEX", "Batch", "Loader", "build_loader", "merge_states"]


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
        samples_per_epoch_of: samples per epoch of each source of a mixture; empty without a mixture.
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


def build_loader(
    data: DataConfig,
    tokenizer: Tokenizer,
    *,
    seq_len: int,
    global_batch_size: int,
    seed: int,
    rows: range,
    split: str = "train",
    model_vocab_size: int,
    wait_for_all: Callable[[], None] | None = None,
    is_builder: bool = True,
) -> Loader:
    """Build the loader of ``rows``, a part of ``range(global_batch_size)``.

    Args:
        seq_len: tokens per sample (T).
        split: "train", or "validation": the same samples in the same order after every reset.
        model_vocab_size: number of rows of the model's embedding; every token id must be smaller.
        wait_for_all: a barrier over all ranks; called between building and opening the token cache, if any.
        is_builder: whether this rank builds the cache if it is missing.

    Raises:
        ConfigError: no documents are held out for validation, or the tokenizer has more tokens than the
            model's vocabulary.
        DataError: the data is missing, unreadable, or too small.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is train or validation, not {split}")
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= global_batch_size:
        raise ValueError(f"rows {rows} are not part of a global batch of {global_batch_size}")
    if data.kind == "mixture":
        mixture = open_mixture(
            data,
            lambda source: build_loader(
                source,
                tokenizer,
                seq_len=seq_len,
                global_batch_size=global_batch_size,
                seed=seed,
                rows=rows,
                split=split,
                model_vocab_size=model_vocab_size,
                wait_for_all=wait_for_all,
                is_builder=is_builder,
            ),
            global_batch_size=global_batch_size,
            seed=seed,
            split=split,
        )
        return _MixtureLoader(mixture, rows, global_batch_size)
    if data.kind == "synthetic":
        synthetic = SyntheticSamples(
            split=split,
            seq_len=seq_len,
            seed=seed,
            vocab_size=model_vocab_size,
            mask_fraction=data.mask_fraction,
        )
        return _NumberedLoader(synthetic, rows, global_batch_size)
    check_vocab_size(tokenizer.vocab_size, model_vocab_size)
    if data.kind == "hub" and data.streaming:
        return _StreamLoader(
            _build_streams(data, tokenizer, seq_len, global_batch_size, rows, split), global_batch_size
        )
    source, held_out = source_of(data, split)
    tokenized = open_cache(
        source,
        tokenizer,
        split=split,
        held_out=held_out,
        cache_dir=data.cache_dir,
        wait_for_all=wait_for_all,
        is_builder=is_builder,
    )
    packed = PackedSamples(
        tokenized,
        seq_len=seq_len,
        seed=seed,
        shuffle=data.shuffle and split == "train",
        mask_document_boundary=data.mask_document_boundary,
        number_documents=not data.attend_across_documents,
    )
    loader = _NumberedLoader(packed, rows, global_batch_size)
    loader.damaged_documents = tokenized.damaged
    return loader


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one state, which any number of ranks can load.

    Raises:
        DataError: the states are from different steps.
    """
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise DataError(f"the loader states to merge are of different steps: {', '.join(map(str, steps))}")
    merged = dict(states[0])
    if "slots" in merged:
        merged["slots"] = {row: stream for state in states for row, stream in state["slots"].items()}
    return merged


class _NumberedLoader(Loader):
    """Loader of samples with random access; the state is the number of the next sample."""

    streams: Mapping[int, RowStream] = MappingProxyType({})

    def __init__(self, samples: Samples, rows: range, global_batch_size: int) -> None:
        self._samples, self._rows, self._global_batch_size = samples, rows, global_batch_size
        self._first = 0
        self.samples_per_epoch = samples.num_per_epoch

    def sample(self, row: int, number: int) -> tuple[np.ndarray, ...]:
        """Return a sample by its number."""
        return self._samples.sample(number)

    def next(self) -> Batch:
        batch = _stack([self._samples.sample(self._first + row) for row in self._rows])
        self._first += self._global_batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._first // self._global_batch_size, "samples": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_mixture(state)
        if "slots" in state:
            raise DataError("the saved position is in a streamed dataset, and data.streaming is false")
        self._first = state["samples"]

    def reset(self) -> None:
        self._first = 0


class _StreamLoader(Loader):
    """Loader with a stream per row; the state is the step and the position of every row's stream."""

    samples_per_epoch = None

    def __init__(self, streams: dict[int, RowStream], global_batch_size: int) -> None:
        self._streams, self._global_batch_size = streams, global_batch_size
        self._step = 0

    @property
    def streams(self) -> Mapping[int, RowStream]:
        """Streams by row of the global batch."""
        return self._streams

    def sample(self, row: int, number: int) -> tuple[np.ndarray, ...]:
        """Return the next sample of a row."""
        return self._streams[row].next()

    def next(self) -> Batch:
        batch = _stack([stream.next() for stream in self._streams.values()])
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        slots = {str(row): stream.state_dict() for row, stream in self._streams.items()}
        return {"step": self._step, "global_batch_size": self._global_batch_size, "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_mixture(state)
        if "slots" not in state:
            raise DataError("the saved position is not in a streamed dataset, and data.streaming is true")
        saved = state["global_batch_size"]
        if saved != self._global_batch_size:
            raise DataError(
                f"a streamed dataset is split by rows of the global batch, so it cannot resume with "
                f"training.global_batch_size={self._global_batch_size}; the state was saved with {saved}"
            )
        missing = [str(row) for row in self._streams if str(row) not in state["slots"]]
        if missing:
            raise DataError(
                f"the saved position has no rows {', '.join(missing)}; merge the states of all ranks"
            )
        for row, stream in self._streams.items():
            stream.load_state_dict(state["slots"][str(row)])
        self._step = state["step"]

    def reset(self) -> None:
        for stream in self._streams.values():
            stream.reset()
        self._step = 0


class _MixtureLoader(Loader):
    """Loader of a mixture's samples; the state is the number of the next sample and that of every source."""

    samples_per_epoch = None

    def __init__(self, mixture: Mixture, rows: range, global_batch_size: int) -> None:
        self._mixture, self._rows, self._global_batch_size = mixture, rows, global_batch_size
        self._first = 0
        self.damaged_documents = mixture.damaged_documents
        self.samples_per_epoch_of = mixture.samples_per_epoch_of

    def next(self) -> Batch:
        drawn = [self._mixture.sample(row, self._first + row) for row in self._rows]
        self._first += self._global_batch_size
        samples, sources = zip(*drawn, strict=True)
        return _stack(list(samples))._replace(sources_B=torch.tensor(sources))

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self._first // self._global_batch_size, "samples": self._first}
        return {**state, **self._mixture.state_dict(self._first)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._mixture.load_state_dict(state)
        self._first = state["samples"]

    def reset(self) -> None:
        self._mixture.reset()
        self._first = 0

    def close(self) -> None:
        self._mixture.close()


def _refuse_mixture(state: dict[str, Any]) -> None:
    if "mixture" in state:
        raise DataError("the saved position is in a mixture, and data.kind is not mixture")


def _build_streams(
    data: DataConfig, tokenizer: Tokenizer, seq_len: int, global_batch_size: int, rows: range, split: str
) -> dict[int, RowStream]:
    from datasets.distributed import split_dataset_by_node

    if split == "validation":
        data.require_validation()
    part = data.validation_split if split == "validation" and data.validation_split else data.split
    dataset = open_dataset(data, part)
    name = f"dataset {data.dataset}, split {part}"
    require_column(dataset, data.text_field, name)
    return {
        row: RowStream(
            split_dataset_by_node(dataset, rank=row, world_size=global_batch_size),
            tokenizer,
            field=data.text_field,
            seq_len=seq_len,
            mask_document_boundary=data.mask_document_boundary,
            number_documents=not data.attend_across_documents,
            name=f"{name}, row {row} of {global_batch_size}",
        )
        for row in rows
    }


def _stack(samples: list[tuple[np.ndarray, ...]]) -> Batch:
    return Batch(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*samples, strict=True)))
