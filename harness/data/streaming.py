"""Samples of a streamed dataset: every row of the global batch has its own stream.

Row j of the global batch reads the part ``split_dataset_by_node(rank=j, world_size=global_batch_size)`` of
the dataset and packs its own documents. So the samples of a row depend on the global batch size, but not on
the assignment of rows to ranks, and the state of a row is a position in its part.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from harness.data.samples import IGNORE_INDEX, number_documents
from harness.data.sources import text_of_example
from harness.data.tokenizer import Tokenizer, with_bos_eos
from harness.errors import DataError


@dataclass(frozen=True)
class _Document:
    position: dict[str, Any]
    """State of the dataset before this document was read."""
    tokens: np.ndarray


class RowStream:
    """An endless sequence of the samples of one row of the global batch.

    Args:
        dataset: this row's part, an ``IterableDataset``.
        name: name for error messages.
    """

    def __init__(
        self,
        dataset: Any,
        tokenizer: Tokenizer,
        *,
        field: str,
        seq_len: int,
        mask_document_boundary: bool,
        name: str,
        number_documents: bool = False,
    ) -> None:
        self._dataset, self._tokenizer = dataset, tokenizer
        self._field, self._seq_len, self._name = field, seq_len, name
        self._mask_document_boundary = mask_document_boundary
        self._number_documents = number_documents
        self._beginning: dict[str, Any] = dataset.state_dict()
        self._position = self._beginning
        self.reset()

    def reset(self) -> None:
        """Return to the first document."""
        self.load_state_dict({"document": self._beginning, "offset": 0})

    def state_dict(self) -> dict[str, Any]:
        """Start of the next sample: ``{"document": state of the dataset, "offset": tokens into it}``."""
        position = self._documents[0].position if self._documents else self._position
        return {"document": position, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._documents: deque[_Document] = deque()
        self._offset: int = state["offset"]
        self._seek(state["document"])

    def next(self, length: int | None = None) -> tuple[np.ndarray, ...]:
        """``(inputs_T, labels_T)``, int64; with ``number_documents`` also each input's document number.

        Args:
            length: T; default: seq_len.

        Raises:
            DataError: the row's part of the dataset holds no text, or cannot be read.
        """
        length = length or self._seq_len
        tokens, starts = self._peek(length + 1)
        inputs_T, labels_T = tokens[:-1], tokens[1:].copy()
        if self._mask_document_boundary:
            labels_T[starts[1:]] = IGNORE_INDEX
        self._advance(length)  # not T + 1: the last label is the next sample's first input
        if not self._number_documents:
            return inputs_T, labels_T
        return inputs_T, labels_T, number_documents(starts[1:].nonzero()[0], length)

    def _peek(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next ``count`` tokens, and whether each is the first of its document."""
        available = sum(len(document.tokens) for document in self._documents) - self._offset
        while available < count:
            self._documents.append(self._read_document())
            available += len(self._documents[-1].tokens)
        tokens, starts = np.empty(count, dtype=np.int64), np.zeros(count, dtype=bool)
        filled, begin = 0, self._offset
        for document in self._documents:
            part = document.tokens[begin : begin + count - filled]
            tokens[filled : filled + len(part)] = part
            starts[filled] = begin == 0
            filled, begin = filled + len(part), 0
        return tokens, starts

    def _advance(self, count: int) -> None:
        self._offset += count
        while self._offset >= len(self._documents[0].tokens):
            self._offset -= len(self._documents.popleft().tokens)

    def _read_document(self) -> _Document:
        """Return the next non-empty document; after the last one, restart from the first."""
        restarted = False
        while True:
            position = self._position
            example = self._next_example()
            if example is None:
                if restarted:
                    raise DataError(
                        f"{self._name} holds no text; it may have fewer documents than the batch has rows"
                    )
                restarted = True
                self._seek(self._beginning)
                continue
            self._position = self._dataset.state_dict()
            text = text_of_example(example, self._field, self._name)
            if text:
                tokens = with_bos_eos(self._tokenizer.encode(text), self._tokenizer)
                return _Document(position, np.asarray(tokens, dtype=np.int64))

    def _next_example(self) -> dict[str, Any] | None:
        try:
            return next(self._examples, None)
        # File readers and the hub's client raise many types of errors; all mean that reading failed.
        except Exception as error:
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise DataError(f"{self._name} cannot be read: {reason}") from error

    def _seek(self, position: dict[str, Any]) -> None:
        self._dataset.load_state_dict(position)
        self._examples: Iterator[dict[str, Any]] = iter(self._dataset)
        self._position = position
