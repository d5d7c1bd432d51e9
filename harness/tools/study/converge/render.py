"""The report of a comparison: verdicts, statistics, pictures, and runs without a curve."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.run.folder import RunFolder
from harness.tools.study.converge.config import CONTROL, ConvergeConfig
from harness.tools.study.converge.curves import Found
from harness.tools.study.converge.judge import EQUAL, Verdict, final_losses
from harness.tools.study.converge.pictures import CURVES, DIFFERENCES, draw_curves, draw_differences
from harness.tools.study.converge.points import Technique
from harness.util.tables import Block, Column, Document, Figure, Table

Row = dict[str, Any]
SKIPPED, FAILED, INCOMPLETE = "skipped", "failed", "incomplete"

COLUMNS = (
    Column("technique", "technique"),
    Column("ranks", "ranks", "d"),
    Column("seeds", "seeds", "d"),
    Column("final_loss", "final loss", ".4f"),
    Column("final", "difference", "+z.2%"),
    Column("final_interval", "interval of difference"),
    Column("final_over_spread", "over spread of seeds", "+z.2f"),
    Column("speed", "learning speed", "+z.2%"),
    Column("speed_interval", "interval of speed"),
    Column("departure", "departure over twin's", ".2g"),
    Column("p", "p (Holm)", ".2g"),
    Column("verdict", "verdict"),
    Column("reason", "reason"),
)
_NARROW = ("technique", "final_loss", "final", "speed", "departure", "p", "verdict", "reason")
SHORT = tuple(each for each in COLUMNS if each.key in _NARROW)
"""Columns of the table on the terminal."""
_TYPED = (Column("technique", "technique"), Column("overrides", "overrides"))


@dataclass(frozen=True)
class Compared:
    """One technique with its curves and its verdict, as far as there are any."""

    technique: Technique
    found: Found | None = None
    verdict: Verdict | None = None

    @property
    def word(self) -> str:
        """The verdict in one word; a technique with a run that failed has no other."""
        if self.found is None:
            return SKIPPED
        if self.found.missing:
            return FAILED if self.found.has_failed else INCOMPLETE
        return self.verdict.word if self.verdict is not None else CONTROL

    @property
    def reason(self) -> str:
        """The statistic that decided, or why there is no verdict."""
        if self.found is None:
            return self.technique.skipped
        if self.found.missing:
            reasons = Counter(self.found.missing.values())
            return "; ".join(
                f"{reason} ({count} of {len(self.technique.runs)} runs)" for reason, count in reasons.items()
            )
        return self.verdict.reason if self.verdict is not None else ""


def rows_of(compared: Sequence[Compared], config: ConvergeConfig) -> list[Row]:
    """Return a row for every technique; the first is the control, whose seeds give the spread."""
    spread = math.nan
    rows = []
    for each in compared:
        technique, verdict = each.technique, each.verdict
        row: Row = {"technique": technique.name, "verdict": each.word, "reason": each.reason}
        row["overrides"] = technique.overrides
        if each.found is not None:
            finals = list(final_losses(each.found.curves, config.smooth_steps).values())
            row |= {"ranks": technique.job.world_size, "seeds": len(finals)}
            row["final_loss"] = statistics.fmean(finals) if finals else None
            if each is compared[0] and len(finals) > 1:
                spread = statistics.stdev(finals) / statistics.fmean(finals)
        if verdict is not None:
            row |= _statistics(verdict, spread)
        rows.append(row)
    return rows


def _statistics(verdict: Verdict, spread: float) -> Row:
    row: Row = {"p": verdict.p}
    for name, estimate in (("final", verdict.final), ("speed", verdict.speed)):
        row |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        if math.isfinite(estimate.low):
            row[f"{name}_interval"] = f"{estimate.low:+z.2%} to {estimate.high:+z.2%}"
        row[f"{name}_of_seeds"] = " ".join(f"{value:.6g}" for value in estimate.values)
    row["final_over_spread"] = verdict.final.mean / spread if spread > 0 else None
    if verdict.departure is not None:
        row["departure"] = _power_of_ten(verdict.departure.mean)
        row["departure_low"] = _power_of_ten(verdict.departure.low)
        row["departure_high"] = _power_of_ten(verdict.departure.high)
    return row


def _power_of_ten(exponent: float) -> float:
    return 10.0**exponent if exponent < sys.float_info.max_10_exp else math.inf


def report_of(
    title: str, compared: Sequence[Compared], config: ConvergeConfig, folder: Path, command: str
) -> Document:
    """Create the report, and write its pictures.

    Args:
        title: title of the report.
        compared: the control first, then its twin and the techniques.
        config: options of the comparison.
        folder: folder for the pictures.
        command: the command line that repeats the comparison.
    """
    rows = rows_of(compared, config)
    judged = {each.technique.name: each for each in compared if each.verdict is not None}
    control = compared[0].found
    assert control is not None, "a control is never skipped"
    blocks: list[Block] = [Table(COLUMNS, rows, "Verdicts", _method(config))]
    if judged:
        curves = {name: each.found.curves for name, each in judged.items() if each.found is not None}
        words = {name: each.word for name, each in judged.items()}
        draw_curves(folder / CURVES, control.curves, curves, config)
        draw_differences(folder / DIFFERENCES, control.curves, curves, words, config)
        text = (
            "Mean and range of the seeds, each paired with the control of its seed. The grey band is the "
            "bound of the final loss."
        )
        blocks += ["## Curves", Figure(CURVES, "Curves")]
        blocks += ["## Paired differences", text, Figure(DIFFERENCES, "Paired differences")]
    blocks.append(Table(_TYPED, rows, "Techniques", [f"`{command}`", *_provenance(compared[0])]))
    return Document(title, summary_of(compared, config), blocks, rows)


def summary_of(compared: Sequence[Compared], config: ConvergeConfig) -> list[str]:
    """Return the number of techniques by verdict, and the techniques that are not equal."""
    counts = Counter(each.word for each in compared[1:])
    seeds = f"seed{'s' if len(config.seeds) > 1 else ''} {', '.join(map(str, config.seeds))}"
    counted = ", ".join(f"{count} {word}" for word, count in counts.items())
    lines = [f"Against the control, {seeds}: {counted}."]
    named: dict[tuple[str, str], list[str]] = {}
    for each in compared:
        if each.word not in (CONTROL, EQUAL, SKIPPED):
            named.setdefault((each.word, each.reason), []).append(each.technique.name)
    lines += [f"{', '.join(names)}: {word} ({reason})." for (word, reason), names in named.items()]
    return lines


def _method(config: ConvergeConfig) -> list[str]:
    level = f"{100 * config.level:g}%"
    return [
        "A technique and the control are paired by seed, which determines initial values and data order. "
        "Every statistic is one value per seed, tested over seeds by Student's t with one degree of freedom "
        "less than seeds, which assumes normally distributed values:",
        f"- difference: final loss (mean of the last {config.smooth_steps} steps) relative to the control's, "
        "also in units of the standard deviation of the control's final loss over seeds;\n"
        "- learning speed: how far the curve runs ahead of the control's, as a share of the steps (least "
        "squares over all steps, weighted by 1 / step);\n"
        "- departure: size of the differences of losses or gradient norms, whichever is larger, over that of "
        "the twin, which computes the control's numbers in another order; for techniques that claim the "
        "control's numerics.",
        "Worse, better: the hypothesis that the mean difference, or learning speed, is 0 is rejected at "
        f"{level}, by Holm for all tests of the table, and the estimate exceeds its bound: "
        f"{config.final_bound:.1%} of the final loss, {config.speed_bound:.1%} of the learning speed. "
        "Different: the same for the hypothesis that the geometric mean of the departure is at most "
        f"{config.rounding_factor:g} times the twin's. "
        f"Equal: the {100 * (1 - 2 * config.level):g}% intervals of all statistics are within the bounds "
        f"(two one-sided tests at {level}, for each technique by itself). Otherwise undecided: needs more "
        "seeds.",
    ]


def _provenance(control: Compared) -> list[str]:
    """Return the hardware and the versions of the control's runs."""
    row = RunFolder(next(iter(control.technique.runs.values())).job.run_dir).row
    versions = [
        f"{name} {row[key]}" for name in ("torch", "torchao") if row.get(key := f"code.versions.{name}")
    ]
    facts = [str(row[key]) for key in ("device", "host.system") if row.get(key)]
    return [f"Ran on {', '.join([*facts, *versions])}."] if row else []
