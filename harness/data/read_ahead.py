"""Processes of a rank that read and tokenize the documents of its rows ahead.

Each process has some of the rank's rows, and the documents of a row stay in order, so they are the
same with any number of processes. A rank sends the readers once, then requests; each is answered by
a chunk of a row's documents. At most ``CHUNKS_AHEAD`` chunks of a row are requested or waiting to
be used.
"""

from __future__ import annotations

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
        self._workers: list[Worker] = []
        self._seeks: dict[int, Position] = {}
        self._asked = dict.fromkeys(readers, 0)  # how often a row was sought
        self._chunks: dict[int, deque[deque[TokenizedDocument] | DataError]] = {
            row: deque() for row in readers
        }
        self.close()

    def reader(self, row: int) -> RowReader:
        """Return a reader of one row; closing it stops all processes."""
        return _PoolReader(**vars(self._readers[row]), pool=self)

    def seek(self, row: int, position: Position) -> None:
        """Make ``position`` the next document of ``row``.

        The next ``take`` of any row sends this, so that all rows are read at the same time.
        """
        self._seeks[row] = position
        self._chunks[row].clear()
        self._asked[row] += 1

    def take(self, row: int) -> TokenizedDocument:
        """Return the next document of ``row``, which must have been sought since the pool was closed.

        Raises:
            DataError: the documents cannot be read.
            MachineError: the row's process has died.
        """
        if not self._workers:
            self._start()
        seeks = self._seeks
        self._seeks = {}
        # First a chunk of every row, then further ones.
        for number in range(CHUNKS_AHEAD):
            for each, position in seeks.items():
                self._request(each, None if number else position)
        chunks = self._chunks[row]
        while not chunks:
            self._receive(row)
        first = chunks[0]
        if isinstance(first, DataError):
            raise first
        document = first.popleft()
        if not first:
            chunks.popleft()
            self._request(row, None)
        return document

    def close(self) -> None:
        """Stop the processes. Readers must seek before they continue."""
        for worker in self._workers:
            worker.end()
        self._workers = []
        self._worker_of: dict[int, Worker] = {}
        for chunks in self._chunks.values():
            chunks.clear()

    def _start(self) -> None:
        rows = list(self._readers)
        self._workers = [Worker(**_ENVIRONMENT) for _ in range(self._num_processes)]
        for first, worker in enumerate(self._workers):  # which import meanwhile
            readers = {row: self._readers[row] for row in rows[first :: self._num_processes]}
            worker.send((_serve, readers, self._chunk_tokens))
            self._worker_of |= dict.fromkeys(readers, worker)

    def _request(self, row: int, position: Position | None) -> None:
        self._worker_of[row].send((row, self._asked[row], position))

    def _receive(self, row: int) -> None:
        """Receive a chunk from the process of ``row``, of any of its rows."""
        try:
            row, asked, documents, error = self._worker_of[row].receive()
        except WorkerDied as death:
            raise MachineError(
                f"{self._readers[row].name}: a process that reads ahead {death}; would work: "
                "fewer data.workers, or 0"
            ) from death
        if asked != self._asked[row]:  # from an earlier position
            return
        if documents:
            self._chunks[row].append(deque(documents))
        if error is not None:
            self._chunks[row].append(DataError(error))


@dataclass(frozen=True)
class _PoolReader(RowReader):
    pool: ReaderPool

    def read(self, position: Position) -> Iterator[TokenizedDocument]:
        self.pool.seek(self.row, position)
        return iter(lambda: self.pool.take(self.row), None)  # without end

    def close(self) -> None:
        self.pool.close()


def _serve(connection: Connection, readers: Mapping[int, RowReader], chunk_tokens: int) -> None:
    requests: SimpleQueue[tuple[int, int, Position | None]] = SimpleQueue()
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
        row, asked, position = requests.get()
        if position is not None:
            documents[row] = readers[row].read(position)
        connection.send((row, asked, *_read(documents[row], chunk_tokens, readers[row].name)))


def _read(
    documents: Iterator[TokenizedDocument], count: int, name: str
) -> tuple[list[TokenizedDocument], str | None]:
    """Read at least ``count`` tokens; with an error, return it and what was read before."""
    chunk: list[TokenizedDocument] = []
    try:
        while count > 0:
            chunk.append(next(documents))
            count -= len(chunk[-1].tokens)
    except StopIteration:  # reading has failed earlier
        pass
    except DataError as error:
        return chunk, str(error)
    except Exception as error:
        traceback.print_exc()
        return chunk, f"{name} cannot be read: {describe(error)}"
    return chunk, None
