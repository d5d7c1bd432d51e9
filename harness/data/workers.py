"""Processes that tokenize units, and end with the process that started them."""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import signal
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from harness.cluster.lifeline import end_with_parent
from harness.data.config import TokenizerConfig
from harness.data.documents import Source
from harness.data.tokenizer import build_tokenizer
from harness.data.units import Unit, write_unit
from harness.errors import DataError, HarnessError, MachineError

_POLL_SECONDS = 1.0
# Time that a process has to end after it has closed its connection.
_ENDING_SECONDS = 5.0
Advance = Callable[[Unit, int], None]


def can_start_processes() -> bool:
    """Whether this process may have children: multiprocessing forbids it for its daemons (``RankPool``)."""
    return not mp.current_process().daemon


@dataclass
class _Worker:
    process: BaseProcess
    unit: Unit


class Workers:
    """Processes that tokenize the units of a source into a folder.

    Args:
        source: the source; pickled.
        config: of the tokenizer, which each process builds.
        fingerprint: of the tokenizer.
        folder: where to write.
    """

    def __init__(self, source: Source, config: TokenizerConfig, fingerprint: str, folder: Path) -> None:
        self._arguments = (source, config, fingerprint, folder)
        self._running: dict[Connection, _Worker] = {}
        self._failed: tuple[int, BaseException] | None = None

    def run(self, units: Sequence[Unit], count: int, advance: Advance) -> None:
        """Tokenize units in ``count`` processes.

        Args:
            units: in the order of their documents.
            count: number of processes.
            advance: called with a unit and the approximate number of its bytes read since the last call.

        Raises:
            DataError: of the first document that cannot be read, as in one process.
            OSError: the folder is full or not writable.
            MachineError: a process died.
        """
        waiting = deque(units)
        try:
            for _ in range(min(count, len(units))):
                self._start(waiting.popleft())
            while self._running:
                for connection in wait(list(self._running), timeout=_POLL_SECONDS):
                    assert isinstance(connection, Connection)
                    self._answer(connection, waiting, advance)
        finally:
            for connection in list(self._running):
                self._end(connection)
        if self._failed is not None:
            raise self._failed[1]

    def _start(self, unit: Unit) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs, os.getpid(), *self._arguments), daemon=True)
        process.start()
        theirs.close()
        self._running[ours] = _Worker(process, unit)
        self._send(ours, unit)

    def _send(self, connection: Connection, unit: Unit) -> None:
        self._running[connection].unit = unit
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading reports a dead process
            connection.send(unit)

    def _end(self, connection: Connection) -> None:
        worker = self._running.pop(connection)
        worker.process.kill()
        worker.process.join()
        connection.close()

    def _answer(self, connection: Connection, waiting: deque[Unit], advance: Advance) -> None:
        worker = self._running.get(connection)
        if worker is None:  # ended because another one failed
            return
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(_ENDING_SECONDS)
            answer = MachineError(_death_in_words(worker))
        if isinstance(answer, int):
            advance(worker.unit, answer)
        elif isinstance(answer, BaseException):
            self._fail(worker.unit.number, answer, waiting)
        elif waiting:
            self._send(connection, waiting.popleft())
        else:
            self._end(connection)

    def _fail(self, number: int, error: BaseException, waiting: deque[Unit]) -> None:
        """Remember the error of the first unit, and end the processes of later units."""
        waiting.clear()
        if self._failed is None or number < self._failed[0]:
            self._failed = number, error
        for connection, worker in list(self._running.items()):
            if worker.unit.number >= self._failed[0]:
                self._end(connection)


def _death_in_words(worker: _Worker) -> str:
    code = worker.process.exitcode
    how = f"was ended by signal {-code}" if code is not None and code < 0 else f"ended with exit code {code}"
    memory = " (out of memory?)" if code == -signal.SIGKILL else ""
    return (
        f"a process that tokenized {worker.unit} {how}{memory}; finished units are kept; would work: the "
        "same command, or fewer processes (data.tokenize_workers, tokenize.workers) if memory is short"
    )


def _work(
    connection: Connection,
    parent: int,
    source: Source,
    config: TokenizerConfig,
    fingerprint: str,
    folder: Path,
) -> None:
    """Tokenize units until the connection is closed."""
    # ^C on the terminal reaches all processes; the one that started this one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    # The tokenizers library reads it once. One process of several needs one thread.
    os.environ["RAYON_NUM_THREADS"] = "1"
    try:
        tokenizer = build_tokenizer(config)
        tokenizer.num_threads = 1
        if tokenizer.fingerprint != fingerprint:
            raise DataError(f"tokenizer file {config.file} has changed meanwhile")
        while True:
            unit = connection.recv()
            write_unit(folder, unit, source, tokenizer, connection.send)
            connection.send("done")
    except EOFError:
        return
    except (DataError, MachineError, OSError) as error:
        connection.send(error)
    except Exception:  # not every exception can be pickled
        connection.send(HarnessError(f"tokenizing failed:\n{traceback.format_exc()}"))
