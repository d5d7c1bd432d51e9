"""Processes of a rank that read and tokenize the documents of its rows ahead.

Each process has some of the rank's rows, and the documents of a row stay in order, so they are the same with
any number of processes. A rank sends the readers once, then requests; each is answered by a chunk of a
row's documents. At most ``CHUNKS_AHEAD`` chunks of a row are requested or waiting to be used.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from multiprocessing import Pipe
from typing import Any, NamedTuple

from harness.data.stream_reader import Document, Position, Reader, RowReader
from harness.util.errors import DataError, MachineError

CHUNKS_AHEAD = 2
LEAST_CHUNK_TOKENS = 4096  # smaller messages cost more than their tokens
_ENDING_SECONDS = 5.0


class Request(NamedTuple):
    """Ask for a chunk of a row's documents."""

    row: int
    generation: int
    """Number of the row's seeks so far; chunks of an earlier one are not used."""
    position: Position | None
    """Where to read from; None continues."""


class Chunk(NamedTuple):
    """Answer to a request."""

    row: int
    generation: int
    documents: list[Document]
    error: str | None
    """Reading failed after these documents."""


class ReaderPool:
    """The processes of a rank; the first document that is read starts them.

    They end with the rank, however it ends, because their connection does.

    Args:
        readers: the rank's rows.
        processes: how many to start; at most one for each row.
        chunk_tokens: least number of tokens in a chunk.
    """

    def __init__(self, readers: Mapping[int, RowReader], processes: int, *, chunk_tokens: int) -> None:
        self._readers, self._chunk_tokens = readers, max(chunk_tokens, LEAST_CHUNK_TOKENS)
        self._num_processes = min(processes, len(readers))
        self._processes: list[_Process] = []
        self._process_of: dict[int, _Process] = {}
        self._generations = dict.fromkeys(readers, 0)
        self._seeks: dict[int, Position] = {}
        self._chunks: dict[int, deque[deque[Document] | DataError]] = {row: deque() for row in readers}

    def reader(self, row: int) -> Reader:
        """Return a reader of one row."""
        return _PoolReader(self, self._readers[row], row)

    def seek(self, row: int, position: Position) -> int:
        """Make ``position`` the next document of ``row``; return the generation, for ``take``.

        The next ``take`` of any row sends this, so that all rows are read at the same time.
        """
        self._generations[row] += 1
        self._chunks[row].clear()
        self._seeks[row] = position
        return self._generations[row]

    def take(self, row: int, generation: int) -> Document:
        """Return the next document of ``row``.

        Raises:
            DataError: the documents cannot be read.
            MachineError: the row's process has died.
        """
        if generation != self._generations[row]:
            raise ValueError(f"row {row}: another position was loaded, or the pool was closed")
        self._send_seeks()
        chunks = self._chunks[row]
        while not chunks:
            self._receive(self._process_of[row])
        first = chunks[0]
        if isinstance(first, DataError):
            raise first
        document = first.popleft()
        if not first:
            chunks.popleft()
            self._process_of[row].send(Request(row, generation, None))
        return document

    def close(self) -> None:
        """Stop the processes. Readers must seek before they continue."""
        for process in self._processes:
            process.end()
        self._processes, self._process_of = [], {}
        for row, chunks in self._chunks.items():
            if row not in self._seeks:
                self._generations[row] += 1
            chunks.clear()

    def _send_seeks(self) -> None:
        if not self._processes:
            self._start()
        seeks, self._seeks = self._seeks, {}
        # First a chunk of every row, then further ones.
        for number in range(CHUNKS_AHEAD):
            for row, position in seeks.items():
                self._process_of[row].send(Request(row, self._generations[row], None if number else position))

    def _start(self) -> None:
        rows = list(self._readers)
        shares = [rows[first :: self._num_processes] for first in range(self._num_processes)]
        self._processes = [_Process(share, self._readers[share[0]].name) for share in shares]
        for process in self._processes:  # which import meanwhile
            process.send_readers({row: self._readers[row] for row in process.rows}, self._chunk_tokens)
            self._process_of |= dict.fromkeys(process.rows, process)

    def _receive(self, process: _Process) -> None:
        row, generation, documents, error = process.receive()
        if generation != self._generations[row]:
            return
        if documents:
            self._chunks[row].append(deque(documents))
        if error is not None:
            self._chunks[row].append(DataError(error))


class _PoolReader(Reader):
    def __init__(self, pool: ReaderPool, reader: RowReader, row: int) -> None:
        self._pool, self._reader, self._row = pool, reader, row

    @property
    def beginning(self) -> Position:
        return self._reader.beginning

    def check(self, position: Position) -> None:
        self._reader.check(position)

    def read(self, position: Position) -> Iterator[Document]:
        return self._documents(self._pool.seek(self._row, position))

    def close(self) -> None:
        self._pool.close()

    def _documents(self, generation: int) -> Iterator[Document]:
        while True:
            yield self._pool.take(self._row, generation)


class _Process:
    """One process and the connection to it.

    It is started as a command: multiprocessing would import the main module once more, and with it torch.
    """

    def __init__(self, rows: list[int], name: str) -> None:
        self.rows, self._name = rows, name
        self._connection, theirs = Pipe()
        # The mask is inherited: stop signals are for the rank, which needs documents until it stops.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        try:
            self._popen = subprocess.Popen(
                [sys.executable, "-P", "-m", "harness.data.read_ahead_process", str(theirs.fileno())],
                env={**os.environ, **_environment()},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.end = weakref.finalize(self, _end, self._popen)

    def send_readers(self, readers: dict[int, RowReader], chunk_tokens: int) -> None:
        try:
            self._connection.send_bytes(pickled((readers, chunk_tokens)))
        except OSError as error:
            raise self._death() from error

    def send(self, request: Request) -> None:
        try:
            self._connection.send(request)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> Chunk:
        try:
            chunk: Chunk = self._connection.recv()
            return chunk
        except (EOFError, OSError) as error:
            raise self._death() from error

    def _death(self) -> MachineError:
        try:
            code = self._popen.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        ended = f"ended with exit code {code}, see its error in the rank's log"
        if code is not None and code < 0:
            ended = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            ended += ", from outside or by the kernel's OOM killer"
        return MachineError(
            f"{self._name}: a process that reads ahead {ended}; would work: fewer data.workers, or 0"
        )


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def _environment() -> dict[str, str]:
    """Variables of a process that reads ahead: the same modules, one thread, no GPU, no torch."""
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        "PYTHONUTF8": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",  # pyarrow's threads, too
        "USE_TORCH": "0",  # read by `datasets`
    }


def pickled(value: Any) -> bytes:
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    """Pickles a dataset so that torch is not imported to read it: its number of the epoch is a tensor."""

    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0:
            return int, (int(value),)
        return NotImplemented
