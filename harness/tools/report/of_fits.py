"""Report of scaling laws: fits, what they determine, predictions, the runs, and pictures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.tools.report import fit_plots
from harness.tools.report.fits import Fits, Forecast, Run, formula, in_words
from harness.tools.report.isoflop import Growth
from harness.tools.report.power_laws import LEVEL
from harness.tools.report.provenance import section_of
from harness.util.document import Column, Report, Section, Table

Row = dict[str, Any]

_RUNS = (
    Column("point", "run"),
    Column("N", "parameters", ",d"),
    Column("D", "tokens", ",d"),
    Column("ratio", "tokens per parameter", ".1f"),
    Column("C", "FLOPs", ".3g"),
    Column("loss", "loss", ".4f"),
    Column("fitted", "fitted", ".4f"),
    Column("error", "loss / fitted - 1", "+.2%"),
)
_FORECASTS = (
    *_RUNS[:5],
    Column("predicted", "predicted", ".4f"),
    Column("low", "low", ".4f"),
    Column("high", "high", ".4f"),
    Column("loss", "measured", ".4f"),
    Column("error", "measured / predicted - 1", "+.2%"),
    Column("inside", "in the interval"),
)
_PARAMETERS = (
    Column("name", "parameter"),
    Column("value", "value", ".5g"),
    Column("low", "low", ".5g"),
    Column("high", "high", ".5g"),
)
_VALLEYS = (
    Column("C", "FLOPs", ".3g"),
    Column("sizes", "runs", "d"),
    Column("N", "best N"),
    Column("D", "best D"),
    Column("loss", "lowest loss", ".4f"),
    Column("why", "why not"),
)


def report_of(title: str, made: Fits, rows: Sequence[Row], counted: str, folder: Path) -> Report:
    """Create the report, and write its pictures.

    Args:
        title: title of the report.
        made: the fits.
        rows: rows of all runs, whose versions and machines are listed.
        counted: which parameters were counted.
        folder: folder for its pictures.
    """
    sections, runs = [], _rows_of_runs(made)
    if made.law is not None:
        text = [
            f"`{formula(made.law.law)}`, fitted to the logarithm of the loss. "
            f"Intervals: {LEVEL:.0%}, by bootstrap. N: parameters ({counted.replace('_', '-')}), "
            "D: tokens, C: FLOPs with full attention."
        ]
        values = [(name, made.law.estimate(name)) for name in made.law.law.parameters]
        table = Table(
            _PARAMETERS,
            [
                {"name": name, "value": each.value, "low": each.low, "high": each.high}
                for name, each in values
            ],
        )
        picture = fit_plots.draw_law(folder / "fits_law.png", title, made)
        sections.append(Section("Law", text, table, picture))
    if made.forecasts:
        text = ["The interval is that of one measured loss: uncertainty of the curve, and noise."]
        table = Table(_FORECASTS, [_of_forecast(each) for each in made.forecasts])
        sections.append(Section("Predictions", text, table))
    if made.by_parameters is not None:
        picture = fit_plots.draw_isoflop(folder / "fits_isoflop.png", title, made.by_parameters)
        sections.append(Section("IsoFLOP curves", [], _valleys(made.by_parameters, made.by_tokens), picture))
    sections.append(Section("Runs", [], Table(_RUNS, runs)))
    origin = section_of(rows)
    sections += [origin] if origin is not None else []
    predictions = [_of_forecast(each) for each in made.forecasts]
    return Report(title, sections, [f"- {each}" for each in made.words], [*runs, *predictions])


def _of_run(run: Run) -> Row:
    ratio = run.tokens / run.parameters
    return {
        "point": run.name,
        "N": run.parameters,
        "D": run.tokens,
        "ratio": ratio,
        "C": run.flops,
        "loss": run.loss,
    }


def _rows_of_runs(made: Fits) -> list[Row]:
    rows = [_of_run(run) for run in made.runs]
    if made.law is not None:
        fitted = made.law.predict([run.variables(made.law.law) for run in made.runs])
        for row, each in zip(rows, fitted, strict=True):
            row |= {"fitted": each.value, "error": row["loss"] / each.value - 1}
    return rows


def _of_forecast(each: Forecast) -> Row:
    predicted, loss = each.predicted, each.run.loss
    return _of_run(each.run) | {
        "predicted": predicted.value,
        "low": predicted.low,
        "high": predicted.high,
        "error": each.error,
        "inside": None if loss is None else loss in predicted,
    }


def _valleys(by_parameters: Growth, by_tokens: Growth | None) -> Table:
    tokens = {} if by_tokens is None else {each.flops: each for each in by_tokens.valleys}
    rows = []
    for each in by_parameters.valleys:
        of_tokens = tokens.get(each.flops)
        row: Row = {"C": each.flops, "sizes": len(each.losses), "why": each.why_not}
        if each.best is not None:
            row |= {"N": in_words(each.best, ".3g"), "loss": each.lowest}
        if of_tokens is not None and of_tokens.best is not None:
            row["D"] = in_words(of_tokens.best, ".3g")
        rows.append(row)
    return Table(_VALLEYS, rows)
