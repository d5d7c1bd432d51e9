"""Jobs that ran in several rounds, each with a seed of its own: their speed, its spread, and ratios.

A machine whose speed drifts slows all jobs of a round, so the ratio of two jobs within a round says
more than their medians.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.config.fields import with_value
from harness.launch.rows import Row, job_of
from harness.tools.report.predictions import RATE
from harness.util.tables import Table, columns_of

_COLUMNS = columns_of(f"""
    point               run
    rounds              rounds                      d
    {RATE}              tokens/s/rank, median       ,.1f
    range               range
    step_seconds        step, seconds               .4g
    first_step_seconds  to the first step, seconds  .1f
    memory_gib          memory, GiB                 .2f
    mfu                 MFU                         .1%
    mfu_causal          MFU, causal half            .1%
    ratio               tokens/s over the first's   .3f
    ratio_range         range of the ratio
""")
_MEDIANS = {
    RATE: f"measured.{RATE}",
    "step_seconds": "measured.step_seconds",
    "first_step_seconds": "first_step_seconds",
    "memory_gib": "measured.memory_gib",
    "mfu": "measured.mfu",
    "mfu_causal": "mfu_causal",
}
_NOTE = """Medians and ranges of runs that differ only in their seed. A ratio is of the tokens per second of \
two runs with the same seed. Look at the ranges first: on a machine with other work to do they are wide."""
_SEED = re.compile("(^| )seed=[^ ]+")


def same_but_seed(rows: Sequence[Row]) -> list[dict[int, Row]]:
    """Group rows by their job apart from its seed; each group has its rows by seed."""
    groups: dict[str, dict[int, Row]] = {}
    for row in rows:
        job = job_of(row)
        if job is not None:
            key = with_value(job, "training.seed", 0).id
            groups.setdefault(key, {})[job.training.seed] = row
    return list(groups.values())


def without_seed(name: str) -> str:
    """Return the name of a point without its seed."""
    return _SEED.sub("", name).strip()


@dataclass(frozen=True)
class Spread:
    """Median and range of one quantity over the rounds."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread | None:
        """Summarize the values that are not None; None if there are none."""
        known = [value for value in values if value is not None]
        return cls(statistics.median(known), min(known), max(known)) if known else None

    def as_text(self, form: str) -> tuple[str, str]:
        """Format the median, and the range."""
        return format(self.median, form), f"{self.low:{form}} to {self.high:{form}}"


def ratios_by_round(ours: Mapping[int, float], theirs: Mapping[int, float]) -> list[float]:
    """Return the ratio of one quantity, for every round that has both."""
    return [ours[number] / theirs[number] for number in ours if number in theirs]


def tables_of_rounds(rows: Sequence[Row]) -> list[Table]:
    """Return a table of jobs with their spread over rounds; none if every job ran once."""
    jobs = same_but_seed([row for row in rows if row.get(f"measured.{RATE}") is not None])
    if all(len(rounds) == 1 for rounds in jobs):
        return []
    lines = [_line(rounds, jobs[0]) for rounds in jobs]
    return [Table(_COLUMNS, lines, "Rounds", [_NOTE])]


def _line(rounds: Mapping[int, Row], first: Mapping[int, Row]) -> Row:
    example = next(iter(rounds.values()))
    line: Row = {"point": without_seed(example["point"]) or example["name"], "rounds": len(rounds)}
    for name, field in _MEDIANS.items():
        spread = Spread.of([row.get(field) for row in rounds.values()])
        line[name] = None if spread is None else spread.median
        if name == RATE and spread is not None:
            line["range"] = spread.as_text(",.1f")[1]
    ours, theirs = (
        {seed: row["window.tokens_per_second"] for seed, row in each.items()}
        for each in (rounds, first)
    )
    spread = Spread.of(ratios_by_round(ours, theirs))
    if spread is not None and rounds is not first:
        line["ratio"] = spread.median
        line["ratio_range"] = spread.as_text(".3f")[1]
    return line
