"""Reports of runs: predicted and measured results side by side."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from harness.config.job import Job, differing_numerics
from harness.launch.rows import MOST_FIELDS, by_part, fastest_first, in_short, job_of
from harness.launch.sweep.study import StudyRecord
from harness.metrics.window import THROUGHPUT
from harness.run.result import PREFIX, evaluated_columns
from harness.tools.plan.constants import Calibration
from harness.tools.report import plots
from harness.tools.report.predictions import MEMORY, RATE, errors_in_words, spearman
from harness.tools.report.rounds import tables_of_rounds
from harness.util.document import Block, Document, Figure
from harness.util.tables import Column, Table
from harness.util.words import NOT_MEASURED, formatted, plural

Row = dict[str, Any]
# Shown with THROUGHPUT.
SPREAD = "Spread: 90th minus 10th percentile of the steps' rates, divided by the rate."
_OF_LOSSES = """Runs that differ only in their seed are one band, from the lowest to the highest, with their \
mean. The lowest loss at the end is named first. Time is that of training, without validation and saving."""

_OF_RUNS = (
    Column("point", "run"),
    Column("layout", "layout"),
    Column("world_size", "ranks", ",d"),
    Column(f"measured.{RATE}", "tokens/s/rank", ",.1f"),
    Column("measured.spread", "spread", ".1%"),
    Column(f"predicted.{RATE}", "predicted", ",.1f"),
    Column(f"delta.{RATE}", "error", "+.1%"),
    Column("measured.mfu", "MFU", ".1%"),
    Column("predicted.mfu", "MFU, predicted", ".1%"),
    Column(f"measured.{MEMORY}", "memory, GiB", ".2f"),
    Column(f"predicted.{MEMORY}", "memory, predicted", ".2f"),
    Column(f"delta.{MEMORY}", "error of memory", "+.1%"),
    Column(f"torchtitan.{RATE}", "torchtitan, tokens/s/rank", ",.1f"),
    Column("loss", "loss", ".4f"),
    Column("state", "state"),
)
_FAILURES = (
    Column("point", "run"),
    Column("state", "state"),
    Column("kind", "class"),
    Column("reason", "reason"),
)


def report_runs(
    title: str,
    rows: Sequence[Row],
    folder: Path,
    calibration: Calibration | None = None,
    study: StudyRecord | None = None,
    smooth: int = 1,
) -> Document:
    """Report measured and predicted results of runs, and write the pictures into ``folder``.

    Args:
        rows: rows with predictions, made with the constants of ``calibration``.
        study: the objective, if a sweeper chose the points by their results.
        smooth: rows of metrics over which training losses are averaged.
    """
    rows = with_layouts(rows)
    measured = [row for row in rows if row["state"] == "completed"]
    blocks = [*table_of_study(study, rows), *tables_of_rounds(rows), *_tables(title, rows, folder)]
    if plots.losses(folder / "losses.png", f"{title}: losses", rows, smooth):
        blocks += ["## Losses", _OF_LOSSES, Figure("losses.png", "Losses")]
    blocks += tables_beside(rows)
    summary = [
        *_summary(rows, measured),
        *_best_of_study(study, rows),
        *constants_in_words(calibration),
    ]
    return Document(title, summary, blocks, rows)


def with_layouts(rows: Sequence[Row]) -> list[Row]:
    """Add ``layout`` to rows."""
    jobs = [job_of(row) for row in rows]
    layouts = ["" if job is None else layout_and_schedule(job) for job in jobs]
    return [{**row, "layout": layout} for row, layout in zip(rows, layouts, strict=True)]


def table_of_study(study: StudyRecord | None, rows: Sequence[Row]) -> list[Table]:
    """Return a table of the objective's values, the best first; none if the points have none."""
    if study is None or not study.ranked(rows):
        return []
    columns = (Column("point", "run"), Column(study.objective, study.objective, ".6g"))
    ranked = [rows[index] for index in study.ranked(rows)]
    text = f"Chosen by optuna to {study.describe()}."
    return [Table(columns, ranked, "Study", [text], ranked[0]["point"])]


def _best_of_study(study: StudyRecord | None, rows: Sequence[Row]) -> list[str]:
    if study is None:
        return []
    best = [rows[index] for index in study.ranked(rows)[:1]]
    found = [f"`{row['point']}`, {study.format(study.value(row))}" for row in best]
    return [f"The best ({study.describe()}): {value}." for value in found]


def plot_name(row: Mapping[str, Any], others: Sequence[Mapping[str, Any]]) -> str:
    """Return a row's layout if all layouts differ, its point if none does, else both."""
    layouts = {each["layout"] for each in others}
    if not row["layout"] or len(layouts) == 1 < len(others):
        return str(row["point"])
    return str(row["layout"] if len(layouts) == len(others) else f"{row['layout']}, {row['point']}")


def table_of_runs(rows: Sequence[Row], title: str = "Runs", notes: Sequence[str] = ()) -> Table:
    """Return the table of runs, the fastest first and marked."""
    ordered = fastest_first(row for row in rows if row["state"] != "skipped")
    if any(row.get("measured.spread") for row in ordered):
        notes = [*notes, f"{THROUGHPUT}. {SPREAD}"]
    best = best_of(rows)
    return Table(_OF_RUNS, ordered, title, notes, None if best is None else best["point"])


def best_of(rows: Sequence[Row]) -> Row | None:
    """Return the row with the highest throughput per rank; None if nothing was measured."""
    known = [row for row in rows if row.get(f"measured.{RATE}") is not None]
    return max(known, key=lambda row: row[f"measured.{RATE}"], default=None)


def _tables(title: str, rows: Sequence[Row], folder: Path) -> list[Block]:
    """Return a table and a picture for each group of equal numerics; one of each if all runs differ."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["state"] != "skipped":
            groups.setdefault(row.get("numerics_id", ""), []).append(row)
    differ = _differing_numerics([group[0] for group in groups.values()])
    notes = []
    if len(groups) > 1 and all(len(group) == 1 for group in groups.values()):
        notes = [
            f"The numerics of all runs differ ({in_short(differ)}): compare losses as well as speed."
        ]
        groups = {"": list(chain.from_iterable(groups.values()))}
    blocks: list[Block] = []
    best = best_of(rows)
    for number, (numerics, group) in enumerate(groups.items(), start=1):
        heading = "Runs"
        picture = "runs.png"
        if len(groups) > 1:
            notes = [f"Runs of equal numerics (`{numerics}`): {_values(group[0], differ)}."]
            heading = f"Runs, group {number}"
            picture = f"runs_{number}.png"
        table = replace(
            table_of_runs(group, heading, notes), marked=None if best is None else best["point"]
        )
        names = [plot_name(row, table.rows) for row in table.rows]
        drawn = plots.bars(folder / picture, f"{title}: throughput and memory", names, table.rows)
        blocks.append(table)
        if drawn:
            blocks.append(Figure(picture, heading))
    return blocks


def _differing_numerics(rows: Sequence[Row]) -> list[str]:
    """Return the fields in which the numerics of any row differ from those of the first one with a job."""
    jobs = [job for job in map(job_of, rows) if job is not None]
    fields: dict[str, None] = {}
    for job in jobs[1:]:
        fields |= dict.fromkeys(differing_numerics(jobs[0], job))
    return list(fields)


def _values(row: Row, differ: Sequence[str]) -> str:
    """Format a row's values of differing fields; a part with many is shown by its name or their number."""
    words = []
    for part, own in by_part(differ).items():
        if len(own) <= MOST_FIELDS:
            words += [f"{name}={formatted(row.get(f'job.{name}'))}" for name in own]
        else:
            name = row.get(f"job.{part}.name")
            words.append(f"{part} ({len(own)} fields)" if name is None else f"{part}={name}")
    return ", ".join(words)


def tables_beside(rows: Sequence[Row]) -> list[Table]:
    """Return tables of evaluations, slow ranks, runs that did not complete, and points that are no jobs."""
    names = evaluated_columns(rows)
    evaluated = [row for row in rows if not row.keys().isdisjoint(names)]
    columns = [
        _OF_RUNS[0],
        *(Column(name, name.removeprefix(f"{PREFIX}."), ".4f") for name in names),
    ]
    slow = [row for row in rows if row.get("slow")]
    unfinished = [row for row in rows if row["state"] not in ("completed", "skipped", NOT_MEASURED)]
    skipped = [row for row in rows if row["state"] == "skipped"]
    rules = (Column("point", "point"), Column("reason", "rule"))
    text = "Points of the space that are not valid jobs, and the rule that they violate."
    tables = (
        Table(columns, evaluated, "Evaluations"),
        Table((_OF_RUNS[0], Column("slow", "slow ranks")), slow, "Slow ranks"),
        Table(_FAILURES, unfinished, "Not completed"),
        Table(rules, skipped, "Not possible", [text]),
    )
    return [each for each in tables if each.rows]


def _summary(rows: Sequence[Row], measured: Sequence[Row]) -> list[str]:
    counts = Counter(row["state"] for row in rows)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    lines = [f"{plural(len(rows), 'point')}: {states}."]
    best = best_of(rows)
    if best is not None:
        spread = best.get("measured.spread")
        of_steps = f" (spread of its steps {spread:.1%})" if spread is not None else ""
        lines.append(
            f"The fastest: `{best['point']}`, {best[f'measured.{RATE}']:,.1f} tokens/s/rank{of_steps}."
        )
    named = (("throughput", RATE), ("memory", MEMORY))
    errors = [
        f"{what} {found}"
        for what, name in named
        if (found := errors_in_words(rows, f"delta.{name}"))
    ]
    if errors:
        lines.append(f"Predicted against measured: {'; '.join(errors)}.")
    rank = _rank_in_words(measured)
    if rank:
        lines.append(f"{rank}.")
    return lines


def constants_in_words(calibration: Calibration | None) -> list[str]:
    """Name the source of calibrated constants: a prediction of rows they were fitted to is no forecast."""
    source = None if calibration is None else calibration.source or "a calibration"
    return [] if source is None else [f"The plan's constants are those of {source}."]


def _rank_in_words(measured: Sequence[Row]) -> str:
    pairs = []
    for row in measured:
        predicted = row.get(f"predicted.{RATE}")
        rate = row.get(f"measured.{RATE}")
        if predicted is not None and rate is not None:
            pairs.append((predicted, rate))
    rank = spearman(pairs)
    return (
        ""
        if rank is None
        else f"Spearman rank correlation of throughput, {len(pairs)} runs: {rank:.2f}"
    )


def layout_and_schedule(job: Job) -> str:
    """Format degrees as published tables do, and the pipeline schedule: ``FSDP8 TP8 PP8 1F1B``."""
    layout = job.parallelism
    words = []
    if layout.dp_replicate > 1:
        shards = f"HSDP{layout.dp_replicate}x{layout.dp_shard}"
        words.append(shards if layout.dp_shard > 1 else f"DDP{layout.dp_replicate}")
    elif layout.dp_shard > 1:
        words.append(f"FSDP{layout.dp_shard}")
    for axis in ("cp", "tp", "ep", "pp"):
        degree = getattr(layout, axis)
        if degree > 1:
            words.append(f"{axis.upper()}{degree}")
    if not words:
        return "single"
    if layout.pp > 1:
        words.append(layout.pp_schedule)
    return " ".join(words)
