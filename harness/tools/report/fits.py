"""Scaling laws of the runs of a ladder or of IsoFLOP sweeps: fits, what they determine, and predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.compose.scale import count
from harness.config.fields import NUMERICS, leaves
from harness.config.job import Job
from harness.launch.rows import Row, job_of
from harness.model.accounting import account
from harness.tools.report import fit_plots
from harness.tools.report.power_laws import (
    CHINCHILLA,
    COMPUTE,
    LEVEL,
    Fit,
    Frontier,
    Interval,
    Law,
    fit,
    fit_frontier,
)
from harness.util.document import Block, Document, Figure
from harness.util.errors import UserError
from harness.util.tables import Column, Table
from harness.util.words import counted as in_units

COLLINEAR = 2.0
"""Tokens per parameter must span at least this factor to separate the effects of model size and
tokens."""
SPARE = 2
"""Different points that a fit needs beyond the number of its parameters."""
SURE = 2.0
SURE_OF_COEFFICIENT = 10.0
"""An offset or exponent is determined if its interval spans at most a factor SURE; a coefficient, whose unit
depends on the exponent, SURE_OF_COEFFICIENT."""
VALIDATION = "validation_loss"
SAME_DATA = ("data.", "tokenizer.", "training.seq_len")
"""Fields that are the same in all runs, or their losses cannot be compared."""

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
_PARABOLAS = (
    Column("C", "FLOPs", ".3g"),
    Column("sizes", "runs", "d"),
    Column("N", "best N"),
    Column("D", "best D"),
    Column("loss", "lowest loss", ".4f"),
    Column("reason", "why not"),
)


@dataclass(frozen=True)
class FittedRun:
    """A run as a point of a scaling law."""

    name: str
    parameters: int
    tokens: int
    flops: float
    """FLOPs per token with full attention, as MFU counts them, times tokens."""
    loss: float | None
    """None: it has not completed."""

    def variables(self, law: Law) -> list[float]:
        """Values of a law's variables."""
        known = {"N": self.parameters, "D": self.tokens, "C": self.flops}
        return [known[name] for name in law.variables]


@dataclass(frozen=True)
class Forecast:
    """A run that is not part of the fit: its predicted loss, and the measured one if it has completed."""

    run: FittedRun
    predicted: Interval

    @property
    def error(self) -> float | None:
        """Measured loss divided by the prediction, minus 1."""
        return None if self.run.loss is None else self.run.loss / self.predicted.value - 1


@dataclass(frozen=True)
class Fits:
    """Everything that was fitted.

    Attributes:
        runs: the completed runs that were fitted.
        loss: which loss: ``validation_loss``, or the last step's ``loss``.
        law: the fitted law; None with a reason in ``words``.
        by_parameters, by_tokens: IsoFLOP parabolas over model size, and over tokens.
        forecasts: runs that were held out, or have not completed.
        words: findings, one sentence each.
    """

    runs: list[FittedRun]
    loss: str
    law: Fit | None = None
    by_parameters: Frontier | None = None
    by_tokens: Frontier | None = None
    forecasts: list[Forecast] = field(default_factory=list)
    words: list[str] = field(default_factory=list)


def fits_of(rows: Sequence[Row], *, counted: str = "non_embedding", hold_out: int = 0) -> Fits:
    """Fit the laws that the runs can determine.

    Args:
        rows: rows of runs; those that have not completed are predicted.
        counted: which parameters count, as in ``scale.counted``.
        hold_out: leave out the runs of this many of the largest computes, and predict them.
    """
    validated = all(
        _is_positive(row.get(VALIDATION)) for row in rows if row["state"] == "completed"
    )
    loss = VALIDATION if validated else "loss"
    runs = [_run(row, loss, counted) for row in rows if row["state"] != "skipped"]
    _require_comparable(rows)
    done = sorted((run for run in runs if run.loss is not None), key=lambda run: run.flops)
    fitted = _without_largest(done, hold_out)
    words = [f"{len(fitted)} runs are fitted, with their {loss.replace('_', ' ')}."]
    if not validated:
        words.append(
            "It is the loss of one batch, and noisy; `validation.interval` measures a better one."
        )
    law, more = _law(fitted)
    words += more
    flops = [run.flops for run in fitted]
    losses = [run.loss or 0.0 for run in fitted]
    by_parameters = fit_frontier(flops, [float(run.parameters) for run in fitted], losses)
    by_tokens = by_parameters and fit_frontier(flops, [float(run.tokens) for run in fitted], losses)
    words += _frontiers_in_words(by_parameters, by_tokens)
    others = [run for run in runs if run not in fitted]
    forecasts = []
    if law is not None and others:
        predicted = law.predict([run.variables(law.law) for run in others], noise=True)
        forecasts = [Forecast(run, each) for run, each in zip(others, predicted, strict=True)]
        words += [_forecast_in_words(each, fitted) for each in forecasts]
    return Fits(fitted, loss, law, by_parameters, by_tokens, forecasts, words)


def _without_largest(runs: Sequence[FittedRun], hold_out: int) -> list[FittedRun]:
    computes = sorted({run.flops for run in runs})
    if hold_out >= len(computes):
        most = f"--hold-out {len(computes) - 1}" if len(computes) > 1 else "runs of several sizes"
        raise UserError(
            f"--hold-out={hold_out}: the completed runs have {len(computes)} different computes, and a fit "
            f"needs some; would work: {most}"
        )
    return [run for run in runs if run.flops <= computes[len(computes) - 1 - hold_out]]


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _run(row: Row, loss: str, counted: str) -> FittedRun:
    job = job_of(row)
    assert job is not None, "only skipped points have no job"
    is_done = row["state"] == "completed"
    tokens = row["tokens"] if is_done else job.sizes.tokens(job.steps)
    each = account(job.model, job.training.seq_len).flops_per_token_full
    measured = float(row[loss]) if is_done and _is_positive(row.get(loss)) else None
    return FittedRun(row["point"], count(job.model, counted), tokens, each * tokens, measured)


def _require_comparable(rows: Sequence[Row]) -> None:
    done = [row for row in rows if row["state"] == "completed"]
    if not done:
        raise UserError(
            "no run has completed, so there is no loss to fit; would work: the same after a run"
        )
    names = [
        name for name, role, _ in leaves(Job()) if role == NUMERICS and name.startswith(SAME_DATA)
    ]
    for name in names:
        first = done[0].get(f"job.{name}")
        for row in done[1:]:
            if row.get(f"job.{name}") != first:
                pair = (
                    f"{first} in {done[0]['point']} and {row.get(f'job.{name}')} in {row['point']}"
                )
                raise UserError(
                    f"{name}: is {pair}, and losses on different data cannot be compared; "
                    "would work: a folder with runs on the same data"
                )


def _law(runs: Sequence[FittedRun]) -> tuple[Fit | None, list[str]]:
    ratios = [run.tokens / run.parameters for run in runs]
    words = []
    law = CHINCHILLA
    if max(ratios) < COLLINEAR * min(ratios):
        law = COMPUTE
        words.append(
            f"Tokens per parameter are {min(ratios):.3g} to {max(ratios):.3g}, so the effects of model size "
            "and tokens cannot be separated: the loss is fitted to compute alone. Chinchilla's law needs "
            "runs of other `scale.tokens_per_parameter`, such as those of `sweep=isoflop`."
        )
    least = len(law.parameters) + SPARE
    different = len({tuple(run.variables(law)) for run in runs})
    if different < least:
        words.append(
            f"No fit: a {law.name} needs {least} different runs, and there are {different}."
        )
        return None, words
    made = fit(law, [run.variables(law) for run in runs], [run.loss or 0.0 for run in runs])
    return made, [*words, *_law_in_words(made)]


def _law_in_words(made: Fit) -> list[str]:
    estimates = {name: made.estimate(name) for name in made.law.parameters}
    values = ", ".join(f"{name} = {in_words(each)}" for name, each in estimates.items())
    words = [f"`{made.law.formula}`: {values}; residuals {made.rms:.2%} (root mean square)."]
    unsure = [
        name
        for name, each in estimates.items()
        if not each.is_within(SURE_OF_COEFFICIENT if name in made.law.coefficients else SURE)
    ]
    if unsure:
        words.append(
            f"The data do not determine {', '.join(unsure)}: the {LEVEL:.0%} interval spans more than a "
            f"factor {SURE:g} (coefficients: {SURE_OF_COEFFICIENT:g}). More runs, or larger ones, narrow it."
        )
    if made.law is CHINCHILLA:
        alpha, beta = (
            made.replicates[:, made.law.parameters.index(name)] for name in made.law.exponents
        )
        value = made.values["beta"] / (made.values["alpha"] + made.values["beta"])
        best = Interval.of(value, beta / (alpha + beta))
        words.append(
            f"The compute-optimal size grows as C^a, a = beta / (alpha + beta) = {in_words(best)}."
        )
    return words


def in_words(estimate: Interval, form: str = ".4g") -> str:
    """Format a value with its interval."""
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _frontiers_in_words(by_parameters: Frontier | None, by_tokens: Frontier | None) -> list[str]:
    words = []
    for name, found in (("N", by_parameters), ("D", by_tokens)):
        if found is None:
            continue
        words += [
            f"IsoFLOP at {each.flops:.3g} FLOPs: no best {name}, because {each.reason}."
            for each in found.parabolas
            if each.best is None
        ]
        if found.exponent is None:
            words.append(
                f"IsoFLOP: the growth of the best {name} is not determined: {found.reason}."
            )
        else:
            words.append(f"IsoFLOP: the best {name} grows as C^{in_words(found.exponent)}.")
            if not found.exponent.is_within(SURE):
                words.append(
                    f"The data do not determine this exponent of {name}: its interval is too wide."
                )
    return words


def _forecast_in_words(each: Forecast, fitted: Sequence[FittedRun]) -> str:
    times = each.run.flops / max(run.flops for run in fitted)
    words = (
        f"`{each.run.name}` ({in_units(each.run.parameters)} parameters, {times:.2g} times the largest "
        f"fitted compute): predicted {in_words(each.predicted, '.4f')}"
    )
    if each.run.loss is None:
        return f"{words}; not measured yet."
    inside = "inside" if each.run.loss in each.predicted else "OUTSIDE"
    return f"{words}, measured {each.run.loss:.4f} ({each.error:+.2%}), {inside} the {LEVEL:.0%} interval."


def report_fits(title: str, made: Fits, counted: str, folder: Path) -> Document:
    """Report the fits with these ``counted`` parameters, and write their pictures into ``folder``."""
    blocks: list[Block] = []
    runs = [_of_run(run) for run in made.runs]
    if made.law is not None:
        fitted = made.law.predict([run.variables(made.law.law) for run in made.runs])
        for row, value in zip(runs, fitted, strict=True):
            row |= {"fitted": value.value, "error": row["loss"] / value.value - 1}
    predictions = []
    for each in made.forecasts:
        found = each.predicted
        loss = each.run.loss
        interval = {"predicted": found.value, "low": found.low, "high": found.high}
        inside = None if loss is None else loss in found
        predictions.append(_of_run(each.run) | interval | {"error": each.error, "inside": inside})
    if made.law is not None:
        text = (
            f"`{made.law.law.formula}`, fitted to the logarithm of the loss. "
            f"Intervals: {LEVEL:.0%}, by bootstrap. N: parameters ({counted.replace('_', '-')}), "
            "D: tokens, C: FLOPs with full attention."
        )
        values = [
            {"name": name, **vars(made.law.estimate(name))} for name in made.law.law.parameters
        ]
        picture = fit_plots.draw_law(folder / "fits_law.png", title, made)
        blocks += [Table(_PARAMETERS, values, "Law", [text]), Figure(picture, "Law")]
    if predictions:
        text = "The interval is that of one measured loss: uncertainty of the curve, and noise."
        blocks.append(Table(_FORECASTS, predictions, "Predictions", [text]))
    if made.by_parameters is not None:
        picture = fit_plots.draw_isoflop(folder / "fits_isoflop.png", title, made.by_parameters)
        blocks += [
            _parabolas(made.by_parameters, made.by_tokens),
            Figure(picture, "IsoFLOP curves"),
        ]
    blocks.append(Table(_RUNS, runs, "Runs"))
    return Document(title, made.words, blocks, [*runs, *predictions])


def _of_run(run: FittedRun) -> Row:
    sizes = {
        "N": run.parameters,
        "D": run.tokens,
        "ratio": run.tokens / run.parameters,
        "C": run.flops,
    }
    return {"point": run.name, **sizes, "loss": run.loss}


def _parabolas(by_parameters: Frontier, by_tokens: Frontier | None) -> Table:
    tokens = {} if by_tokens is None else {each.flops: each for each in by_tokens.parabolas}
    rows = []
    for each in by_parameters.parabolas:
        of_tokens = tokens.get(each.flops)
        row: Row = {"C": each.flops, "sizes": len(each.losses), "reason": each.reason}
        if each.best is not None:
            row |= {"N": in_words(each.best, ".3g"), "loss": each.lowest}
        if of_tokens is not None and of_tokens.best is not None:
            row["D"] = in_words(of_tokens.best, ".3g")
        rows.append(row)
    return Table(_PARABOLAS, rows, "IsoFLOP curves")
