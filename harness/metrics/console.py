"""Console output of runs and verbs: a progress bar on a terminal, plain lines otherwise."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from math import inf
from typing import TYPE_CHECKING, Any, TextIO

from harness.metrics.columns import Metric

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.progress import Progress, ProgressColumn

_logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_LINES = 10.0
# Metrics that fit beside the bar in 80 columns; the lines above it show the others too.
_BESIDE_THE_BAR = ("loss", "mfu", "tokens_per_second", "memory_gib")
_REFRESH_PER_SECOND = 2


class PlainConsole:
    """Shows progress, metrics and messages of a run: one flushed line per row, for log files and pipes."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._stream = stream or sys.stdout
        self._metrics: Sequence[Metric] = ()

    def begin(self, step: int, metrics: Sequence[Metric]) -> None:
        """Set what rows show, in order, and the last finished step: the remaining time is estimated from
        later steps only."""
        self._metrics = metrics

    def log(self, row: Mapping[str, Any]) -> None:
        """Show one row of metrics; it has a ``step``."""
        self.message(self._line(row))

    def _line(self, row: Mapping[str, Any]) -> str:
        """``step    20/100  loss 5.1234  grad_norm 1.234 ...``."""
        width = max(5, len(str(self._total_steps)))
        return f"step {row['step']:>{width}}/{self._total_steps}  {self._text(row)}".rstrip()

    def _text(self, row: Mapping[str, Any]) -> str:
        shown = []
        for metric in self._metrics:
            stem, is_prefix = metric.name.removesuffix("*"), metric.name.endswith("*")
            keys = [key for key in row if key.startswith(stem)] if is_prefix else [metric.name]
            shown += [
                metric.format(key, row[key]) for key in keys if metric.line and row.get(key) is not None
            ]
        return "  ".join(filter(None, shown))

    def message(self, text: str) -> None:
        """Show a line of text."""
        self._stream.write(text + "\n")
        self._stream.flush()

    def warn(self, text: str) -> None:
        """Show a warning."""
        self.message(f"warning: {text}")

    def summary(self, title: str, values: Mapping[str, Any]) -> None:
        """Show the final values of a run, except those that are None; a failed one has but its code."""
        if values.keys() != {"exit_code"}:
            self.message("\n".join(_summary_lines(title, values)))

    def close(self) -> None:
        """Restore the terminal."""


class SilentConsole(PlainConsole):
    """Shows nothing. Warnings still go to the log of the process, because requested output was lost."""

    def log(self, row: Mapping[str, Any]) -> None: ...

    def message(self, text: str) -> None: ...

    def summary(self, title: str, values: Mapping[str, Any]) -> None: ...

    def warn(self, text: str) -> None:
        _logger.warning(text)


class RichConsole(PlainConsole):
    """A progress bar with the newest metrics at the bottom of the terminal, and lines above it."""

    def __init__(
        self, total_steps: int, terminal: Terminal | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        from rich.console import Console as Terminal
        from rich.progress import TimeRemainingColumn

        super().__init__(total_steps)
        self._clock = clock
        self._terminal = terminal or Terminal()
        self._next_line = clock()
        self._progress = _bar("step", total_steps, TimeRemainingColumn, self._terminal)
        [self._task] = self._progress.task_ids

    def begin(self, step: int, metrics: Sequence[Metric]) -> None:
        super().begin(step, metrics)
        # Reset, so that the speed is not estimated from steps of an earlier process.
        self._progress.reset(self._task, completed=step, total=self._total_steps, text="")

    def log(self, row: Mapping[str, Any]) -> None:
        if "loss" not in row:
            self.message(self._line(row))
            return
        beside = self._text({key: row.get(key) for key in _BESIDE_THE_BAR})
        self._progress.update(self._task, completed=row["step"], text=beside)
        if self._clock() >= self._next_line or row["step"] == self._total_steps:
            self._next_line = self._clock() + _SECONDS_BETWEEN_LINES
            self.message(self._line(row))

    def warn(self, text: str) -> None:
        self.message(f"warning: {text}", style="yellow")

    def close(self) -> None:
        self._progress.stop()

    def message(self, text: str, style: str | None = None) -> None:
        # Without markup: text in brackets is not a style.
        self._terminal.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def make_console(kind: str, total_steps: int) -> PlainConsole:
    """Make the console that ``metrics.console`` names: auto, rich, plain or none."""
    if kind == "auto":
        kind = "rich" if sys.stdout.isatty() else "plain"
    return {"rich": RichConsole, "none": SilentConsole, "plain": PlainConsole}[kind](total_steps)


@contextmanager
def progress(total: int, *, bar: bool = True, seconds: float = 0.0) -> Iterator[Callable[[str], None]]:
    """Show on stderr which of ``total`` items begins, and the time left by those that have ended.

    Yields a function to call with the name of an item when it begins.

    Args:
        total: number of items.
        bar: show a bar on a terminal; False if the items have bars of their own. Elsewhere lines are shown.
        seconds: between two lines, at least.
    """
    started, begun, shown = time.monotonic(), 0, None
    next_line = started + seconds
    if bar and sys.stderr.isatty():
        from rich.console import Console as Terminal
        from rich.progress import TimeElapsedColumn

        shown = _bar("done", total, TimeElapsedColumn, Terminal(stderr=True, soft_wrap=True))
        shown.live.transient = True

    def begin(name: str) -> None:
        nonlocal begun, next_line
        begun, now = begun + 1, time.monotonic()
        if begun > 1:
            left = (now - started) / (begun - 1) * (total - begun + 1)
            name += f", about {timedelta(seconds=round(left))} left"
        if shown is not None:
            shown.update(shown.task_ids[0], completed=begun - 1, text=name)
        elif now >= next_line:
            next_line = now + seconds
            sys.stderr.write(f"[{begun}/{total}] {name}\n")
            sys.stderr.flush()

    try:
        yield begin
    finally:
        if shown is not None:
            shown.stop()


def _bar(word: str, total: int, clock: type[ProgressColumn], terminal: Terminal) -> Progress:
    """Start a bar: the word, how many of ``total`` are done, the clock, and the field ``text``."""
    from rich import progress, table

    def fixed(width: int) -> table.Column:
        # On a narrow terminal the text is cut, not the step.
        return table.Column(no_wrap=True, min_width=width)

    text = table.Column(no_wrap=True, overflow="ellipsis")
    bar = progress.Progress(
        progress.TextColumn(word, table_column=fixed(4)),
        progress.MofNCompleteColumn(table_column=fixed(2 * len(str(total)) + 1)),
        progress.BarColumn(bar_width=20),
        clock(table_column=fixed(7)),
        progress.TextColumn("{task.fields[text]}", markup=False, table_column=text),
        console=terminal,
        refresh_per_second=_REFRESH_PER_SECOND,
        # The default of 30 s forgets the last step before a slow one ends.
        speed_estimate_period=inf,
        redirect_stdout=sys.stdout.isatty(),
    )
    bar.add_task(word, total=total, text="")
    bar.start()
    return bar


def _summary_lines(title: str, values: Mapping[str, Any]) -> list[str]:
    shown = {name: _format(value) for name, value in values.items() if value is not None}
    width = max(map(len, shown), default=0)
    return [title, *(f"  {name:<{width}}  {text}" for name, text in shown.items())]


def _format(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.4g}"
    return str(value)
