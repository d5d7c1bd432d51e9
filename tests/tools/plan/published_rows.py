"""The rows of torchtitan's tables of December 2024, each with its job of experiments/llama3_h100."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from harness.compose.composer import compose_points
from harness.config.job import Job
from harness.tools.report.published import Published, find, read

FOLDER = Path(__file__).resolve().parents[3] / "experiments" / "llama3_h100"


@dataclass(frozen=True)
class Row:
    """One published row, and the job on the machine it was measured on."""

    published: Published
    job: Job

    @property
    def name(self) -> str:
        """Its table, and the fields in which rows of a table differ."""
        of = self.published.recipe
        words = [self.published.table, self.published.layout, str(of.seq_len), of.linear, of.schedule]
        return " ".join([*words, "compile" * of.compiled, "async" * of.async_tp])


@cache
def all_rows() -> list[Row]:
    """All published rows."""
    found = []
    published = read(FOLDER)
    for table in sorted({row.table for row in published}):
        own = [row for row in published if row.table == table]
        for point in compose_points([f"experiment=llama3_h100/{table}"]):
            assert point.job is not None, point.reason
            row = find(point.job, own)
            assert row is not None, point.overrides
            cluster = dataclasses.replace(point.job.cluster, accelerator=row.accelerator)
            found.append(Row(row, dataclasses.replace(point.job, cluster=cluster)))
    return found
