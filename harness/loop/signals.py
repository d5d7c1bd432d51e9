"""^C, SIGTERM and SIGUSR2 ask a run to stop at the next step boundary; another ^C ends it where it stands."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2") if hasattr(signal, name)
)

# A key press can arrive twice: from the terminal, and from a program around this one that passes it on.
SAME_KEY_PRESS_SECONDS = 0.5


class StopRequest:
    """Notes SIGINT, SIGTERM, SIGHUP, and SIGUSR2, by which schedulers tell that time is nearly up.

    Only flags are set in the handler: whether to stop is decided by all ranks together at a step boundary,
    because one that stops alone leaves the others waiting in a collective.

    A signal that was ignored before (``nohup``, a background job of a shell script) stays ignored.

    Args:
        raises: whether a second ^C raises KeyboardInterrupt; without, it only sets ``insists``.

    Attributes:
        signal: the first signal, None before one came.
        insists: whether another ^C followed.
    """

    def __init__(self, *, raises: bool = True) -> None:
        self.raises = raises
        self.signal: signal.Signals | None = None
        self.insists = False
        self._noted_at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread set handlers; elsewhere nobody can be asked to stop by a signal.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_at = signal.Signals(number), time.monotonic()
            # Ranks of a controller or of torchrun leave the talking to it. Not through sys.stderr, which the
            # handler may have interrupted in the middle of a write.
            if "RANK" not in os.environ:
                os.write(2, b"\nstopping after the step in progress; ^C again ends at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._noted_at > SAME_KEY_PRESS_SECONDS:
            self.insists = True
            if self.raises:
                raise KeyboardInterrupt


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Makes SIGTERM, SIGHUP and SIGUSR2 raise KeyboardInterrupt, as SIGINT does, while it is entered."""
    before = _set_handlers(signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]


def ignore_stop_signals() -> None:
    """From here on this process writes down what became of it, and is asked for nothing else.

    A launcher that sees one rank end asks the others to, in the middle of their last writes.
    """
    _set_handlers(signal.SIG_IGN)


def _set_handlers(handler: object) -> dict[int, object]:
    """Sets the handler of every stop signal that is not ignored; returns what was there."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in wanted}  # type: ignore[arg-type]
