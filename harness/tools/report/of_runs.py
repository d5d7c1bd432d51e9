"""Report of runs: measured and predicted results, the effect of each knob, and runs that did not complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.fields import NUMERICS, leaves
from harness.launch.naming import MOST_FIELDS, by_part, in_short
from harness.launch.rows import fastest_first, job_of
from harness.launch.sweep.study import StudyRecord
from harness.metrics.window import THROUGHPUT
from harness.run.evaluations import PREFIX, evaluated_columns
from harness.tools.plan.constants import Calibration
from harness.tools.report.ablation import Knob, ablation, best_of
from harness.tools.report.provenance import section_of
from harness.tools.report.statistics import Errors, errors_of, spearman
from harness.tools.report.words import layout_and_schedule
from harness.util import plots
from harness.util.document import Column, Report, Section, Table
from harness.util.tables import NOT_MEASURED, formatted

Row = dict[str, Any]
RATE = "tokens_per_second_per_rank"

_COLUMNS = (
    Column("point", "run"),
    Column("layout", "layout"),
    Column("world_size", "ranks", ",d"),
    Column(f"measured.{RATE}", "tokens/s/rank", ",.1f"),
    Column("measured.spread", "spread", ".1%"),
    Column(f"predicted.{RATE}", "predicted", ",.1f"),
    Column(f"delta.{RATE}", "error", "+.1%"),
    Column("measured.mfu", "MFU", ".1%"),
    Column("predicted.mfu", "MFU, predicted", ".1%"),
    Column("measured.memory_gib", "memory, GiB", ".2f"),
    Column("predicted.memory_gib", "memory, predicted", ".2f"),
    Column("delta.memory_gib", "error of memory", "+.1%"),
    Column(f"torchtitan.{RATE}", "torchtitan, tokens/s/rank", ",.1f"),
    Column("loss", "loss", ".4f"),
    Column("state", "state"),
)
# Shown with THROUGHPUT.
SPREAD = "Spread: 90th minus 10th percentile of the steps' rates, divided by the rate."
_FAILURES = (
    Column("point", "run"),
    Column("state", "state"),
    Column("kind", "class"),
    Column("reason", "reason"),
)


def report_of(
    title: str,
    rows: Sequence[Row],
    folder: Path,
    calibration: Calibration | None = None,
    study: StudyRecord | None = None,
) -> Report:
    """Create the report, and write its pictures.

    Args:
        title: title of the report.
        rows: rows with predictions.
        folder: folder for its pictures.
        calibration: constants that the predictions were made with.
        study: the objective, if a sweeper chose the points by their results.
    """
    rows = [_with_layout(row) for row in rows]
    best = best_of(rows)
    sections = [*_study(study, rows), *_tables(title, rows, best, folder)]
    measured = [row for row in rows if row["state"] == "completed"]
    names = [plot_name(row, measured) for row in measured]
    note = _rank_in_words(measured)
    if plots.against(
        folder / "predicted.png", f"{title}: predicted and measured", names, measured, note=note
    ):
        sections.append(Section("Predicted and measured", [note] if note else [], picture="predicted.png"))
    sections += _evaluations(rows)
    sections += _knobs(rows, best)
    sections += _slow(rows)
    sections += _failures(rows)
    origin = section_of(rows)
    sections += [origin] if origin is not None else []
    summary = [*_summary(rows, best), *_best_of_study(study, rows), *constants_in_words(calibration)]
    return Report(title, sections, summary, rows)


def _study(study: StudyRecord | None, rows: Sequence[Row]) -> list[Section]:
    """Return a section with the values of a study's objective, the best first."""
    if study is None or not study.ranked(rows):
        return []
    columns = (Column("point", "run"), *(Column(name, name, ".6g") for name in study.objective))
    ranked = [rows[index] for index in study.ranked(rows)]
    text = f"Chosen by {study.sweeper} to {study.describe()}."
    return [Section("Study", [text], Table(columns, ranked, ranked[0]["point"]))]


def _best_of_study(study: StudyRecord | None, rows: Sequence[Row]) -> list[str]:
    best = [] if study is None else [rows[index] for index in study.best(rows)]
    return [
        f"- The best ({study.describe()}): `{row['point']}`, {study.format(study.value(row))}."
        for row in best
        if study is not None
    ]


def _with_layout(row: Row) -> Row:
    job = job_of(row)
    return {**row, "layout": layout_and_schedule(job) if job is not None else ""}


def plot_name(row: Row, others: Sequence[Row]) -> str:
    """Return a row's layout if all layouts differ, else its point."""
    layouts = [each["layout"] for each in others]
    return row["layout"] if row["layout"] and len(set(layouts)) == len(layouts) else row["point"]


def _tables(title: str, rows: Sequence[Row], best: Row | None, folder: Path) -> list[Section]:
    """Return a section per group of equal numerics, fastest run first; one section if all runs differ."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["state"] != "skipped":
            groups.setdefault(row.get("numerics_id", ""), []).append(row)
    differ = _differences(groups)
    if len(groups) > 1 and all(len(group) == 1 for group in groups.values()):
        note = f"The numerics of all runs differ ({in_short(differ)}): compare losses as well as speed."
        groups = {"": [row for group in groups.values() for row in group]}
    else:
        note = ""
    sections = []
    for number, (numerics, group) in enumerate(groups.items(), start=1):
        ordered = fastest_first(group)
        text = [note] if note else []
        if len(groups) > 1:
            text.append(f"Runs of equal numerics (`{numerics}`): {_values(group[0], differ)}.")
        if any(row.get("measured.spread") for row in group):
            text.append(f"{THROUGHPUT}. {SPREAD}")
        heading = "Runs" if len(groups) == 1 else f"Runs, group {number}"
        picture = "runs.png" if len(groups) == 1 else f"runs_{number}.png"
        names = [plot_name(row, ordered) for row in ordered]
        drawn = plots.bars(folder / picture, f"{title}: throughput and memory", names, ordered)
        table = Table(_COLUMNS, ordered, None if best is None else best["point"])
        sections.append(Section(heading, text, table, picture if drawn else None))
    return sections


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


def _differences(groups: dict[str, list[Row]]) -> list[str]:
    """Return the numerics fields in which groups differ."""
    jobs = [job for group in groups.values() if (job := job_of(group[0])) is not None]
    values: dict[str, set[str]] = {}
    for job in jobs:
        for name, role, value in leaves(job):
            if role == NUMERICS:
                values.setdefault(name, set()).add(str(value))
    return [name for name, found in values.items() if len(found) > 1]


def _evaluations(rows: Sequence[Row]) -> list[Section]:
    """Metrics of the newest evaluation of each run that has one."""
    names = evaluated_columns(rows)
    evaluated = [row for row in rows if any(name in row for name in names)]
    headings = [Column(name, name.removeprefix(f"{PREFIX}."), ".4f") for name in names]
    return [Section("Evaluations", [], Table([_COLUMNS[0], *headings], evaluated))] if names else []


def _knobs(rows: Sequence[Row], best: Row | None) -> list[Section]:
    knobs = ablation(rows)
    if not knobs or best is None:
        return []
    text = f"Around the fastest run, `{best['point']}`: each table varies one knob of it."
    return [Section("One knob at a time", [text]), *(_knob(knob, best) for knob in knobs)]


def _knob(knob: Knob, best: Row) -> Section:
    rows = [{**row, "why": _why(row)} for row in knob.rows]
    columns = (
        Column("knob", knob.name),
        Column("layout", "layout"),
        Column(f"measured.{RATE}", "tokens/s/rank", ",.1f"),
        Column("gain", "against the best", "+.1%"),
        Column("measured.memory_gib", "memory, GiB", ".2f"),
        Column(f"predicted.{RATE}", "predicted", ",.1f"),
        Column("loss", "loss", ".4f"),
        Column("why", "why not"),
    )
    return Section(f"Knob: {knob.name}", table=Table(columns, rows, best["point"]), level=3)


def _why(row: Row) -> str:
    """Return why a row has no measurement; empty if it has one."""
    if row["state"] == "completed":
        return ""
    return ": ".join(part for part in (row["state"], row.get("kind"), row.get("reason")) if part)


def _slow(rows: Sequence[Row]) -> list[Section]:
    """Return a section of the runs with slow ranks."""
    found = [row for row in rows if row.get("slow")]
    table = Table((Column("point", "run"), Column("slow", "slow ranks")), found)
    return [Section("Slow ranks", table=table)] if found else []


def _failures(rows: Sequence[Row]) -> list[Section]:
    """Return sections of runs that did not complete, and of points that are not valid jobs."""
    unfinished = [row for row in rows if row["state"] not in ("completed", "skipped", NOT_MEASURED)]
    skipped = [row for row in rows if row["state"] == "skipped"]
    sections = []
    if unfinished:
        sections.append(Section("Not completed", table=Table(_FAILURES, unfinished)))
    if skipped:
        text = "Points of the space that are not valid jobs, and the rule that they violate."
        columns = (Column("point", "point"), Column("reason", "rule"))
        sections.append(Section("Not possible", [text], Table(columns, skipped)))
    return sections


def _summary(rows: Sequence[Row], best: Row | None) -> list[str]:
    counts = Counter(row["state"] for row in rows)
    lines = [f"- {len(rows)} points: {', '.join(f'{count} {state}' for state, count in counts.items())}."]
    if best is not None:
        spread = best.get("measured.spread")
        lines.append(
            f"- The fastest: `{best['point']}`, {best[f'measured.{RATE}']:,.1f} tokens/s/rank"
            f"{f' (spread of its steps {spread:.1%})' if spread is not None else ''}."
        )
    errors = [
        f"{what} {errors_in_words(found)}"
        for what, name in (("throughput", RATE), ("memory", "memory_gib"))
        if (found := errors_of(rows, f"delta.{name}")) is not None
    ]
    if errors:
        lines.append(f"- Predicted against measured: {'; '.join(errors)}.")
    rank = _rank_in_words([row for row in rows if row["state"] == "completed"])
    return [*lines, f"- {rank}."] if rank else lines


def errors_in_words(errors: Errors) -> str:
    """Format the median and worst of some errors."""
    return f"median error {errors.median:.1%}, worst {errors.worst:.1%} ({errors.count} rows)"


def constants_in_words(calibration: Calibration | None) -> list[str]:
    """Name the source of calibrated constants: a prediction of rows they were fitted to is no forecast."""
    source = None if calibration is None else calibration.source or "a calibration"
    return [] if source is None else [f"- The plan's constants are those of {source}."]


def _rank_in_words(measured: Sequence[Row]) -> str:
    pairs = [
        (row[f"predicted.{RATE}"], row[f"measured.{RATE}"])
        for row in measured
        if row.get(f"predicted.{RATE}") is not None and row.get(f"measured.{RATE}") is not None
    ]
    rank = spearman(pairs)
    return "" if rank is None else f"Spearman rank correlation of throughput, {len(pairs)} runs: {rank:.2f}"
