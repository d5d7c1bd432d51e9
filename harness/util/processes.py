"""Processes that answer messages, and end with the process that started them. Imports no torch."""

import io
import os
import pickle
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from harness.util.lifeline import end_with_parent

# Time that a process has to end after it has closed its connection.
_ENDING_SECONDS = 5.0
# They are for the process that starts others, which needs them until it stops.
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def cpus() -> int:
    """Number of CPUs that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class WorkerDied(Exception):
    """A process ended without an answer; the text says how: ``was killed by SIGKILL``."""


class Worker:
    """A process that calls ``serve(connection, *arguments)``, its first message.

    It is started as a command: multiprocessing would import the main module once more, and with it
    torch. It ends when this object is collected, and when this process is gone, however it ended.

    Args:
        environment: variables with other values than in this process.
    """

    def __init__(self, **environment: str) -> None:
        self.connection, theirs = Pipe()
        folders = [folder or os.getcwd() for folder in sys.path]
        environment["PYTHONPATH"] = os.pathsep.join(folders)
        command = [sys.executable, "-P", "-m", __name__, str(theirs.fileno()), str(os.getpid())]
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)  # inherited
        try:
            self._popen = subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            theirs.close()
        self.end = weakref.finalize(self, _end, self._popen)

    def send(self, message: Any) -> None:
        """Send a message; if the process is dead, ``receive`` says so."""
        with suppress(BrokenPipeError, ConnectionResetError):
            self.connection.send_bytes(pickled(message))

    def receive(self) -> Any:
        """Wait for an answer.

        Raises:
            WorkerDied: there will be none.
        """
        try:
            return self.connection.recv()
        except (EOFError, ConnectionResetError):
            raise WorkerDied(self._death_in_words()) from None

    def _death_in_words(self) -> str:
        try:
            code = self._popen.wait(_ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        if code >= 0:
            return f"ended with exit code {code}, see its error in the log"
        killed = f"was killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            killed += ", from outside or by the kernel's OOM killer"
        return killed


def _end(popen: subprocess.Popen[bytes]) -> None:
    popen.kill()
    popen.wait()


def pickled(value: Any) -> bytes:
    """Pickle so that torch is not imported to read it: a scalar tensor becomes an integer."""
    file = io.BytesIO()
    _Pickler(file).dump(value)
    return file.getvalue()


class _Pickler(pickle.Pickler):
    # A dataset's number of the epoch is a tensor.
    def reducer_override(self, value: Any) -> Any:
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(value, torch.Tensor) and value.ndim == 0:
            return int, (int(value),)
        return NotImplemented


if __name__ == "__main__":
    end_with_parent(int(sys.argv[2]))  # a fork of the parent may keep the connection open
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the parent has ended
        connection = Connection(int(sys.argv[1]))
        serve, *arguments = connection.recv()
        serve(connection, *arguments)
