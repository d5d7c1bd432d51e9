"""The loader: which samples belong to which step, and how to go on from the middle.

The law: row j of global step s is sample s * global_batch_size + j, a function of (data, tokenizer, seed) and
that number. A rank is given some rows and reads just those, so neither the curve of a run nor its state
depends on how many ranks share the batch.

B is the number of a rank's rows, T the sequence length.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from harness.data.cache import open_cache
from harness.data.config import DataConfig
from harness.data.samples import IGNORE_INDEX, PackedSamples, Samples, SyntheticSamples
from harness.data.sources import open_dataset, require_column, source_of
from harness.data.streaming import Slot
from harness.data.tokenizer import Tokenizer
from harness.data.vocabulary import require_room
from harness.errors import DataError

__all__ = ["IGNORE_INDEX", "Batch", "Loader", "build_loader", "merge_states"]


class Batch(NamedTuple):
    """The rows of one global step that a rank works on, in row order.

    Labels are already shifted: ``labels_BT[b, t]`` is the target for ``inputs_BT[b, t]``, or IGNORE_INDEX
    where there is none. All int64.
    """

    inputs_BT: Tensor
    labels_BT: Tensor
    documents_BT: Tensor | None = None
    """With data.attend_across_documents=false: the number of each input's document within its row."""

    def each(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with ``function`` applied to every tensor there is."""
        documents = None if self.documents_BT is None else function(self.documents_BT)
        return Batch(function(self.inputs_BT), function(self.labels_BT), documents)


class Loader(ABC):
    """The batches of one split, step after step, without end.

    Attributes:
        samples_per_epoch: samples after which all data has been seen once, over all rows; None where that is
            unknown (streams) or meaningless (synthetic data).
        damaged_documents: documents of the source that were not UTF-8, and were repaired or left out as
            data.encoding_errors says.
    """

    samples_per_epoch: int | None
    damaged_documents: int = 0

    @abstractmethod
    def next(self) -> Batch:
        """The samples of the next global step that lie in this loader's rows."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]:
        """JSON-able; see ``merge_states`` for what to save where several ranks hold different rows."""

    @abstractmethod
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on after the step at which ``state`` was saved, with whatever rows this loader has.

        Raises:
            DataError: the state is of another kind of data or another global batch size, or lacks this
            loader's rows.
        """

    @abstractmethod
    def reset(self) -> None:
        """Back to global step 0."""

    def close(self) -> None:
        """Ends what works for it in the background."""
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
    """The loader of ``rows``, a part of ``range(global_batch_size)``.

    Args:
        seq_len: tokens per sample (T).
        split: "train", or "validation": the same samples in the same order whenever it is reset.
        model_vocab_size: number of rows of the model's embedding; every token must lie below it.
        wait_for_all: returns when all ranks have called it; called between building and opening the token
            cache, where there is one.
        is_builder: whether this rank builds the cache if it is not there.

    Raises:
        ConfigError: validation is asked for and no documents are set apart for it, or the tokenizer has more
            tokens than the model's vocabulary.
        DataError: the data cannot be used: missing, unreadable, or too little.
    """
    if split not in ("train", "validation"):
        raise ValueError(f"split is train or validation, not {split}")
    if rows.step != 1 or not 0 <= rows.start < rows.stop <= global_batch_size:
        raise ValueError(f"rows {rows} are no part of a global batch of {global_batch_size}")
    if data.kind == "synthetic":
        synthetic = SyntheticSamples(
            split=split,
            seq_len=seq_len,
            seed=seed,
            vocab_size=model_vocab_size,
            mask_fraction=data.mask_fraction,
        )
        return _NumberedLoader(synthetic, rows, global_batch_size)
    require_room(tokenizer.vocab_size, model_vocab_size)
    if data.kind == "hub" and data.streaming:
        return _StreamLoader(
            _build_slots(data, tokenizer, seq_len, global_batch_size, rows, split), global_batch_size
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
    """One state for all rows out of the states of the ranks, which may be loaded by any number of ranks.

    Raises:
        DataError: the states are not of the same step.
    """
    steps = sorted({state["step"] for state in states})
    if len(steps) != 1:
        raise DataError(f"the loader states to merge are of different steps: {', '.join(map(str, steps))}")
    merged = dict(states[0])
    if "slots" in merged:
        merged["slots"] = {row: slot for state in states for row, slot in state["slots"].items()}
    return merged


class _NumberedLoader(Loader):
    """Samples that can be asked for by number; the state is the number of the next one."""

    def __init__(self, samples: Samples, rows: range, global_batch_size: int) -> None:
        self._samples, self._rows, self._global_batch_size = samples, rows, global_batch_size
        self._first = 0
        self.samples_per_epoch = samples.num_per_epoch

    def next(self) -> Batch:
        batch = _stack([self._samples.sample(self._first + row) for row in self._rows])
        self._first += self._global_batch_size
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._first // self._global_batch_size, "samples": self._first}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "slots" in state:
            raise DataError("the saved position is one in a streamed dataset, and data.streaming is off")
        self._first = state["samples"]

    def reset(self) -> None:
        self._first = 0


class _StreamLoader(Loader):
    """A stream per row; the state is the step and the position of every one of this loader's rows."""

    samples_per_epoch = None

    def __init__(self, slots: dict[int, Slot], global_batch_size: int) -> None:
        self._slots, self._global_batch_size = slots, global_batch_size
        self._step = 0

    def next(self) -> Batch:
        batch = _stack([slot.next() for slot in self._slots.values()])
        self._step += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        slots = {str(row): slot.state_dict() for row, slot in self._slots.items()}
        return {"step": self._step, "global_batch_size": self._global_batch_size, "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if "slots" not in state:
            raise DataError("the saved position is not one in a streamed dataset, and data.streaming is on")
        saved = state["global_batch_size"]
        if saved != self._global_batch_size:
            raise DataError(
                f"a streamed dataset is shared out by rows of the global batch, so it cannot resume with "
                f"training.global_batch_size={self._global_batch_size}; the state was saved with {saved}"
            )
        missing = [str(row) for row in self._slots if str(row) not in state["slots"]]
        if missing:
            raise DataError(
                f"the saved position lacks rows {', '.join(missing)}; merge the states of all ranks"
            )
        for row, slot in self._slots.items():
            slot.load_state_dict(state["slots"][str(row)])
        self._step = state["step"]

    def reset(self) -> None:
        for slot in self._slots.values():
            slot.reset()
        self._step = 0


def _build_slots(
    data: DataConfig, tokenizer: Tokenizer, seq_len: int, global_batch_size: int, rows: range, split: str
) -> dict[int, Slot]:
    from datasets.distributed import split_dataset_by_node

    if split == "validation":
        data.require_validation()
    part = data.validation_split if split == "validation" and data.validation_split else data.split
    dataset = open_dataset(data, part)
    name = f"dataset {data.dataset}, split {part}"
    require_column(dataset, data.text_field, name)
    return {
        row: Slot(
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
