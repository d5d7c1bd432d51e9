"""Units of work for several processes: each takes the next unit when it has finished one."""

import traceback
from collections import deque
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

from harness.util.errors import ConfigError, HarnessError, MachineError, UserError
from harness.util.processes import Worker, WorkerDied

Work = Callable[[Any, Callable[[int], None]], None]
"""Works on a unit, and calls the function with the progress since the last call."""


class Workers:
    """Processes that work on units, which have a ``number`` and whose text names them in errors.

    Args:
        prepare: called once in each process with its index, returns the work; pickled.
        does: what a process does, for errors, such as "tokenized".
        works: what would work if memory is short, for errors.
    """

    def __init__(self, prepare: Callable[[int], Work], does: str, works: str) -> None:
        self._prepare = prepare
        self._does = does
        self._works = works
        self._busy: dict[Connection, tuple[Worker, Any]] = {}  # with the unit of each
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
        workers = [Worker() for _ in range(min(count, len(units)))]
        try:
            for index, worker in enumerate(workers):
                worker.send((_work, self._prepare, index, self._does))
                self._give(worker, waiting.popleft())
            while self._busy:
                for connection in wait(list(self._busy)):
                    assert isinstance(connection, Connection)
                    if connection in self._busy:  # else another one's failure has ended it
                        self._answer(*self._busy[connection], waiting, advance)
        finally:
            for worker in workers:
                worker.end()
        if self._failed is not None:
            raise self._failed[1]

    def _give(self, worker: Worker, unit: Any) -> None:
        self._busy[worker.connection] = (worker, unit)
        worker.send(unit)

    def _end(self, worker: Worker) -> None:
        worker.end()
        del self._busy[worker.connection]

    def _answer(
        self, worker: Worker, unit: Any, waiting: deque[Any], advance: Callable[[Any, int], None]
    ) -> None:
        try:
            answer = worker.receive()
        except WorkerDied as death:
            answer = MachineError(
                f"a process that {self._does} {unit} {death}; finished units are kept; would work: "
                f"the same command, or {self._works} if memory is short"
            )
        if isinstance(answer, int):
            advance(unit, answer)
        elif isinstance(answer, BaseException):
            # The error of the first unit is raised, so the processes of later units end.
            waiting.clear()
            if self._failed is None or unit.number < self._failed[0]:
                self._failed = unit.number, answer
            for other, others_unit in list(self._busy.values()):
                if others_unit.number >= self._failed[0]:
                    self._end(other)
        elif waiting:
            self._give(worker, waiting.popleft())
        else:
            self._end(worker)


def _work(connection: Connection, prepare: Callable[[int], Work], index: int, does: str) -> None:
    try:
        work = prepare(index)
        while True:
            unit = connection.recv()
            work(unit, connection.send)
            connection.send("done")
    except ConfigError as error:  # its constructor takes other arguments than pickle gives it
        connection.send(UserError(str(error)))
    except (UserError, MachineError, OSError) as error:
        connection.send(error)
    except EOFError:
        raise
    except Exception:  # not every exception can be pickled
        connection.send(
            HarnessError(f"a process that {does} units failed:\n{traceback.format_exc()}")
        )
