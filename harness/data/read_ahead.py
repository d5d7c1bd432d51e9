"""Processes of a rank that read and tokenize the documents of its rows ahead.

Each process has some of the rank's rows, and the documents of a row stay in order, so they are the same with
any number of processes. A rank sends the readers once, then requests; each is answered by a chunk of a
row's documents. At most ``CHUNKS_AHEAD`` chunks of a row are requested or waiting to be used. The processes
run ``python -m harness.data.read_ahead``.
"""

from __future__ import annotations

import io
import os
import pickle
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from harness.data.documents import describe
from harness.data.stream_reader import Position, RowReader, TokenizedDocument
from harness.util.errors import DataError, MachineError
from harness.util.lifeline import end_with_parent

CHUNKS_AHEAD = 2
LEAST_CHUNK_TOKENS = 4096  # smaller messages cost more than their tokens
_ENDING_SECONDS = 5.0


class ReaderPool:
    """The processes of a rank; the first document that is read starts them. They end with the rank.

    Args:
        processes: how many to start; at most one for each row.
        chunk_tokens: least number of tokens in a chunk.
    """

    def __init__(self, readers: Mapping[int, RowReader], processes: int, *, chunk_tokens: int) -> None:
        self._readers, self._chunk_tokens = readers, max(chunk_tokens, LEAST_CHUNK_TOKENS)
        self._num_processes = min(processes, len(readers))
        self._processes: list[_Process] = []
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
        if not self._processes:
            self._start()
        seeks, self._seeks = self._seeks, {}
        # First a chunk of every row, then further ones.
        for number in range(CHUNKS_AHEAD):
            for each, position in seeks.items():
                self._request(each, None if number else position)
        chunks = self._chunks[row]
        while not chunks:
            self._receive(self._process_of[row])
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
        for process in self._processes:
            process.end()
        self._processes, self._process_of = [], dict[int, _Process]()
        for chunks in self._chunks.values():
            chunks.clear()

    def _start(self) -> None:
        rows = list(self._readers)
        shares = [rows[first :: self._num_processes] for first in range(self._num_processes)]
        self._processes = [_Process(self._readers[share[0]].name) for share in shares]
        for process, share in zip(self._processes, shares, strict=True):  # which import meanwhile
            process.send(pickle_for_reader(({row: self._readers[row] for row in share}, self._chunk_tokens)))
            self._process_of |= dict.fromkeys(share, process)

    def _request(self, row: int, position: Position | None) -> None:
        self._process_of[row].send(pickle.dumps((row, self._asked[row], position)))

    def _receive(self, process: _Process) -> None:
        row, asked, documents, error = process.receive()
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


class _Process:
    """One process and the connection to it.

    It is started as a command: multiprocessing would import the main module once more, and with it torch.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._connection, theirs = Pipe()
        # The mask is inherited: stop signals are for the rank, which needs documents until it stops.
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        own = {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            "PYTHONUTF8": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",  # pyarrow's threads, too
            "USE_TORCH": "0",  # read by `datasets`
        }
        try:
            self._popen = subprocess.Popen(
                command, env={**os.environ, **own}, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()]
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.end = weakref.finalize(self, _end, self._popen)

    def send(self, message: bytes) -> None:
        try:
            self._connection.send_bytes(message)
        except OSError as error:
            raise self._death() from error

    def receive(self) -> tuple[int, int, list[TokenizedDocument], str | None]:
        """Return a row, the number of its position, its next documents, and the error after them."""
        try:
            answer: tuple[int, int, list[TokenizedDocument], str | None] = self._connection.recv()
            return answer
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


def pickle_for_reader(value: Any) -> bytes:
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


def _serve(connection: Connection) -> None:
    readers, chunk_tokens = pickle.loads(connection.recv_bytes())
    requests: SimpleQueue[tuple[int, int, Position | None]] = SimpleQueue()
    documents: dict[int, Iterator[TokenizedDocument]] = {}

    def receive() -> None:
        # In a thread, so that the rank never waits to send, and this process ends with it while it reads.
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


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))  # a fork of the rank may keep the connection open
    with suppress(EOFError, OSError):  # the rank closes the connection when it ends
        _serve(Connection(int(sys.argv[1])))
