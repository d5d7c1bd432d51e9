"""Report of published tables: published, predicted and measured results, and the differences between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.metrics.window import THROUGHPUT
from harness.tools.plan.constants import Calibration
from harness.tools.report.experiment import Table
from harness.tools.report.of_runs import SPREAD, constants_in_words, errors_in_words
from harness.tools.report.provenance import section_of
from harness.tools.report.statistics import Effect, effects, errors_of
from harness.util import plots
from harness.util.document import Column, Report, Section
from harness.util.document import Table as Shown

Row = dict[str, Any]
RATE, MEMORY = "tokens_per_second_per_rank", "memory_gib"

_COLUMNS = (
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
_OF_CSV = (
    Column("table", ""),
    Column("published.layout", ""),
    *_COLUMNS,
    Column("predicted.step_seconds", ""),
    Column("predicted.fits", ""),
    Column("measured.step_seconds", ""),
    Column("world_size", ""),
    Column("published.accelerator", ""),
    Column("published.source", ""),
    Column("id", ""),
    Column("code.commit", ""),
    Column("command", ""),
)


def report_of(
    title: str, tables: Sequence[Table], folder: Path, calibration: Calibration | None = None
) -> Report:
    """Create the report, and write its pictures.

    Args:
        title: title of the report.
        tables: tables of the experiment, in order.
        folder: folder for its pictures.
        calibration: constants that the measured machines were predicted with.
    """
    tables = [_with_machines(table) for table in tables]
    rows = [row for table in tables for row in table.rows]
    found = {table.name: effects(_once(table)) for table in tables}
    sections = [_errors(tables, found, title, folder), _effects(tables, found)]
    for table in tables:
        names = [row["point"] for row in table.rows]
        drawn = plots.bars(
            folder / f"{table.name}.png", f"{in_words(table.name)}: {_subject(table)}", names, table.rows
        )
        is_measured = any(row["state"] == "completed" for row in table.rows)
        text = [
            f"{_subject(table)}.",
            f"Published: {table.source}. Run it: `{table.command} cluster=slurm_h100`",
            *([f"Measured {THROUGHPUT}, divided by the number of GPUs. {SPREAD}"] if is_measured else []),
        ]
        picture = f"{table.name}.png" if drawn else None
        sections.append(Section(in_words(table.name), text, Shown(_COLUMNS, table.rows), picture))
    origin = section_of(rows)
    sections += [origin] if origin is not None else []
    return Report(
        title, sections, [*_summary(tables, found), *constants_in_words(calibration)], rows, _OF_CSV
    )


def in_words(name: str) -> str:
    """Convert ``table1`` to ``Table 1``."""
    return f"Table {name.removeprefix('table')}" if name.startswith("table") else name


def _subject(table: Table) -> str:
    """Return a table's subject: its file's first line without the table's name."""
    return table.title.removeprefix(f"{in_words(table.name)}: ").removesuffix(".")


def _with_machines(table: Table) -> Table:
    """Add ``measured_on`` to each row: the device, or why there is no measurement."""
    rows = []
    for row in table.rows:
        on = str(row.get("device") or "") if row["state"] == "completed" else str(row["state"])
        failed = row["state"] == "failed"
        rows.append(
            {**row, "measured_on": f"failed: {row.get('kind')}: {row.get('reason')}" if failed else on}
        )
    return Table(table.name, table.title, table.command, rows, table.recipes, table.source)


def _once(table: Table) -> list[tuple[Any, Row]]:
    """Return each published row once, even if several machines have measured it."""
    return list(
        {recipe: (recipe, row) for recipe, row in zip(table.recipes, table.rows, strict=True)}.values()
    )


def _rows_once(tables: Sequence[Table]) -> list[Row]:
    return [row for table in tables for _, row in _once(table)]


def _errors(tables: Sequence[Table], found: dict[str, list[Effect]], title: str, folder: Path) -> Section:
    lines = [_errors_of(in_words(table.name), _rows_once([table]), found[table.name]) for table in tables]
    overall = _errors_of("all", _rows_once(tables), [each for name in found for each in found[name]])
    columns = (
        Column("point", "table"),
        Column("rows", "rows", "d"),
        Column("rate_median", "throughput, median error", ".1%"),
        Column("rate_worst", "worst", ".1%"),
        Column("memory_median", "memory, median error", ".1%"),
        Column("memory_worst", "worst of memory", ".1%"),
        Column("order", "effects with the right sign"),
    )
    text = "Predicted against published, for the machine of the tables. Errors here have no sign."
    rows = _rows_once(tables)
    names = [f"{row['table'].removeprefix('table')}: {row['point']}" for row in rows]
    picture = "errors.png"
    words = f"{title}: predicted and published, by table and row"
    drawn = plots.against(folder / picture, words, names, rows, reference="published")
    table = Shown(columns, [*lines, overall], "all")
    return Section("Errors", [text], table, picture if drawn else None)


def _errors_of(name: str, rows: Sequence[Row], found: Sequence[Effect]) -> Row:
    rate, memory = errors_of(rows, f"delta.{RATE}"), errors_of(rows, f"delta.{MEMORY}")
    judged = [each for each in found if each.is_right is not None]
    return {
        "point": name,
        "rows": len(rows),
        "rate_median": rate and rate.median,
        "rate_worst": rate and rate.worst,
        "memory_median": memory and memory.median,
        "memory_worst": memory and memory.worst,
        "order": f"{sum(bool(each.is_right) for each in judged)} of {len(judged)}" if judged else None,
    }


def _effects(tables: Sequence[Table], found: dict[str, list[Effect]]) -> Section:
    rows = [
        {
            "point": in_words(table.name),
            "what": f"{each.what}: {each.words}" if each.words else each.what,
            "published": each.published,
            "predicted": each.predicted,
            "right": each.is_right,
        }
        for table in tables
        for each in found[table.name]
    ]
    columns = (
        Column("point", "table"),
        Column("what", "change"),
        Column("published", "gain in throughput, published", "+.1%"),
        Column("predicted", "predicted", "+.1%"),
        Column("right", "right sign"),
    )
    return Section("Effects", ["Rows of a table that differ in one thing only."], Shown(columns, rows))


def _summary(tables: Sequence[Table], found: dict[str, list[Effect]]) -> list[str]:
    once = _rows_once(tables)
    measured = [row for table in tables for row in table.rows if row["state"] == "completed"]
    count = len({(row["table"], row["point"]) for row in measured})
    lines = [f"- {len(once)} published rows, {count} of them measured."]
    for what, name in (("throughput", RATE), ("memory", MEMORY)):
        errors = errors_of(once, f"delta.{name}")
        lines += [f"- Predicted {what} against published: {errors_in_words(errors)}."] if errors else []
    errors = errors_of(once, f"delta.rehearsed.{MEMORY}")
    lines += [f"- Rehearsed memory against published: {errors_in_words(errors)}."] if errors else []
    every = [each for own in found.values() for each in own if each.is_right is not None]
    wrong = [
        f"{in_words(name)} {each.what}"
        for name, own in found.items()
        for each in own
        if each.is_right is False
    ]
    if every:
        detail = f"; wrong: {', '.join(wrong)}" if wrong else ""
        right = sum(bool(each.is_right) for each in every)
        lines.append(f"- Effects of one change with the right sign: {right} of {len(every)}{detail}.")
    for what, name in (("throughput", RATE), ("memory", MEMORY)):
        errors = errors_of(measured, f"delta.expected.{name}")
        lines += [f"- Predicted {what} against measured: {errors_in_words(errors)}."] if errors else []
    return lines
