"""The process that reads ahead for ``read_ahead.py``: ``python -m harness.data.read_ahead_process FD``."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from queue import SimpleQueue

from harness.data.read_ahead import Chunk, Request
from harness.data.stream_reader import Document, RowReader
from harness.util.errors import DataError

_POLL_SECONDS = 1.0


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    # The rank closes the connection when it ends.
    with suppress(EOFError, OSError):
        readers, chunk_tokens = pickle.loads(connection.recv_bytes())
        _serve(connection, readers, chunk_tokens)


def _serve(connection: Connection, readers: Mapping[int, RowReader], chunk_tokens: int) -> None:
    requests: SimpleQueue[Request] = SimpleQueue()
    generations: dict[int, int] = {}
    documents: dict[int, Iterator[Document]] = {}

    rank = os.getppid()

    def receive() -> None:
        # In a thread, so that the rank never waits to send, and this process ends with it while it reads.
        with suppress(EOFError, OSError):
            # A fork of the rank may keep the connection open.
            while os.getppid() == rank:
                if connection.poll(_POLL_SECONDS):
                    request: Request = connection.recv()
                    generations[request.row] = request.generation
                    requests.put(request)
        os._exit(0)

    threading.Thread(target=receive, name="requests", daemon=True).start()
    while True:
        row, generation, position = requests.get()
        if generation != generations[row]:
            continue
        if position is not None:
            documents[row] = readers[row].read(position)
        if row not in documents:  # reading has failed
            continue
        chunk, error = _read(documents[row], chunk_tokens, readers[row].name)
        if error is not None:
            del documents[row]
        connection.send(Chunk(row, generation, chunk, error))


def _read(documents: Iterator[Document], count: int, name: str) -> tuple[list[Document], str | None]:
    """Read at least ``count`` tokens; with an error, return it and what was read before."""
    chunk: list[Document] = []
    try:
        while count > 0:
            chunk.append(next(documents))
            count -= len(chunk[-1].tokens)
    except DataError as error:
        return chunk, str(error)
    except Exception as error:
        traceback.print_exc()
        return chunk, f"{name} cannot be read: {type(error).__name__}: {' '.join(str(error).split())}"
    return chunk, None


if __name__ == "__main__":
    main()
