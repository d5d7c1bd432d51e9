"""Compares the plan's throughput and memory with published rows that its constants were not fitted on.

    python experiments/published/errors.py [--rows] [--classes]

rows.csv has 95 rows of 14 tables with the overrides that express each, and what the tables leave open. The
constants of the plan are fitted on Table 1 of experiments/llama3_h100 and one row of its Table 5, so all of
these rows are outside of the fit. Prints a Markdown table; ``--rows`` adds each row, ``--classes`` the
table of harness/plan/evidence.py, which has torchtitan's tables too.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import statistics
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.compose import Composer, compose_points
from harness.config import with_value
from harness.plan.evidence import Evidence, class_of
from harness.plan.make import make_plan
from harness.plan.plan import Plan
from harness.report.published import find
from harness.report.published import read as read_published
from harness.tables import GIB

FILE = Path(__file__).with_name("rows.csv")
TORCHTITAN = Path(__file__).parents[1] / "llama3_h100"
MANY = 20
"""Rows from which a class has percentiles."""


@dataclass(frozen=True)
class Row:
    """A published row and the plan of its job."""

    raw: dict[str, str]
    plan: Plan

    @property
    def speed(self) -> float | None:
        """Error of the throughput, as a fraction; None if it was not published."""
        published = self.raw["published_tokens_per_second_per_gpu"]
        if not published or self.plan.speed is None:
            return None
        return self.plan.speed.tokens_per_second_per_rank / float(published) - 1

    @property
    def memory(self) -> float | None:
        """Error of the peak memory, as a fraction; None if it was not published."""
        published = self.raw["published_gib"]
        return self.plan.peak / GIB / float(published) - 1 if published else None


def read(path: Path) -> list[Row]:
    """Plan every row of the file."""
    with Composer() as composer, path.open(newline="") as file:
        return [
            Row(raw, make_plan(composer.job(shlex.split(raw["overrides"])))) for raw in csv.DictReader(file)
        ]


def summary(errors: list[float]) -> str:
    """Median and extremes of the errors, and the median of their amounts."""
    if not errors:
        return "| | | |"
    amount = statistics.median(map(abs, errors))
    return f"{statistics.median(errors):+.0%} | {min(errors):+.0%} to {max(errors):+.0%} | {amount:.1%} |"


def classes(rows: list[Row]) -> dict[str, Evidence]:
    """Published throughput over planned, by class of job."""
    found: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for row in rows:
        accelerator, error = row.plan.accelerator, row.speed
        name = None if accelerator is None else class_of(row.plan.job, accelerator.name)
        if name is not None and error is not None:
            found[name].append((1 / (1 + error), row.raw["table"]))
    return {name: _evidence(*zip(*own, strict=True)) for name, own in sorted(found.items())}


def _evidence(ratios: tuple[float, ...], tables: tuple[str, ...]) -> Evidence:
    low, high = min(ratios), max(ratios)
    if len(ratios) >= MANY:
        low, *_, high = statistics.quantiles(ratios, n=10, method="inclusive")
    return Evidence(len(ratios), len(set(tables)), round(low, 2), round(high, 2))


def torchtitan() -> list[Row]:
    """The rows of experiments/llama3_h100, planned."""
    rows = []
    published = read_published(TORCHTITAN)
    for table in sorted({each.table for each in published}):
        for point in compose_points([f"experiment=llama3_h100/{table}"]):
            assert point.job is not None, point.reason
            row = find(point.job, [each for each in published if each.table == table])
            assert row is not None, point.overrides
            job = with_value(point.job, "cluster.accelerator", row.accelerator)
            raw = {
                "table": f"torchtitan {row.table}",
                "published_tokens_per_second_per_gpu": str(row.tokens_per_second_per_rank),
                "published_gib": str(row.memory_gib),
            }
            rows.append(Row(raw, make_plan(job)))
    return rows


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--classes", action="store_true", help="print the table of harness/plan/evidence.py")
    arguments = parser.parse_args()
    rows = read(FILE)
    tables = defaultdict(list)
    for row in rows:
        tables[row.raw["table"], row.raw["hardware"]].append(row)
    print("| table | hardware | rows | median | range | median amount | too large |")
    print("|---|---|---|---|---|---|---|")
    for (table, hardware), own in [*tables.items(), (("all", ""), rows)]:
        errors = [row.speed for row in own if row.speed is not None]
        large = sum(row.plan.fits is False for row in own)
        print(f"| {table} | {hardware} | {len(own)} | {summary(errors)} {large} |")
    memory = [row.memory for row in rows if row.memory is not None]
    print(f"\nmemory, {len(memory)} rows: median amount {statistics.median(map(abs, memory)):.1%}")
    for row in rows if arguments.rows else ():
        raw, speed = row.raw, row.speed
        words = (raw["table"], raw["model"], raw["gpus"], raw["precision"], raw["layout"])
        print("  ", *words, "" if speed is None else f"{speed:+.0%}")
    if arguments.classes:
        for name, evidence in classes([*rows, *torchtitan()]).items():
            print(f'    "{name}": {evidence},')


if __name__ == "__main__":
    main()
