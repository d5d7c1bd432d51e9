"""Batches, loaders of the samples of every step, and resuming.

Row j of global step s is sample s * global_batch_size + j, a function of (data, tokenizer, seed) and that
number. A rank is assigned rows and reads only those, so neither the loss curve of a run nor its state depends
on the number of ranks. Scheduled sizes (``config/training.py``) change how many samples, or which pieces of
samples, a step reads; a rank has the same fraction of every batch.

B is the number of a rank's rows, T the sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from harness.config.data import DataConfig
from harness.config.data_kinds import DATA_KINDS
from harness.config.registry import load_attribute
from harness.config.training import Sizes
from harness.data.cache import open_documents
from harness.data.samples import IGNORE_INDEX, PackedSamples, Samples, SyntheticSamples
from harness.data.tokenizer import Tokenizer, check_vocab_size
from harness.data.tokens import Tokens
from harness.util.errors import DataError

if TYPE_CHECKING:
    from harness.data.streaming import RowStream


__all__ = ["IGNORE_INDEX", "Batch", "Loader", "build_loader", "merge_states"]


@dataclass(frozen=True)
class Reading:
    """What a loader reads; see ``harness.data.loader.build_loader``."""

    data: DataConfig
    tokenizer: Tokenizer
    seq_len: int
    global_batch_size: int
    seed: int
    rows: range
    split: str
    model_vocab_size: int
    wait_for_all: Callable[[], None] | None
    is_builder: bool
    sizes: Sizes

    @property
    def shuffles(self) -> bool:
        return self.data.shuffle and self.split == "train"


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

    @property
    def shape(self) -> tuple[int, int]:
        rows, length = self.inputs_BT.shape
        return rows, length

    def each(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """Apply ``function`` to every tensor."""
        documents, sources = (
            None if tensor is None else function(tensor) for tensor in (self.documents_BT, self.sources_B)
        )
        return Batch(function(self.inputs_BT), function(self.labels_BT), documents, sources)


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


class Loader(ABC):
    """An endless sequence of batches of one split.

    Attributes:
        samples_per_epoch: samples per epoch, over all rows; None if unknown (streams) or meaningless
            (synthetic data).
        damaged_documents: number of documents that were not UTF-8, and were repaired or left out by
            data.encoding_errors.
        samples_per_epoch_of: the same for each source of a mixture; empty without a mixture.
        note: a line to show when training starts, or None.
        runs_in_loop: whether the training loop must call ``next`` itself, because it computes on the device.
    """

    samples_per_epoch: int | None
    damaged_documents: int = 0
    note: str | None = None
    runs_in_loop: bool = False
    samples_per_epoch_of: Mapping[str, int | None] = MappingProxyType({})

    @abstractmethod
    def next(self) -> Any:
        """Return this loader's rows of the next global step: a ``Batch``, or an ``OtherBatch``."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """Return the position, JSON-serializable; combine the states of all ranks with ``merge_states``."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the step at which ``state`` was saved; the sizes of the next step are those of
        ``state["step"] + 1``.

        Raises:
            DataError: the state is from a stream or a mixture and this loader is not, or the reverse; or, for
                streams, it is from another global batch size or does not contain this loader's rows.
        """

    @abstractmethod
    def reset(self) -> None:
        """Return to global step 0."""

    def close(self) -> None:
        """Stop background work; load a state, or reset, before ``next`` is called again."""
        return


class SourceLoader(Loader):
    """A loader of one source, whose samples a mixture reads one by one."""

    _cursor: Cursor

    def next(self) -> Batch:
        return stack([self.read(piece) for piece in self._cursor.advance()])

    @property
    def streams(self) -> Mapping[int, RowStream]:
        """Streams by row of the global batch; empty for a source with random access."""
        return {}

    @abstractmethod
    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        """Return a piece of a sample of the source; for a stream, as many of the next tokens."""


class Piece(NamedTuple):
    """What one row of a step reads: a sample, or with scheduled lengths a piece of one."""

    slot: int
    """The row of the largest global batch whose stream is read, if the source is a stream."""
    number: int
    """Number of the sample."""
    first: int
    """First token of the piece in the sample."""
    length: int
    """Tokens of the piece."""


class Cursor:
    """Position of a loader with ``rows`` of the largest global batch: the step, and the tokens read so far.

    Attributes:
        step: number of steps read.
        position: number of tokens before the next step, over all rows; see ``Sizes``.
    """

    def __init__(self, rows: range, sizes: Sizes) -> None:
        self.rows, self.sizes = rows, sizes
        self.step = self.position = 0

    def advance(self) -> list[Piece]:
        """Go on by one step; return the pieces of this loader's rows."""
        sizes = self.sizes
        phase = sizes.at(self.step + 1)
        begin, length = phase.begin(self.position), phase.seq_len
        self.step, self.position = self.step + 1, begin + phase.tokens
        return [
            Piece(
                row * sizes.batch_size // phase.batch_size,
                *divmod(begin + row * length, sizes.seq_len),
                length,
            )
            for row in phase.share(self.rows, sizes.batch_size)
        ]

    def state_dict(self) -> dict[str, int]:
        """Return the step, and the next sample; inside of a sample also the tokens read of it."""
        samples, tokens = divmod(self.position, self.sizes.seq_len)
        return {"step": self.step, "samples": samples, **({"tokens": tokens} if tokens else {})}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step = state["step"]
        self.position = state["samples"] * self.sizes.seq_len + state.get("tokens", 0)

    def reset(self) -> None:
        self.step = self.position = 0


def stack(samples: list[tuple[np.ndarray, ...]]) -> Batch:
    return Batch(*(torch.from_numpy(np.stack(arrays)) for arrays in zip(*samples, strict=True)))


class NumberedLoader(SourceLoader):
    """Loader of samples with random access."""

    def __init__(self, samples: Samples, rows: range, sizes: Sizes) -> None:
        self._samples, self._cursor = samples, Cursor(rows, sizes)
        self._known: tuple[int, tuple[np.ndarray, ...]] | None = None
        self.samples_per_epoch = samples.num_per_epoch

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        # Neighbouring rows read pieces of one sample.
        if self._known is None or self._known[0] != piece.number:
            self._known = piece.number, self._samples.sample(piece.number)
        cut = slice(piece.first, piece.first + piece.length)
        inputs_T, labels_T, *documents = (array[cut] for array in self._known[1])
        # A piece numbers its documents from 0.
        return inputs_T, labels_T, *(documents_T - documents_T[0] for documents_T in documents)

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_mixture(state)
        if "slots" in state:
            raise DataError("the saved position is in a streamed dataset, and data.streaming is false")
        self._cursor.load_state_dict(state)

    def reset(self) -> None:
        self._cursor.reset()


def refuse_mixture(state: dict[str, Any]) -> None:
    if "mixture" in state:
        raise DataError("the saved position is in a mixture, and data.kind is not mixture")


def load_packed(reading: Reading, tokens: Tokens) -> NumberedLoader:
    samples = PackedSamples(
        tokens,
        seq_len=reading.seq_len,
        seed=reading.seed,
        shuffle=reading.shuffles,
        mask_document_boundary=reading.data.mask_document_boundary,
        number_documents=not reading.data.attend_across_documents,
    )
    return NumberedLoader(samples, reading.rows, reading.sizes)


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
    reading = Reading(
        data,
        tokenizer,
        seq_len=seq_len,
        global_batch_size=global_batch_size,
        seed=seed,
        rows=rows,
        split=split,
        model_vocab_size=model_vocab_size,
        wait_for_all=wait_for_all,
        is_builder=is_builder,
        sizes=sizes or Sizes(global_batch_size, seq_len),
    )
    return build_loader_of(reading)


def build_loader_of(reading: Reading) -> Loader:
    kind = DATA_KINDS[reading.data.kind]
    if kind.has_vocabulary:
        check_vocab_size(reading.tokenizer.vocab_size, reading.model_vocab_size)
    loader: Loader = load_attribute(kind.load)(reading)
    return loader


def load_documents(reading: Reading) -> Loader:
    """Return the loader of a source's documents, which are in the token cache."""
    tokens = open_documents(reading)
    loader = load_packed(reading, tokens)
    loader.damaged_documents = tokens.damaged
    return loader


def load_synthetic(reading: Reading) -> Loader:
    samples = SyntheticSamples(
        split=reading.split,
        seq_len=reading.seq_len,
        seed=reading.seed,
        vocab_size=reading.model_vocab_size,
        mask_fraction=reading.data.mask_fraction,
    )
    return NumberedLoader(samples, reading.rows, reading.sizes)


def merge_states(states: list[dict[str, Any]]) -> dict[str, Any]:
    """Merge the states of all ranks into one state, which any number of ranks can load."""
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise DataError(f"the loader states to merge are of different steps: {', '.join(map(str, steps))}")
    merged = dict(states[0])
    if "slots" in merged:
        merged["slots"] = {row: stream for state in states for row, stream in state["slots"].items()}
    return merged
