"""Streamed datasets: every row of the global batch has its own stream of documents, packed into samples.

A row packs the documents that ``stream_reader.py`` deals to it. Its samples depend on the global
batch size, but neither on the assignment of rows to ranks nor on the processes that read ahead
(``read_ahead.py``).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from harness.data.documents import open_dataset, require_column
from harness.data.loader import Loader, Piece, SampleLoader, SampleSource, load_documents
from harness.data.read_ahead import ReaderPool
from harness.data.samples import Reading
from harness.data.stream_reader import RowReader, RowStream


def load_hub(reading: Reading) -> Loader:
    """Return the loader of a dataset: with ``data.streaming`` of its streams, else of its documents."""
    if not reading.data.streaming:
        return load_documents(reading)
    data = reading.data
    rows = reading.rows
    if reading.split == "validation":
        data.require_validation()
    part = data.split_of(reading.split)
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


@dataclass
class StreamedSource(SampleSource):
    """A stream for each row of the largest batch."""

    streams: Mapping[int, RowStream]
    num_per_epoch: int | None = None

    def read(self, piece: Piece) -> tuple[np.ndarray, ...]:
        return self.streams[piece.slot].next(piece.length)
