"""^C, SIGTERM, SIGHUP and SIGUSR2 ask a run to stop at the next step boundary; another ^C ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType

STOP_SIGNALS = tuple(
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR2") if hasattr(signal, name)
)

# A key press can arrive twice: from the terminal, and from a parent program that forwards it.
SAME_KEY_PRESS_SECONDS = 0.5


class StopRequest:
    """Record SIGINT, SIGTERM, SIGHUP, and SIGUSR2, which schedulers send before the time limit.

    The handler only sets flags. All ranks decide together at a step boundary whether to stop: a rank that
    stops alone leaves the others waiting in a collective.

    A signal that was ignored before (``nohup``, a background job of a shell script) stays ignored.

    Args:
        raises: whether a second ^C raises KeyboardInterrupt; otherwise it only sets ``insists``.

    Attributes:
        signal: the first signal received, or None.
        insists: whether another ^C followed.
    """

    def __init__(self, *, raises: bool = True) -> None:
        self.raises = raises
        self.signal: signal.Signals | None = None
        self.insists = False
        self._noted_at = 0.0
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread set handlers; in other threads no signal can request a stop.
        if threading.current_thread() is threading.main_thread():
            for number in STOP_SIGNALS:
                if signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            # Leave it if another handler was set meanwhile, such as ignoring it.
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)  # type: ignore[arg-type]
        self._previous = {}

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal, self._noted_at = signal.Signals(number), time.monotonic()
            # Ranks started by a controller or torchrun stay silent. os.write, because the handler may have
            # interrupted a write to sys.stderr. Its reader may be gone: ^C also ends the tee of a pipeline.
            if "RANK" not in os.environ:
                with suppress(OSError):
                    os.write(2, b"\nstopping after the step in progress; ^C again ends at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._noted_at > SAME_KEY_PRESS_SECONDS:
            self.insists = True
            if self.raises:
                raise KeyboardInterrupt


@contextmanager
def stop_signals_interrupt() -> Iterator[None]:
    """Make SIGTERM, SIGHUP and SIGUSR2 raise KeyboardInterrupt inside the context, as SIGINT does."""
    with _handled_by(signal.default_int_handler):
        yield


@contextmanager
def stop_signals_ignored() -> Iterator[None]:
    """Ignore the stop signals inside the context, so that a row being written is completed."""
    with _handled_by(signal.SIG_IGN):
        yield


@contextmanager
def _handled_by(handler: object) -> Iterator[None]:
    before = _set_handlers(handler)
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)  # type: ignore[arg-type]


def ignore_stop_signals() -> None:
    """Ignore the stop signals until the process ends, so that it can write its result.

    A launcher that sees one rank end sends them to the others while they write.
    """
    _set_handlers(signal.SIG_IGN)


def _set_handlers(handler: object) -> dict[int, object]:
    """Set the handler of every stop signal that is not ignored; return the previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in wanted}  # type: ignore[arg-type]
