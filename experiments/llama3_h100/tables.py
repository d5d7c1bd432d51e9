"""Lays torchtitan's published rows, the plan's predictions and what was measured side by side.

    harness train -m experiment=llama3_h100/table1 cluster=slurm_h100    measure the rows of a table
    python experiments/llama3_h100/tables.py                             write the tables
    python experiments/llama3_h100/tables.py --rehearse                  rehearse their memory before

A run is a measurement of a row when model, layout, precision, checkpointing, compilation and batch are the
row's, whatever its length, seed and data. Rows of runs that are over stay in results.jsonl, which is read
too. A rehearsal needs an environment with a build of torch for CUDA (make rehearsal), and no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from typing import Any

import torchtitan_rows
from bars import bars
from torchtitan_rows import ASKED, FOLDER, Published, Recipe

from harness.compose.composer import Composed, compose_job
from harness.config.cluster import ClusterConfig
from harness.config.fields import LABEL, leaves
from harness.config.job import Job
from harness.launch.rows import Row, as_planned, job_of, keep, load, read_kept
from harness.launch.sweep.folder import SweepFolder
from harness.metrics.window import THROUGHPUT
from harness.run.folder import run_folders
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.verb import plan
from harness.tools.report.predictions import (
    MEMORY,
    METRICS,
    RATE,
    calibration_of,
    delta,
    errors_in_words,
    errors_of,
    machine_of,
    predicted,
)
from harness.tools.report.runs import SPREAD, constants_in_words
from harness.util.document import Block, Document, Figure
from harness.util.encoding import read_object
from harness.util.errors import UserError
from harness.util.files import write_atomically
from harness.util.tables import Column, Table
from harness.util.words import GIB, plural

FILES = ("tables.md", "table.csv", "index.html")
REHEARSED = FOLDER / "rehearsed.json"
"""Rehearsals by the job's id: ``memory_gib`` (reserved by torch's allocator), the ``rank`` with the most, and
``torch``."""

# Fields that determine speed and memory. Runs that differ only in others (seed, steps, data, checkpoints) are
# measurements of one point.
_PARTS = ("model", "parallelism", "precision", "activation_checkpoint", "compile")
_FIELDS = (
    "training.seq_len",
    "training.global_batch_size",
    "training.local_batch_size",
    "training.loss_chunks",
    "training.attention",
    "training.matmul_precision",
    "optimizer.implementation",
    "optimizer.state_dtype",
)
_OF_PUBLISHED = (
    Column("point", "run"),
    Column(f"published.{RATE}", "tokens/s/GPU, published", ",.0f"),
    Column(f"predicted.{RATE}", "predicted", ",.0f"),
    Column(f"delta.{RATE}", "error", "+.1%"),
    Column(f"measured.{RATE}", "measured", ",.0f"),
    Column("measured.spread", "spread", ".1%"),
    Column(f"delta.measured.{RATE}", "measured to published", "+.1%"),
    Column(f"expected.{RATE}", "predicted for this machine", ",.0f"),
    Column(f"delta.expected.{RATE}", "error for this machine", "+.1%"),
    Column(f"published.{MEMORY}", "memory GiB, published", ".1f"),
    Column(f"predicted.{MEMORY}", "memory, predicted", ".1f"),
    Column(f"delta.{MEMORY}", "error of memory", "+.1%"),
    Column(f"rehearsed.{MEMORY}", "memory, rehearsed", ".1f"),
    Column(f"delta.rehearsed.{MEMORY}", "memory, rehearsed to published", "+.1%"),
    Column(f"measured.{MEMORY}", "memory, measured", ".1f"),
    Column(f"delta.measured.{MEMORY}", "memory, measured to published", "+.1%"),
    Column(f"expected.{MEMORY}", "memory, predicted for this machine", ".1f"),
    Column("predicted.mfu", "MFU, predicted", ".1%"),
    Column("measured.mfu", "MFU, measured", ".1%"),
    Column("measured_on", "measured on"),
)
_ERRORS = (
    Column("point", "table"),
    Column("rows", "rows", "d"),
    Column("rate_median", "throughput, median error", ".1%"),
    Column("rate_worst", "worst", ".1%"),
    Column("memory_median", "memory, median error", ".1%"),
    Column("memory_worst", "worst of memory", ".1%"),
    Column("order", "effects with the right sign"),
)
_EFFECTS = (
    Column("point", "table"),
    Column("what", "change"),
    Column("published", "gain in throughput, published", "+.1%"),
    Column("predicted", "predicted", "+.1%"),
    Column("right", "right sign"),
)
_CSV = (
    Column("table", "table"),
    Column("published.layout", "published.layout"),
    *_OF_PUBLISHED,
    Column("predicted.step_seconds", "predicted.step_seconds"),
    Column("predicted.fits", "predicted.fits"),
    Column("measured.step_seconds", "measured.step_seconds"),
    Column("world_size", "world_size"),
    Column("published.accelerator", "published.accelerator"),
    Column("published.source", "published.source"),
    Column("id", "id"),
    Column("code.commit", "code.commit"),
    Column("command", "command"),
)


@dataclass(frozen=True)
class PublishedTable:
    """One published table.

    Attributes:
        name: stem of its experiment's file: ``table1``.
        rows: rows with ``published.*``, ``predicted.*``, ``rehearsed.*``, ``measured.*`` and ``expected.*``;
            several for a published one that several machines have measured.
        recipes: recipe of each row.
    """

    name: str
    rows: list[Row]
    recipes: list[Recipe]

    @property
    def once(self) -> list[tuple[Recipe, Row]]:
        """Each recipe with its last row, even if several machines have measured it."""
        return list(dict(zip(self.recipes, self.rows, strict=True)).items())

    @property
    def words(self) -> str:
        """``Table 1`` for ``table1``."""
        return f"Table {self.name.removeprefix('table')}"

    @property
    def subject(self) -> str:
        """The first comment of its experiment."""
        title = (FOLDER / f"{self.name}.yaml").read_text().splitlines()[1].removeprefix("# ")
        return title.removeprefix(f"{self.words}: ").removesuffix(".")


@dataclass(frozen=True)
class Effect:
    """Effect of one change on throughput, as a fraction.

    Attributes:
        what: ``compile``, ``float8``, ``async TP`` or ``schedule``; of a schedule with the change.
        predicted: None without a prediction.
    """

    table: PublishedTable
    what: str
    published: float
    predicted: float | None

    @property
    def is_right(self) -> bool | None:
        """Whether the prediction has the same sign; None without a prediction."""
        if self.predicted is None:
            return None
        return (self.predicted > 0) == (self.published > 0)


def all_tables(runs: Path, calibration: Calibration | None) -> list[PublishedTable]:
    """Return the tables with the measurements made so far; ``calibration`` predicts for their machine."""
    kept = read_kept(FOLDER)
    rehearsed = read_object(REHEARSED) if REHEARSED.is_file() else {}
    tables = []
    for name, pairs in torchtitan_rows.tables().items():
        folder = runs / f"llama3_h100-{name}"
        measured = [*kept]
        if run_folders(folder) or SweepFolder(folder).exists:
            measured = [*load(folder), *kept]
        words = torchtitan_rows.names([published for _, published in pairs])
        table = PublishedTable(name, [], [])
        for (point, published), word in zip(pairs, words, strict=True):
            planned = {**as_planned(word, point.job, point.overrides), "state": "not measured"}
            for row in _measurements(point.job, measured) or [planned]:
                row = {**row, "point": word, "table": name, "measured_on": _measured_on(row)}
                memory = rehearsed.get(point.job.id, {}).get("memory_gib")
                table.rows.append(_joined(row, point.job, published, memory, calibration))
                table.recipes.append(published.recipe)
        tables.append(table)
    return tables


def _measurements(job: Job, rows: Sequence[Row]) -> list[Row]:
    """Return a job's measurements: one completed row per device, or else one failed row."""
    wanted = workload(job)
    found: dict[str, Row] = {}
    for row in rows:
        measured = job_of(row)
        if (
            measured is None
            or workload(measured) != wanted
            or row["state"] in ("planned", "pending")
        ):
            continue
        device = row.get("device") or ""
        if device not in found or (
            found[device]["state"] != "completed" and row["state"] == "completed"
        ):
            found[device] = row
    completed = [row for row in found.values() if row["state"] == "completed"]
    return completed or list(found.values())[:1]


def workload(job: Job) -> tuple[tuple[str, str], ...]:
    """Return the fields that determine a job's speed and memory, apart from the machine."""
    return tuple(
        (name, str(value))
        for name, role, value in leaves(job)
        if role != LABEL and (name.partition(".")[0] in _PARTS or name in _FIELDS)
    )


def _measured_on(row: Row) -> str:
    if row["state"] == "completed":
        return str(row.get("device") or "")
    if row["state"] == "failed":
        return f"failed: {row.get('kind')}: {row.get('reason')}"
    return str(row["state"])


def _joined(
    row: Row,
    job: Job,
    published: Published,
    rehearsed: float | None,
    calibration: Calibration | None,
) -> Row:
    """Add published, predicted, rehearsed and expected values, and their deltas, to a row."""
    of_table = ClusterConfig(accelerator=published.accelerator)
    values: dict[str, Row] = {
        "predicted": predicted(
            job, of_table, Calibration(Constants(), software=published.software)
        ),
        "published": {
            RATE: published.tokens_per_second_per_rank,
            MEMORY: published.memory_gib,
            "layout": published.layout,
            "accelerator": published.accelerator,
            "source": published.source,
        },
        "rehearsed": {MEMORY: rehearsed},
        "measured": {name: row.get(f"measured.{name}") for name in METRICS},
        "expected": {},
    }
    if row["state"] == "completed":
        values["expected"] = predicted(job, machine_of(row), calibration)
    for kind in ("predicted", "published", "rehearsed", "expected"):
        row |= {f"{kind}.{name}": value for name, value in values[kind].items()}
    for name in METRICS:
        known = values["published"].get(name)
        measured = values["measured"][name]
        row[f"delta.{name}"] = delta(values["predicted"][name], known)
        row[f"delta.measured.{name}"] = delta(measured, known)
        row[f"delta.expected.{name}"] = delta(values["expected"].get(name), measured)
        row[f"delta.rehearsed.{name}"] = delta(values["rehearsed"].get(name), known)
    return row


def effects(table: PublishedTable) -> list[Effect]:
    """Return the effect for every pair of rows that differ in one field only, if it is in ``ASKED``."""
    found = []
    for (before, first), (after, second) in combinations(table.once, 2):
        changed = [
            name
            for name in Recipe.__dataclass_fields__
            if getattr(before, name) != getattr(after, name)
        ]
        if len(changed) != 1 or changed[0] not in ASKED:
            continue
        what = ASKED[changed[0]]
        if changed[0] == "schedule":
            what += f": {before.schedule} to {after.schedule}"
        published = delta(second[f"published.{RATE}"], first[f"published.{RATE}"])
        assert published is not None, "published rows have a throughput"
        forecast = delta(second[f"predicted.{RATE}"], first[f"predicted.{RATE}"])
        found.append(Effect(table, what, published, forecast))
    return found


def report(
    tables: Sequence[PublishedTable], folder: Path, calibration: Calibration | None
) -> Document:
    """Report on the tables, and write the pictures into ``folder``."""
    found = [effect for table in tables for effect in effects(table)]
    blocks: list[Block] = [_errors(tables, found)]
    lines = []
    for effect in found:
        line = {"point": effect.table.words, "what": effect.what, "right": effect.is_right}
        lines.append({**line, "published": effect.published, "predicted": effect.predicted})
    blocks.append(
        Table(_EFFECTS, lines, "Effects", ["Rows of a table that differ in one thing only."])
    )
    for table in tables:
        source = table.rows[0]["published.source"]
        command = f"harness train -m experiment=llama3_h100/{table.name} cluster=slurm_h100"
        notes = [f"{table.subject}.", f"Published: {source}. Run it: `{command}`"]
        if any(row["state"] == "completed" for row in table.rows):
            notes.append(f"Measured {THROUGHPUT}, divided by the number of GPUs. {SPREAD}")
        blocks.append(Table(_OF_PUBLISHED, table.rows, table.words, notes))
        picture = f"{table.name}.png"
        points = [row["point"] for row in table.rows]
        if bars(folder / picture, f"{table.words}: {table.subject}", points, table.rows):
            blocks.append(Figure(picture, table.words))
    rows = [row for table in tables for row in table.rows]
    summary = [*_summary(tables, rows, found), *constants_in_words(calibration)]
    return Document("llama3_h100", summary, blocks, rows, _CSV)


def _errors(tables: Sequence[PublishedTable], found: Sequence[Effect]) -> Table:
    groups = [(table.words, [table]) for table in tables]
    groups.append(("all", list(tables)))
    lines = []
    for name, group in groups:
        rows = [row for table in group for _, row in table.once]
        line: Row = {"point": name, "rows": len(rows)}
        for what, key in (("rate", RATE), ("memory", MEMORY)):
            if known := errors_of(rows, f"delta.{key}"):
                line |= {f"{what}_median": statistics.median(known), f"{what}_worst": max(known)}
        names = {table.name for table in group}
        judged = [
            each.is_right
            for each in found
            if each.table.name in names and each.is_right is not None
        ]
        line["order"] = f"{sum(judged)} of {len(judged)}" if judged else None
        lines.append(line)
    text = "Predicted against published, for the machine of the tables. Errors here have no sign."
    return Table(_ERRORS, lines, "Errors", [text], "all")


def _summary(
    tables: Sequence[PublishedTable], rows: Sequence[Row], found: Sequence[Effect]
) -> list[str]:
    once = [row for table in tables for _, row in table.once]
    measured = [row for row in rows if row["state"] == "completed"]
    count = len({(row["table"], row["point"]) for row in measured})
    judged = [effect for effect in found if effect.is_right is not None]
    wrong = [
        f"{each.table.words} {each.what.partition(':')[0]}" for each in judged if not each.is_right
    ]
    of_effects = f"{len(judged) - len(wrong)} of {len(judged)}" if judged else ""
    if wrong:
        of_effects += f"; wrong: {', '.join(wrong)}"
    compared = (
        ("Predicted throughput against published", errors_in_words(once, f"delta.{RATE}")),
        ("Predicted memory against published", errors_in_words(once, f"delta.{MEMORY}")),
        ("Rehearsed memory against published", errors_in_words(once, f"delta.rehearsed.{MEMORY}")),
        ("Effects of one change with the right sign", of_effects),
        (
            "Predicted throughput against measured",
            errors_in_words(measured, f"delta.expected.{RATE}"),
        ),
        (
            "Predicted memory against measured",
            errors_in_words(measured, f"delta.expected.{MEMORY}"),
        ),
    )
    lines = [f"{plural(len(once), 'published row')}, {count} of them measured."]
    lines += [f"{what}: {words}." for what, words in compared if words]
    return lines


def rehearse_missing() -> None:
    """Rehearse the jobs that ``rehearsed.json`` does not have, and add each when it is done."""
    found = read_object(REHEARSED) if REHEARSED.is_file() else {}
    for pairs in torchtitan_rows.tables().values():
        for point, published in pairs:
            if point.job.id in found:
                continue
            found[point.job.id] = _rehearse(point, published.accelerator)
            write_atomically(REHEARSED, f"{json.dumps(found, indent=1, sort_keys=True)}\n".encode())
            print(
                f"rehearsed {' '.join(point.overrides)}: {found[point.job.id]['memory_gib']:.1f} GiB"
            )


def _rehearse(point: Composed, accelerator: str) -> dict[str, Any]:
    hardware = [
        "cluster=slurm_h100",
        f"cluster.accelerator={accelerator}",
        "checkpoint.enable=false",
    ]
    typed = [*point.overrides, *hardware, "rehearse=true"]
    ranks = plan(compose_job(typed, config_name="plan", schema=PlanJob), typed).data["rehearsed"]
    for rank in ranks:
        if rank["failure"] is not None:
            what = f"{rank['failure']['kind']}: {rank['failure']['message']}"
            raise UserError(
                f"{' '.join(typed)}: rank {rank['rank']} could not be rehearsed: {what}"
            )
    most = max(ranks, key=lambda rank: rank["memory"]["reserved"])
    memory_gib = round(most["memory"]["reserved"] / GIB, 2)
    return {"memory_gib": memory_gib, "rank": most["rank"], "torch": version("torch")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Published, predicted and measured results side by side."
    )
    parser.add_argument("--out", type=Path, default=FOLDER, help="output folder; default: this one")
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder of the runs; default: runs/"
    )
    parser.add_argument(
        "--calibration", type=Path, help="calibration file of the machine that measured"
    )
    parser.add_argument(
        "--rehearse", action="store_true", help="rehearse jobs that were not, without a GPU"
    )
    given = parser.parse_args()
    if given.rehearse:
        rehearse_missing()
    calibration = calibration_of(FOLDER, given.calibration)
    tables = all_tables(given.runs, calibration)
    ended = [
        row for table in tables for row in table.rows if row["state"] in ("completed", "failed")
    ]
    if ended:
        given.out.mkdir(parents=True, exist_ok=True)
        keep(given.out, ended)
    document = report(tables, given.out, calibration)
    files = document.write(given.out, *FILES)
    for line in [*document.summary, *files]:
        print(line)


if __name__ == "__main__":
    main()
