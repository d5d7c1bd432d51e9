"""Console output of runs and verbs: plain lines, which look the same in a file, a pipe and a terminal."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TextIO

from harness.metrics.columns import Metric

_logger = logging.getLogger(__name__)


class PlainConsole:
    """Shows progress, metrics and messages of a run: one flushed line per row.

    Without a stream it shows nothing. Its warnings then go to the log of the process, because they
    say that requested output is lost.
    """

    def __init__(self, total_steps: int, stream: TextIO | None) -> None:
        self._total_steps = total_steps
        self._stream = stream
        self._metrics: Sequence[Metric] = ()

    def begin(self, metrics: Sequence[Metric]) -> None:
        """Set what rows show, in order."""
        self._metrics = metrics

    def log(self, row: Mapping[str, Any]) -> None:
        """Show one row of metrics, with its ``step``: ``step    20/100  loss 5.1234  grad_norm 1.234``."""
        width = max(5, len(str(self._total_steps)))
        self.message(f"step {row['step']:>{width}}/{self._total_steps}  {self._text(row)}".rstrip())

    def _text(self, row: Mapping[str, Any]) -> str:
        shown = []
        for metric in self._metrics:
            if not metric.line:
                continue
            keys = [metric.name]
            if metric.name.endswith("*"):
                prefix = metric.name.removesuffix("*")
                keys = [key for key in row if key.startswith(prefix)]
            shown += [metric.format(key, row[key]) for key in keys if row.get(key) is not None]
        # A metric may give an empty text for a value that is not worth a place.
        return "  ".join(filter(None, shown))

    def message(self, text: str) -> None:
        """Show a line of text."""
        if self._stream is not None:
            self._stream.write(text + "\n")
            self._stream.flush()

    def warn(self, text: str) -> None:
        """Show a warning."""
        if self._stream is None:
            _logger.warning(text)
        self.message(f"warning: {text}")

    def summary(self, values: Mapping[str, Any]) -> None:
        """Show the final values of a run, except those that are None.

        Nothing is shown of a failed run, whose only value is its exit code.
        """
        if values.keys() == {"exit_code"}:
            return
        shown = {name: _format(value) for name, value in values.items() if value is not None}
        width = max(map(len, shown), default=0)
        lines = [f"  {name:<{width}}  {text}" for name, text in shown.items()]
        self.message("\n".join(["summary", *lines]))


@contextmanager
def progress(total: int, *, seconds: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Show on stderr which of ``total`` items begins, and about how long the rest takes.

    Each item that is left is expected to take the mean time so far. Yields a function to call with
    the name of an item when it begins.

    Args:
        total: number of items.
        seconds: least time between two lines.
    """
    started = time.monotonic()
    next_line = started + seconds
    begun = 0

    def begin(name: str) -> None:
        nonlocal begun, next_line
        begun += 1
        now = time.monotonic()
        if now < next_line:
            return
        next_line = now + seconds
        if begun > 1:
            left = (now - started) / (begun - 1) * (total - begun + 1)
            name += f", about {timedelta(seconds=round(left))} left"
        sys.stderr.write(f"[{begun}/{total}] {name}\n")
        sys.stderr.flush()

    yield begin


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
