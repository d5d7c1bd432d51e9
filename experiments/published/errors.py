"""Compares the plan's throughput and memory with published rows that its constants were not fitted on.

    python experiments/published/errors.py [--rows] [--as-here]

rows.csv has 95 rows of 14 tables with the overrides that express each, and what the tables leave open. Its
columns ``attention`` to ``keeps_outputs`` say what the trainer ran (``Software`` in
harness/tools/plan/constants.py), ``doubt`` why a row is evidence neither for nor against the plan. Prints
Markdown tables of the plan's errors with its default constants: throughput, and memory (memory_errors.py).
``--rows`` adds each row. held_out.py has the errors with constants that were fitted without a row's source.
"""

from __future__ import annotations

import argparse
import csv
import shlex
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from memory_errors import memory_tables

from harness.compose.composer import Composer, compose_points
from harness.config.fields import with_value
from harness.model.accounting import account
from harness.tools.plan.constants import Calibration, Constants, Software
from harness.tools.plan.make import make_plan
from harness.tools.plan.plan import Plan
from harness.tools.report.published import find, software_of
from harness.tools.report.published import read as read_published
from harness.util.tables import GIB

FILE = Path(__file__).with_name("rows.csv")
TORCHTITAN = Path(__file__).parents[1] / "llama3_h100"


DEFAULTS = Calibration(Constants())


@dataclass(frozen=True)
class Row:
    """A published row and the plan of its job."""

    raw: dict[str, str]
    plan: Plan
    calibration: Calibration = DEFAULTS
    """Of the plan."""

    @property
    def published(self) -> float | None:
        """Published tokens per second and GPU; None if there is no throughput.

        Some tables have FLOP/s or MFU instead, which count attention over the full square in every layer
        (torchtitan/models/utils.py, get_moe_model_nparams_and_flops).
        """
        if tokens := self.raw["published_tokens_per_second_per_gpu"]:
            return float(tokens)
        job, device = self.plan.job, self.plan.accelerator
        whole = replace(job.model, attention=replace(job.model.attention, window=None))
        each = account(whole, job.training.seq_len).flops_per_token_full
        if tflops := self.raw["published_tflops"]:
            return float(tflops) * 1e12 / each
        if (mfu := self.raw["published_mfu"]) and device is not None:
            return float(mfu) / 100 * device.peak_flops["bfloat16"] / each
        return None

    @property
    def speed(self) -> float | None:
        """Error of the throughput, as a fraction; None if it was not published."""
        published, speed = self.published, self.plan.speed
        return (
            None if published is None or speed is None else speed.tokens_per_second_per_rank / published - 1
        )

    @property
    def memory(self) -> float | None:
        """Error of the peak memory, as a fraction; None if it was not published."""
        published = self.raw["published_gib"]
        planned = self.plan.peak if self.memory_is == "reserved" else self.plan.allocated
        return planned / GIB / float(published) - 1 if published else None

    @property
    def memory_is(self) -> str:
        """What was published: memory that the allocator ``reserved``, or ``allocated``."""
        return self.raw.get("memory_is") or "reserved"

    @property
    def memory_inexpressible(self) -> str:
        """Why our options cannot express the job's memory; empty if they can."""
        return self.raw["memory_inexpressible"]


def read(path: Path, *, as_here: bool = False) -> list[Row]:
    """Plan every row of the file, with the software of its trainer unless ``as_here``."""
    with path.open(newline="") as file:
        return plan_all(csv.DictReader(file), as_here=as_here)


def plan_all(raws: Iterable[dict[str, str]], *, as_here: bool = False) -> list[Row]:
    """Plan published rows."""
    rows = []
    composer = Composer()
    for raw in raws:
        calibration = calibration_of(Software() if as_here else software_of(raw))
        plan = make_plan(composer.job(shlex.split(raw["overrides"])), calibration)
        rows.append(Row(raw, plan, calibration))
    return rows


def amounts_of(words: str, rows: list[Row]) -> str:
    """Median, 90th percentile and extremes of the throughput's errors."""
    errors = [row.speed for row in rows if row.speed is not None]
    amounts = [abs(error) for error in errors]
    high = statistics.quantiles(amounts, n=10)[-1]
    return (
        f"{len(errors)} rows {words}: median amount {statistics.median(amounts):.1%}, 90th percentile "
        f"{high:.1%}, {min(errors):+.0%} to {max(errors):+.0%}"
    )


def summary(errors: list[float]) -> str:
    """Median and extremes of the errors, and the median of their amounts."""
    if not errors:
        return "| | | |"
    amount = statistics.median(map(abs, errors))
    return f"{statistics.median(errors):+.0%} | {min(errors):+.0%} to {max(errors):+.0%} | {amount:.1%} |"


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
                "model": row.recipe.model,
                "gpus": str(row.recipe.ranks),
                "precision": row.recipe.linear.replace("none", "bf16"),
                "layout": row.layout,
                "published_tokens_per_second_per_gpu": str(row.tokens_per_second_per_rank),
                "published_gib": str(row.memory_gib),
                "source": row.source.partition(" Table")[0],
                "memory_is": "",
                "memory_inexpressible": row.memory_inexpressible,
            }
            calibration = calibration_of(row.software)
            rows.append(Row(raw, make_plan(job, calibration), calibration))
    return rows


def calibration_of(software: Software) -> Calibration:
    """The default constants, with a row's software."""
    return Calibration(Constants(), software=software)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument(
        "--as-here", action="store_true", help="also plan the rows without the software of their trainers"
    )
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
    print()
    sure = [row for row in rows if not row.raw["doubt"]]
    of_torchtitan = torchtitan()
    for words, own in [
        ("of torchtitan's tables", of_torchtitan),
        ("without doubts", [*sure, *of_torchtitan]),
    ]:
        print(amounts_of(words, own))
    if arguments.as_here:
        print(amounts_of("as if all ran this harness on torch 2.13", read(FILE, as_here=True)))
    print(f"\n{memory_tables([*rows, *of_torchtitan])}")
    for row in rows if arguments.rows else ():
        raw, speed = row.raw, row.speed
        named = (raw["table"], raw["model"], raw["gpus"], raw["precision"], raw["layout"])
        memory = "" if row.memory is None else f"memory {row.memory:+.0%}"
        print("  ", *named, "" if speed is None else f"{speed:+.0%}", memory)


if __name__ == "__main__":
    main()
