"""Streamed datasets: every row of the global batch has its own stream of documents, packed into samples.

A row packs the documents that ``stream_reader.py`` deals to it. Its samples depend on the global batch size,
but neither on the assignment of rows to ranks nor on the processes that read ahead (``read_ahead.py``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from harness.config.data import DataConfig
from harness.data.documents import open_dataset, require_column
from harness.data.loader import (
    Loader,
    Piece,
    Reading,
    SampleLoader,
    SampleSource,
    load_documents,
)
from harness.data.read_ahead import ReaderPool
from harness.data.samples import sample_of
from harness.data.stream_reader import Position, RowReader, TokenizedDocument


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
    streams = {row: RowStream(reader, data) for row, reader in readers.items()}
    return SampleLoader(reading, {"": StreamedSource(streams)})


class RowStream:
    """An endless sequence of the samples of one row of the global batch."""

    def __init__(self, reader: RowReader, data: DataConfig) -> None:
        self._reader, self._data = reader, data
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

    def next(self, length: int) -> tuple[np.ndarray, ...]:
        """Return a sample of ``length`` inputs."""
        tokens, starts = self._peek(length + 1)
        self._offset += length  # not T + 1: the last label is the next sample's first input
        while self._offset >= len(self._documents[0].tokens):
            self._offset -= len(self._documents.popleft().tokens)
        return sample_of(tokens, starts[1:].nonzero()[0], self._data)

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
        self._documents: deque[TokenizedDocument] = deque()
        self._unread: Iterator[TokenizedDocument] = self._reader.read(position)


class StreamedSource(SampleSource):
    """A stream for each row of the largest batch."""

    num_per_epoch = None

    def __init__(self, streams: Mapping[int, RowStream]) -> None:
        self.streams = streams

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        return self.streams[piece.slot].next(piece.length)
