"""Scaling laws of the runs of a ladder or of IsoFLOP sweeps: fits, what they determine, and predictions."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any

from harness.config.fields import NUMERICS, leaves
from harness.config.job import Job
from harness.launch.rows import Row, job_of
from harness.model.accounting import account
from harness.model.scale import count
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
from harness.util.tables import Table, columns_of
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

_RUNS = columns_of("""
    point   run
    N       parameters            ,d
    D       tokens                ,d
    ratio   tokens per parameter  .1f
    C       FLOPs                 .3g
    loss    loss                  .4f
    fitted  fitted                .4f
    error   loss / fitted - 1     +.2%
""")
_FORECASTS = [
    *_RUNS[:5],
    *columns_of("""
    predicted  predicted                 .4f
    low        low                       .4f
    high       high                      .4f
    loss       measured                  .4f
    error      measured / predicted - 1  +.2%
    inside     in the interval
"""),
]
_PARAMETERS = columns_of("""
    name   parameter
    value  value      .5g
    low    low        .5g
    high   high       .5g
""")
_PARABOLAS = columns_of("""
    C       FLOPs        .3g
    sizes   runs         d
    N       best N
    D       best D
    loss    lowest loss  .4f
    reason  why not
""")


@dataclass(frozen=True)
class Fits:
    """Everything that was fitted.

    Attributes:
        runs: the completed runs that were fitted: their columns, and the variables of laws by name.
        loss: which loss: ``validation_loss``, or the last step's ``loss``.
        law: the fitted law; None with a reason in ``words``.
        frontiers: IsoFLOP parabolas over model size (``N``), and over tokens (``D``).
        forecasts: runs that were held out, or have not completed.
        words: findings, one sentence each.
    """

    runs: list[Row]
    loss: str
    law: Fit | None
    frontiers: dict[str, Frontier]
    forecasts: list[Row]
    words: list[str]


def fits_of(rows: Sequence[Row], *, counted: str = "non_embedding", hold_out: int = 0) -> Fits:
    """Fit the laws that the runs can determine.

    Args:
        rows: rows of runs; those that have not completed are predicted.
        counted: which parameters count, as in ``scale.counted``.
        hold_out: leave out the runs of this many of the largest computes, and predict them.
    """
    _require_comparable(rows)
    validated = all(
        _is_positive(row.get(VALIDATION)) for row in rows if row["state"] == "completed"
    )
    loss = VALIDATION if validated else "loss"
    runs = [_run(row, loss, counted) for row in rows if row["state"] != "skipped"]
    computes = sorted({run["C"] for run in runs if run["loss"] is not None})
    if hold_out >= len(computes):
        most = f"--hold-out {len(computes) - 1}" if len(computes) > 1 else "runs of several sizes"
        raise UserError(
            f"--hold-out={hold_out}: the completed runs have {len(computes)} different computes, and a fit "
            f"needs some; would work: {most}"
        )
    largest = computes[len(computes) - 1 - hold_out]
    fitted = [run for run in runs if run["loss"] is not None and run["C"] <= largest]
    fitted.sort(key=itemgetter("C"))
    words = [f"{len(fitted)} runs are fitted, with their {loss.replace('_', ' ')}."]
    if not validated:
        words.append(
            "It is the loss of one batch, and noisy; `validation.interval` measures a better one."
        )
    law, more = _law(fitted)
    words += more
    frontiers = {}
    for name in ("N", "D"):
        found = fit_frontier(*([run[key] for run in fitted] for key in ("C", name, "loss")))
        if found is not None:
            frontiers[name] = found
            words += _frontier_in_words(name, found)
    others = [run for run in runs if run not in fitted]
    forecasts = []
    if law is not None and others:
        predicted = law.predict(_variables(others, law.law), noise=True)
        for run, each in zip(others, predicted, strict=True):
            made = {**run, "predicted": each.value, "low": each.low, "high": each.high}
            if run["loss"] is not None:
                made |= {"error": run["loss"] / each.value - 1, "inside": run["loss"] in each}
            forecasts.append(made)
            words.append(_forecast_in_words(made, each, fitted))
    return Fits(fitted, loss, law, frontiers, forecasts, words)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value > 0


def _run(row: Row, loss: str, counted: str) -> Row:
    """The columns of a run; FLOPs are those per token with full attention, as MFU counts them."""
    job = job_of(row)
    assert job is not None, "only skipped points have no job"
    is_done = row["state"] == "completed"
    if is_done and "tokens" not in row:
        raise UserError(
            f"{row['point']}: its row has no tokens; would work: rows of harness.launch.rows.load"
        )
    parameters = count(job.model, counted)
    tokens = row["tokens"] if is_done else job.sizes.tokens(job.steps)
    return {
        "point": row["point"],
        "N": parameters,
        "D": tokens,
        "ratio": tokens / parameters,
        "C": account(job.model, job.training.seq_len).flops_per_token_full * tokens,
        "loss": float(row[loss]) if is_done and _is_positive(row.get(loss)) else None,
    }


def _variables(runs: Sequence[Row], law: Law) -> list[list[float]]:
    return [[run[name] for name in law.variables] for run in runs]


def _require_comparable(rows: Sequence[Row]) -> None:
    done = [row for row in rows if row["state"] == "completed"]
    if not done:
        raise UserError(
            "no run has completed, so there is no loss to fit; would work: the same after a run"
        )
    names = [
        name for name, role, _ in leaves(Job()) if role == NUMERICS and name.startswith(SAME_DATA)
    ]
    for name, row in product(names, done):
        first, own = (each.get(f"job.{name}") for each in (done[0], row))
        if own != first:
            raise UserError(
                f"{name}: is {first} in {done[0]['point']} and {own} in {row['point']}, and losses on "
                "different data cannot be compared; would work: a folder with runs on the same data"
            )


def _law(runs: Sequence[Row]) -> tuple[Fit | None, list[str]]:
    ratios = [run["ratio"] for run in runs]
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
    variables = _variables(runs, law)
    different = len(set(map(tuple, variables)))
    if different < least:
        words.append(
            f"No fit: a {law.name} needs {least} different runs, and there are {different}."
        )
        return None, words
    made = fit(law, variables, [run["loss"] for run in runs])
    estimates = {name: made.estimate(name) for name in law.parameters}
    values = ", ".join(f"{name} = {in_words(each)}" for name, each in estimates.items())
    words.append(f"`{law.formula}`: {values}; residuals {made.rms:.2%} (root mean square).")
    unsure = [
        name
        for name, each in estimates.items()
        if not each.is_within(SURE_OF_COEFFICIENT if name in law.coefficients else SURE)
    ]
    if unsure:
        words.append(
            f"The data do not determine {', '.join(unsure)}: the {LEVEL:.0%} interval spans more than a "
            f"factor {SURE:g} (coefficients: {SURE_OF_COEFFICIENT:g}). More runs, or larger ones, narrow it."
        )
    if law is CHINCHILLA:
        *_, alpha, beta = made.replicates.T
        value = made.values["beta"] / (made.values["alpha"] + made.values["beta"])
        best = Interval.of(value, beta / (alpha + beta))
        words.append(
            f"The compute-optimal size grows as C^a, a = beta / (alpha + beta) = {in_words(best)}."
        )
    return made, words


def in_words(estimate: Interval, form: str = ".4g") -> str:
    """Format a value with its interval."""
    return f"{estimate.value:{form}} ({estimate.low:{form}} to {estimate.high:{form}})"


def _frontier_in_words(name: str, found: Frontier) -> list[str]:
    words = [
        f"IsoFLOP at {each.flops:.3g} FLOPs: no best {name}, because {each.reason}."
        for each in found.parabolas
        if each.best is None
    ]
    if found.exponent is None:
        return [
            *words,
            f"IsoFLOP: the growth of the best {name} is not determined: {found.reason}.",
        ]
    words.append(f"IsoFLOP: the best {name} grows as C^{in_words(found.exponent)}.")
    if not found.exponent.is_within(SURE):
        words.append(
            f"The data do not determine this exponent of {name}: its interval is too wide."
        )
    return words


def _forecast_in_words(run: Row, predicted: Interval, fitted: Sequence[Row]) -> str:
    words = (
        f"`{run['point']}` ({in_units(run['N'])} parameters, {run['C'] / fitted[-1]['C']:.2g} times the "
        f"largest fitted compute): predicted {in_words(predicted, '.4f')}"
    )
    if run["loss"] is None:
        return f"{words}; not measured yet."
    inside = "inside" if run["inside"] else "OUTSIDE"
    return f"{words}, measured {run['loss']:.4f} ({run['error']:+.2%}), {inside} the {LEVEL:.0%} interval."


def report_fits(title: str, made: Fits, counted: str, folder: Path) -> Document:
    """Report the fits with these ``counted`` parameters, and write their pictures into ``folder``."""
    blocks: list[Block] = []
    runs = made.runs
    law = made.law
    if law is not None:
        fitted = law.predict(_variables(runs, law.law))
        runs = [
            {**run, "fitted": each.value, "error": run["loss"] / each.value - 1}
            for run, each in zip(runs, fitted, strict=True)
        ]
        text = (
            f"`{law.law.formula}`, fitted to the logarithm of the loss. "
            f"Intervals: {LEVEL:.0%}, by bootstrap. N: parameters ({counted.replace('_', '-')}), "
            "D: tokens, C: FLOPs with full attention."
        )
        values = [{"name": name, **vars(law.estimate(name))} for name in law.law.parameters]
        picture = fit_plots.draw_law(
            folder / "fits_law.png", title, law, runs, made.forecasts, made.loss
        )
        blocks += [Table(_PARAMETERS, values, "Law", [text]), Figure(picture, "Law")]
    if made.forecasts:
        text = "The interval is that of one measured loss: uncertainty of the curve, and noise."
        blocks.append(Table(_FORECASTS, made.forecasts, "Predictions", [text]))
    if "N" in made.frontiers:
        picture = fit_plots.draw_isoflop(folder / "fits_isoflop.png", title, made.frontiers["N"])
        parabolas = Table(_PARABOLAS, _rows_of_budgets(made.frontiers), "IsoFLOP curves")
        blocks += [parabolas, Figure(picture, "IsoFLOP curves")]
    blocks.append(Table(_RUNS, runs, "Runs"))
    return Document(title, made.words, blocks, [*runs, *made.forecasts])


def _rows_of_budgets(frontiers: dict[str, Frontier]) -> list[Row]:
    """A row for each budget, with the best model size and the best number of tokens."""
    rows: dict[float, Row] = {}
    for name, found in frontiers.items():
        for each in found.parabolas:
            row = rows.setdefault(each.flops, {"C": each.flops, "sizes": len(each.losses)})
            row.setdefault("reason", each.reason)
            if each.best is not None:
                row[name] = in_words(each.best, ".3g")
                row.setdefault("loss", each.lowest)
    return list(rows.values())
