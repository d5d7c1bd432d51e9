"""^C and SIGTERM ask a run to stop at the next step boundary; a second one ends it where it stands."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType


class StopRequest:
    """Notes the first SIGINT or SIGTERM while it is entered; the second has its ordinary effect.

    Only the flag is set in the handler: whether to stop is decided by all ranks together at a step
    boundary, because one that stops alone leaves the others waiting in a collective.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
        elif number == signal.SIGINT:
            raise KeyboardInterrupt
