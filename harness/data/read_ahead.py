"""Processes of a rank that read and tokenize the documents of its rows ahead.

Each process has some of the rank's rows, and the documents of a row stay in order, so they are the
same with any number of processes. A rank sends the readers once, then requests; each is answered by
a chunk of a row's documents. At most ``CHUNKS_AHEAD`` chunks of a row are requested or waiting to
be used.
"""

import os
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue

from harness.data.documents import describe
from harness.data.stream_reader import Position, RowReader, TokenizedDocument
from harness.util.errors import DataError, MachineError
from harness.util.processes import Worker, WorkerDied

Chunk = tuple[list[TokenizedDocument], str | None]
"""Documents of a row, and the error that came after them."""
CHUNKS_AHEAD = 2
LEAST_CHUNK_TOKENS = 4096  # smaller messages cost more than their tokens
_ENVIRONMENT = {
    "PYTHONUTF8": "1",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",  # pyarrow's threads, too
    "USE_TORCH": "0",  # read by `datasets`
}


class ReaderPool:
    """The processes of a rank; the first document that is read starts them. They end with the rank.

    Args:
        processes: how many to start; at most one for each row.
        chunk_tokens: least number of tokens in a chunk.
    """

    def __init__(
        self, readers: Mapping[int, RowReader], processes: int, *, chunk_tokens: int
    ) -> None:
        self._readers = readers
        self._chunk_tokens = max(chunk_tokens, LEAST_CHUNK_TOKENS)
        self._num_processes = min(processes, len(readers))
        self._workers: dict[int, Worker] = {}
        self._begins: dict[int, Position] = {}
        self.close()

    def reader(self, row: int) -> RowReader:
        """Return a reader of one row; closing it stops all processes."""
        return _PoolReader(**vars(self._readers[row]), pool=self)

    def read(self, row: int, position: Position) -> Iterator[TokenizedDocument]:
        """Return the documents of ``row`` from ``position`` on, without end, until the pool is closed.

        The first document that is read of any row sends this, so that all rows are opened at the
        same time.

        Raises:
            DataError: the documents cannot be read.
            MachineError: the row's process has died.
        """
        self._begins[row] = position
        return self._documents(row)

    def _documents(self, row: int) -> Iterator[TokenizedDocument]:
        if not self._workers:
            rows = list(self._readers)
            workers = [Worker(**_ENVIRONMENT) for _ in range(self._num_processes)]
            for first, worker in enumerate(workers):  # which import meanwhile
                readers = {each: self._readers[each] for each in rows[first :: len(workers)]}
                worker.send((_serve, readers, self._chunk_tokens))
                self._workers |= dict.fromkeys(readers, worker)
        for each, position in self._begins.items():
            for _ in range(self._requested[each]):
                self._receive(each)  # from an earlier position
            self._request(each, position)
        self._begins = {}
        while True:
            while self._requested[row] < CHUNKS_AHEAD:
                self._request(row, None)
            documents, error = self._receive(row)
            yield from documents
            if error is not None:
                raise DataError(error)

    def close(self) -> None:
        """Stop the processes. Documents are then read from a position again."""
        for worker in self._workers.values():
            worker.end()
        self._workers = {}
        self._requested = dict.fromkeys(self._readers, 0)
        self._chunks: dict[int, deque[Chunk]] = {row: deque() for row in self._readers}

    def _request(self, row: int, position: Position | None) -> None:
        self._workers[row].send((row, position))
        self._requested[row] += 1

    def _receive(self, row: int) -> Chunk:
        """Return the next chunk of a row; its process also sends those of its other rows."""
        while not self._chunks[row]:
            try:
                other, *chunk = self._workers[row].receive()
            except WorkerDied as death:
                raise MachineError(
                    f"{self._readers[row].name}: a process that reads ahead {death}; would work: "
                    "fewer data.workers, or 0"
                ) from death
            self._chunks[other].append((chunk[0], chunk[1]))
        self._requested[row] -= 1
        return self._chunks[row].popleft()


@dataclass(frozen=True)
class _PoolReader(RowReader):
    pool: ReaderPool

    def read(self, position: Position) -> Iterator[TokenizedDocument]:
        return self.pool.read(self.row, position)

    def close(self) -> None:
        self.pool.close()


def _serve(connection: Connection, readers: Mapping[int, RowReader], chunk_tokens: int) -> None:
    requests: SimpleQueue[tuple[int, Position | None]] = SimpleQueue()
    documents: dict[int, Iterator[TokenizedDocument]] = {}

    def receive() -> None:
        # In a thread, so that the rank never waits to send, and this process ends with it while it
        # reads.
        with suppress(EOFError, OSError):
            while True:
                requests.put(connection.recv())
        os._exit(0)

    threading.Thread(target=receive, name="requests", daemon=True).start()
    while True:
        row, position = requests.get()
        if position is not None:
            documents[row] = readers[row].read(position)
        connection.send((row, *_read(documents[row], chunk_tokens, readers[row].name)))


def _read(documents: Iterator[TokenizedDocument], count: int, name: str) -> Chunk:
    """Read at least ``count`` tokens; with an error, return it and what was read before."""
    chunk: list[TokenizedDocument] = []
    try:
        for document in documents:  # none if reading has failed earlier
            chunk.append(document)
            count -= len(document.tokens)
            if count <= 0:
                break
    except DataError as error:
        return chunk, str(error)
    except Exception as error:
        traceback.print_exc()
        return chunk, f"{name} cannot be read: {describe(error)}"
    return chunk, None
