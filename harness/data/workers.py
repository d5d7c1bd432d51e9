"""Processes that work on units, and end with the process that started them."""

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
from typing import Any

from harness.util.errors import ConfigError, HarnessError, MachineError, UserError
from harness.util.lifeline import end_with_parent

_POLL_SECONDS = 1.0
# Time that a process has to end after it has closed its connection.
_ENDING_SECONDS = 5.0


Work = Callable[[Any, Callable[[int], None]], None]
"""Works on a unit, and calls the function with the progress since the last call."""


def cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def can_start_processes() -> bool:
    """Whether this process may have children: multiprocessing forbids it for its daemons (``RankPool``)."""
    return not mp.current_process().daemon


@dataclass
class _Worker:
    process: BaseProcess
    unit: Any


class Workers:
    """Processes that work on units, which have a ``number`` and whose text names them in errors.

    Args:
        prepare: called once in each process with its index, returns the work; pickled.
        does: what a process does, for errors, such as "tokenized".
        works: what would work if memory is short, for errors.
    """

    def __init__(self, prepare: Callable[[int], Work], does: str, works: str) -> None:
        self._prepare, self._does, self._works = prepare, does, works
        self._started = 0
        self._running: dict[Connection, _Worker] = {}
        self._failed: tuple[int, BaseException] | None = None

    def run(self, units: Sequence[Any], count: int, advance: Callable[[Any, int], None]) -> None:
        """Work on units in ``count`` processes.

        Args:
            advance: called with a unit and its progress since the last call.

        Raises:
            UserError, OSError: of the first unit that failed, as in one process.
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

    def _start(self, unit: Any) -> None:
        context = mp.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = theirs, os.getpid(), self._prepare, self._started, self._does
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        self._started += 1
        theirs.close()
        self._running[ours] = _Worker(process, unit)
        self._send(ours, unit)

    def _send(self, connection: Connection, unit: Any) -> None:
        self._running[connection].unit = unit
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # reading reports a dead process
            connection.send(unit)

    def _end(self, connection: Connection) -> None:
        worker = self._running.pop(connection)
        worker.process.kill()
        worker.process.join()
        connection.close()

    def _answer(
        self, connection: Connection, waiting: deque[Any], advance: Callable[[Any, int], None]
    ) -> None:
        worker = self._running.get(connection)
        if worker is None:  # ended because another one failed
            return
        try:
            answer = connection.recv()
        except (EOFError, ConnectionResetError):
            worker.process.join(_ENDING_SECONDS)
            answer = MachineError(self._death_in_words(worker))
        if isinstance(answer, int):
            advance(worker.unit, answer)
        elif isinstance(answer, BaseException):
            self._fail(worker.unit.number, answer, waiting)
        elif waiting:
            self._send(connection, waiting.popleft())
        else:
            self._end(connection)

    def _death_in_words(self, worker: _Worker) -> str:
        code = worker.process.exitcode
        signaled = code is not None and code < 0
        how = f"was ended by signal {-code}" if code and signaled else f"ended with exit code {code}"
        memory = " (out of memory?)" if code == -signal.SIGKILL else ""
        return (
            f"a process that {self._does} {worker.unit} {how}{memory}; finished units are kept; would work: "
            f"the same command, or {self._works} if memory is short"
        )

    def _fail(self, number: int, error: BaseException, waiting: deque[Any]) -> None:
        """Remember the error of the first unit, and end the processes of later units."""
        waiting.clear()
        if self._failed is None or number < self._failed[0]:
            self._failed = number, error
        for connection, worker in list(self._running.items()):
            if worker.unit.number >= self._failed[0]:
                self._end(connection)


def _work(connection: Connection, parent: int, prepare: Callable[[int], Work], index: int, does: str) -> None:
    # ^C on the terminal reaches all processes; the one that started this one handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(parent)
    try:
        work = prepare(index)
        while True:
            unit = connection.recv()
            work(unit, connection.send)
            connection.send("done")
    except EOFError:
        return
    except ConfigError as error:  # its constructor takes other arguments than pickle gives it
        connection.send(UserError(str(error)))
    except (UserError, MachineError, OSError) as error:
        connection.send(error)
    except Exception:  # not every exception can be pickled
        connection.send(HarnessError(f"a process that {does} units failed:\n{traceback.format_exc()}"))
