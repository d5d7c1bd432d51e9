"""The loader: the samples of every step, and resuming.

Row j of global step s is sample s * global_batch_size + j, a function of (data, tokenizer, seed) and that
number. A rank is assigned rows and reads only those, so neither the loss curve of a run nor its state depends
on the number of ranks. Scheduled sizes (``config/training.py``) change how many samples, or which pieces of
samples, a step reads; a rank has the same fraction of every batch.

B is the number of a rank's rows, T the sequence length.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.config.data import DataConfig
from harness.config.training import Sizes
from harness.data.batch import Batch, Cursor, Loader, Piece, SourceLoader, stack
from harness.data.cache import open_cache
from harness.data.chat import describe, open_conversations
from harness.data.mixture_loader import build_mixture_loader
from harness.data.samples import IGNORE_INDEX, PackedSamples, Samples, SyntheticSamples
from harness.data.sources import source_of
from harness.data.streaming import RowStream, build_streams
from harness.data.token_files import open_token_files
from harness.data.tokenizer import Tokenizer
from harness.data.vocabulary import check_vocab_size
from harness.util.errors import DataError

__all__ = ["IGNORE_INDEX", "Batch", "Loader", "build_loader", "merge_states"]


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
    sizes: Sizes | None = None,
) -> Loader:
    """Build the loader of ``rows``, a part of ``range(global_batch_size)``.

    Args:
        seq_len: tokens per sample (T).
        split: "train", or "validation": the same samples in the same order after every reset.
        model_vocab_size: number of rows of the model's embedding; every token id must be smaller.
        wait_for_all: a barrier over all ranks; called between building and opening the token cache, if any.
        is_builder: whether this rank builds the cache if it is missing.
        sizes: sizes of all steps, which end with these; default: every step has global_batch_size sequences
            of seq_len tokens.

    Raises:
        ConfigError: no documents are held out for validation, or the tokenizer has more tokens than the
            model's vocabulary.
        DataError: the data is missing, unreadable, or too small.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is train or validation, not {split}")
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= global_batch_size:
        raise ValueError(f"rows {rows} are not part of a global batch of {global_batch_size}")
    sizes = sizes or Sizes(global_batch_size, seq_len)
    if data.kind == "mixture":
        return build_mixture_loader(
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
            sizes=sizes,
            seed=seed,
            rows=rows,
            split=split,
        )
    if data.kind == "synthetic":
        synthetic = SyntheticSamples(
            split=split,
            seq_len=seq_len,
            seed=seed,
            vocab_size=model_vocab_size,
            mask_fraction=data.mask_fraction,
        )
        return _NumberedLoader(synthetic, rows, sizes)
    check_vocab_size(tokenizer.vocab_size, model_vocab_size)
    if data.kind == "hub" and data.streaming:
        streams = build_streams(
            data,
            tokenizer,
            seq_len=seq_len,
            global_batch_size=global_batch_size,
            seed=seed,
            rows=rows,
            split=split,
        )
        return _StreamLoader(streams, rows, sizes)
    if data.kind == "chat":
        conversations, tokenized = open_conversations(
            data,
            tokenizer,
            seq_len=seq_len,
            seed=seed,
            split=split,
            wait_for_all=wait_for_all,
            is_builder=is_builder,
        )
        loader = _NumberedLoader(conversations, rows, sizes)
        loader.damaged_documents = tokenized.damaged
        loader.note = f"data of {split}: {describe(conversations, data, seq_len)}"
        return loader
    damaged = 0
    if data.kind == "tokens":
        tokens = open_token_files(
            data,
            tokenizer,
            split=split,
            model_vocab_size=model_vocab_size,
            wait_for_all=wait_for_all,
            is_builder=is_builder,
        )
    else:
        source, held_out = source_of(data, split)
        tokens = cache = open_cache(
            source,
            tokenizer,
            split=split,
            held_out=held_out,
            cache_dir=data.cache_dir,
            wait_for_all=wait_for_all,
            is_builder=is_builder,
        )
        damaged = cache.damaged
    packed = PackedSamples(
        tokens,
        seq_len=seq_len,
        seed=seed,
        shuffle=data.shuffle and split == "train",
        mask_document_boundary=data.mask_document_boundary,
        number_documents=not data.attend_across_documents,
    )
    loader = _NumberedLoader(packed, rows, sizes)
    loader.damaged_documents = damaged
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


class _NumberedLoader(SourceLoader):
    """Loader of samples with random access."""

    def __init__(self, samples: Samples, rows: range, sizes: Sizes) -> None:
        self._samples, self._cursor = samples, Cursor(rows, sizes)
        self._known: tuple[int, tuple[np.ndarray, ...]] | None = None
        self.samples_per_epoch = samples.num_per_epoch

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        # Neighbouring rows read pieces of one sample.
        if self._known is None or self._known[0] != piece.number:
            self._known = piece.number, self._samples.sample(piece.number)
        return _cut(self._known[1], piece.first, piece.length)

    def next(self) -> Batch:
        return stack([self.read(piece) for piece in self._cursor.advance()])

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_mixture(state)
        if "slots" in state:
            raise DataError("the saved position is in a streamed dataset, and data.streaming is false")
        self._cursor.load_state_dict(state)

    def reset(self) -> None:
        self._cursor.reset()


class _StreamLoader(SourceLoader):
    """Loader with a stream per row of the largest batch; the state is the step and every stream's position.

    Row j of a smaller batch of B rows reads stream j * global_batch_size // B. So a rank's rows of any batch
    are in its own streams.
    """

    samples_per_epoch = None

    def __init__(self, streams: dict[int, RowStream], rows: range, sizes: Sizes) -> None:
        self._streams, self._cursor, self._batch_size = streams, Cursor(rows, sizes), sizes.batch_size

    @property
    def streams(self) -> Mapping[int, RowStream]:
        return self._streams

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        return self._streams[piece.slot].next(piece.length)

    def next(self) -> Batch:
        return stack([self.read(piece) for piece in self._cursor.advance()])

    def state_dict(self) -> dict[str, Any]:
        slots = {str(row): stream.state_dict() for row, stream in self._streams.items()}
        return {"step": self._cursor.step, "global_batch_size": self._batch_size, "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        _refuse_mixture(state)
        if "slots" not in state:
            raise DataError("the saved position is not in a streamed dataset, and data.streaming is true")
        saved = state["global_batch_size"]
        if saved != self._batch_size:
            raise DataError(
                f"a streamed dataset is split by rows of the global batch, so it cannot resume with "
                f"training.global_batch_size={self._batch_size}; the state was saved with {saved}"
            )
        missing = [str(row) for row in self._streams if str(row) not in state["slots"]]
        if missing:
            raise DataError(
                f"the saved position has no rows {', '.join(missing)}; merge the states of all ranks"
            )
        for row, stream in self._streams.items():
            stream.load_state_dict(state["slots"][str(row)])
        self._cursor.step = state["step"]

    def reset(self) -> None:
        for stream in self._streams.values():
            stream.reset()
        self._cursor.reset()

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _refuse_mixture(state: dict[str, Any]) -> None:
    if "mixture" in state:
        raise DataError("the saved position is in a mixture, and data.kind is not mixture")


def _cut(sample: tuple[np.ndarray, ...], first: int, length: int) -> tuple[np.ndarray, ...]:
    """Return ``length`` tokens of a sample from ``first`` on; documents are numbered from 0 again."""
    inputs_T, labels_T, *documents = (array[first : first + length] for array in sample)
    return inputs_T, labels_T, *(documents_T - documents_T[0] for documents_T in documents)
