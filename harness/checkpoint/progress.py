"""Progress of a conversion: a bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

_SECONDS_BETWEEN_LINES = 5.0


@contextmanager
def progress(total: int, stream: TextIO | None = None) -> Iterator[Callable[[int], None]]:
    """Show progress inside the ``with`` block.

    Args:
        total: number of bytes to process.
        stream: where to show it; standard output by default.

    Yields:
        A function to call with the number of bytes processed since the last call.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        yield _Lines(total, stream).advance
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    # transient: remove the bar at the end; the caller prints a summary line.
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=stream), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda nbytes: bar.advance(task, nbytes)


class _Lines:
    """Writes a line every few seconds."""

    def __init__(self, total: int, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._stream, self._clock = total, stream, clock
        self._done, self._start = 0, clock()
        self._next = self._start + _SECONDS_BETWEEN_LINES

    def advance(self, nbytes: int) -> None:
        self._done += nbytes
        now = self._clock()
        if now >= self._next:
            self._next = now + _SECONDS_BETWEEN_LINES
            speed = self._done / 1e9 / (now - self._start)
            self._stream.write(f"{self._done / 1e9:.2f} of {self._total / 1e9:.2f} GB, {speed:.2f} GB/s\n")
            self._stream.flush()
