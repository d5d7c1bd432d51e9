"""Streamed datasets: every row of the global batch has its own stream of documents, packed into samples.

A row packs the documents that ``stream_reader.py`` deals to it. Its samples depend on the global batch size,
but neither on the assignment of rows to ranks nor on the processes that read ahead (``read_ahead.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harness.config.training import Sizes
from harness.data.documents import open_dataset, require_column
from harness.data.loader import (
    Cursor,
    Loader,
    Piece,
    Reading,
    SourceLoader,
    load_documents,
    refuse_mixture,
)
from harness.data.read_ahead import ReaderPool
from harness.data.samples import IGNORE_INDEX, number_documents
from harness.data.stream_reader import Document, Position, RowReader
from harness.util.errors import DataError


def load_hub(reading: Reading) -> Loader:
    """Return the loader of a dataset: with ``data.streaming`` of its streams, else of its documents."""
    if not reading.data.streaming:
        return load_documents(reading)
    data, rows, validating = reading.data, reading.rows, reading.split == "validation"
    if validating:
        data.require_validation()
    part = data.validation_split if validating and data.validation_split else data.split
    dataset = open_dataset(data, part)
    name = f"dataset {data.dataset}, split {part}"
    require_column(dataset, data.text_field, name)
    readers = {
        row: RowReader(
            dataset,
            reading.tokenizer,
            row=row,
            rows=reading.global_batch_size,
            field=data.text_field,
            name=f"{name}, row {row} of {reading.global_batch_size}",
            seed=reading.seed,
            shuffle_buffer=data.shuffle_buffer if reading.shuffles else None,
        )
        for row in rows
    }
    if data.workers:
        pool = ReaderPool(readers, data.workers, chunk_tokens=reading.seq_len)
        readers = {row: pool.reader(row) for row in rows}
    streams = {
        row: RowStream(
            reader,
            seq_len=reading.seq_len,
            mask_document_boundary=data.mask_document_boundary,
            number_documents=not data.attend_across_documents,
        )
        for row, reader in readers.items()
    }
    return StreamLoader(streams, rows, reading.sizes)


class RowStream:
    """An endless sequence of the samples of one row of the global batch."""

    def __init__(
        self, reader: RowReader, *, seq_len: int, mask_document_boundary: bool, number_documents: bool = False
    ) -> None:
        self._reader, self._seq_len = reader, seq_len
        self._mask_document_boundary = mask_document_boundary
        self._number_documents = number_documents
        self.reset()

    def reset(self) -> None:
        self._seek(self._reader.beginning, 0)

    def state_dict(self) -> dict[str, Any]:
        """Start of the next sample: a position of ``stream_reader.py``, and ``offset`` tokens into it."""
        position = self._documents[0].position if self._documents else self._position
        return {**position, "offset": self._offset}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        position = {name: value for name, value in state.items() if name != "offset"}
        self._reader.check(position)
        self._seek(position, state["offset"])

    def close(self) -> None:
        self._reader.close()

    def next(self, length: int | None = None) -> tuple[np.ndarray, ...]:
        """``(inputs_T, labels_T)``, int64; with ``number_documents`` also each input's document number.

        Args:
            length: T; default: seq_len.
        """
        length = length or self._seq_len
        tokens, starts = self._peek(length + 1)
        inputs_T, labels_T = tokens[:-1], tokens[1:].copy()
        if self._mask_document_boundary:
            labels_T[starts[1:]] = IGNORE_INDEX
        self._offset += length  # not T + 1: the last label is the next sample's first input
        while self._offset >= len(self._documents[0].tokens):
            self._offset -= len(self._documents.popleft().tokens)
        if not self._number_documents:
            return inputs_T, labels_T
        return inputs_T, labels_T, number_documents(starts[1:].nonzero()[0], length)

    def _peek(self, count: int) -> tuple[np.ndarray, np.ndarray]:
        """The next ``count`` tokens, and whether each is the first of its document."""
        available = sum(len(document.tokens) for document in self._documents) - self._offset
        while available < count:
            self._documents.append(next(self._unread))
            available += len(self._documents[-1].tokens)
        tokens, starts = np.empty(count, dtype=np.int64), np.zeros(count, dtype=bool)
        filled, begin = 0, self._offset
        for document in self._documents:
            part = document.tokens[begin : begin + count - filled]
            tokens[filled : filled + len(part)] = part
            starts[filled] = begin == 0
            filled, begin = filled + len(part), 0
        return tokens, starts

    def _seek(self, position: Position, offset: int) -> None:
        self._position, self._offset = position, offset
        self._documents: deque[Document] = deque()
        self._unread: Iterator[Document] = self._reader.read(position)


class StreamLoader(SourceLoader):
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

    def state_dict(self) -> dict[str, Any]:
        slots = {str(row): stream.state_dict() for row, stream in self._streams.items()}
        return {"step": self._cursor.step, "global_batch_size": self._batch_size, "slots": slots}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        refuse_mixture(state)
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
