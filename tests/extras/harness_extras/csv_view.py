"""A view of the metrics: a table for spreadsheets."""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from harness.config.fields import label
from harness.config.metrics import ViewKind
from harness.metrics.views import ShownRun


@dataclass(frozen=True)
class CsvOptions:
    """Fields of ``metrics.views.csv``."""

    file: str = label("metrics.csv", nonempty=True)
    """File in the run folder."""
    columns: list[str] = label(factory=lambda: ["step", "loss", "grad_norm", "tokens_per_second"])
    """Names of metrics."""


class CsvView:
    """Appends a line for each row, after a header."""

    name = "csv"

    def __init__(self, run: ShownRun) -> None:
        path, self._columns = run.run_dir / run.options.file, run.options.columns
        self._file = open(path, "a", newline="")  # noqa: SIM115
        self._writer = csv.writer(self._file)
        if path.stat().st_size == 0:
            self._writer.writerow(self._columns)

    def log(self, row: Mapping[str, Any]) -> None:
        self._writer.writerow([row.get(name) for name in self._columns])
        self._file.flush()

    def close(self, summary: Mapping[str, Any]) -> None:
        self._file.close()


CSV = ViewKind("harness_extras.csv_view:CsvView", options=CsvOptions)
