"""Write metrics on rank 0: first to the file, then to the console and the other views."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.config.metrics import VIEWS
from harness.config.registry import load_attribute
from harness.metrics.columns import Metric
from harness.metrics.console import PlainConsole
from harness.metrics.jsonl import MetricsFile
from harness.metrics.views import ShownRun, View
from harness.util.errors import missing_package

METRICS_FILE = "metrics.jsonl"


class Recorder:
    """Writes the metrics of a run.

    ``metrics.jsonl`` is the primary record and is written first. A view that fails is switched off
    with one warning. Messages can be shown from the start, rows only after ``begin``.
    """

    def __init__(self, run: ShownRun, total_steps: int) -> None:
        self._run = run
        is_silent = run.config.console == "none"
        self._console = PlainConsole(total_steps, None if is_silent else sys.stdout)
        self._file: MetricsFile | None = None
        self._views: list[View] = []
        self._closed = False

    def begin(self, start_step: int, metrics: Sequence[Metric] = ()) -> None:
        """Open the file and the views.

        Args:
            start_step: the last step already done, 0 for a new run. Rows of later steps, which an
                earlier attempt wrote after its last checkpoint, are dropped: they will be written
                again.
            metrics: columns of rows, in the order of a line on the console.
        """
        self._run = replace(self._run, start_step=start_step)
        self._file = MetricsFile(self._run.run_dir / METRICS_FILE)
        self._file.truncate_after(start_step)
        self._show_notes()
        self._tell(lambda console: console.begin(metrics))
        for name, options in self._run.config.shown.items():
            try:
                kind = VIEWS[name]
                typed = None if kind.options is None else kind.options(**options)
                self._views.append(load_attribute(kind.view)(replace(self._run, options=typed)))
            except Exception as error:  # see _switched_off
                self._switched_off(name, error)

    def go_back(self, step: int) -> None:
        """Drop the rows of later steps, which the run does again. Views keep those that they have shown."""
        assert self._file is not None, "rows before begin"
        self._file.truncate_after(step)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the row of a step or a validation, with its ``step``. Views leave out None."""
        assert self._file is not None, "rows before begin"
        self._file.write(dict(row))
        self._show_notes()
        self._tell(lambda console: console.log(row))
        self._show(lambda view: view.log(row))

    def message(self, text: str) -> None:
        """Show a line on the console."""
        self._tell(lambda console: console.message(text))

    def close(self, summary: Mapping[str, Any]) -> None:
        """Show the final values, close every view and the file. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._file is not None:
            try:
                self._file.close()
            except OSError as error:
                self.message(f"WARNING {self._file.path} cannot be read any more: {error.strerror}")
            self._show_notes()
        self._show(lambda view: view.close(summary))
        self._tell(lambda console: console.summary(summary))

    def _show_notes(self) -> None:
        while self._file is not None and self._file.notes:
            self.message(self._file.notes.pop(0))

    def _tell(self, tell: Callable[[PlainConsole], None]) -> None:
        """The console is a view too: standard output may be a pipe that nobody reads any more."""
        try:
            tell(self._console)
        except Exception as error:  # see _switched_off
            self._console = PlainConsole(0, None)
            self._switched_off("console", error)

    def _show(self, show: Callable[[View], None]) -> None:
        for view in list(self._views):
            try:
                show(view)
            except Exception as error:  # see _switched_off
                self._views.remove(view)
                self._switched_off(view.name, error)

    def _switched_off(self, name: str, error: Exception) -> None:
        """Warn that a view is switched off.

        Only here every exception is caught: clients of remote services may raise anything,
        metrics.jsonl has all data, and a broken plot must not end a run.
        """
        missing = missing_package(error)
        reason = " ".join((str(missing) if missing else f"{type(error).__name__}: {error}").split())
        self._tell(
            lambda console: console.warn(f"{name} is off, metrics.jsonl continues: {reason}")
        )
