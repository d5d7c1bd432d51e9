"""Report of scaling laws: fits, what they determine, predictions, the runs, and pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.tools.report import fit_plots
from harness.tools.report.fits import Fits, Forecast, Run, formula, in_words
from harness.tools.report.isoflop import Growth
from harness.tools.report.power_laws import LEVEL
from harness.util.tables import Block, Column, Document, Figure, Table

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


def report_fits(title: str, made: Fits, counted: str, folder: Path) -> Document:
    """Report the fits, and write their pictures into ``folder``.

    Args:
        title: title of the report.
        made: the fits.
        counted: which parameters were counted.
        folder: folder for its pictures.
    """
    blocks: list[Block] = []
    runs, predictions = _rows_of_runs(made), [_of_forecast(each) for each in made.forecasts]
    if made.law is not None:
        text = (
            f"`{formula(made.law.law)}`, fitted to the logarithm of the loss. "
            f"Intervals: {LEVEL:.0%}, by bootstrap. N: parameters ({counted.replace('_', '-')}), "
            "D: tokens, C: FLOPs with full attention."
        )
        values = [{"name": name, **vars(made.law.estimate(name))} for name in made.law.law.parameters]
        picture = fit_plots.draw_law(folder / "fits_law.png", title, made)
        blocks += [Table(_PARAMETERS, values, "Law", [text]), Figure(picture, "Law")]
    if predictions:
        text = "The interval is that of one measured loss: uncertainty of the curve, and noise."
        blocks.append(Table(_FORECASTS, predictions, "Predictions", [text]))
    if made.by_parameters is not None:
        picture = fit_plots.draw_isoflop(folder / "fits_isoflop.png", title, made.by_parameters)
        blocks += [_valleys(made.by_parameters, made.by_tokens), Figure(picture, "IsoFLOP curves")]
    blocks.append(Table(_RUNS, runs, "Runs"))
    return Document(title, made.words, blocks, [*runs, *predictions])


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
    return Table(_VALLEYS, rows, "IsoFLOP curves")
