"""The verb ``converge``."""

from __future__ import annotations

import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from harness.compose.verb import Result, Verb
from harness.launch.sweep.run import sweep
from harness.metrics.jsonl import read_metrics
from harness.run.folder import RunFolder
from harness.tools.study.judge import EQUAL, Curves, Losses, TechniqueVerdict, final_losses, judge
from harness.tools.study.techniques import (
    CONTROL,
    TWIN,
    ConvergeConfig,
    ConvergeJob,
    Technique,
    compose_techniques,
)
from harness.util.document import Block, Document, Figure
from harness.util.errors import EXIT_OK, STOPPED, UserError
from harness.util.plots import COLORS, new_figure, save, smoothed
from harness.util.tables import Column, Table, to_text
from harness.util.words import plural

HELP = """`harness converge`: show that techniques train as well as a control.

The same job is trained under techniques (layouts, precisions, schedules, recomputation, compilation) and
without them, each with several seeds, as a sweep: the same command again starts the runs that are not
complete. Loss curves are compared in pairs of equal seed, and every technique gets a verdict.
"""

EXIT_DIFFERS = 1
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
CURVES, DIFFERENCES = "curves.png", "differences.png"
_COLUMNS, _WIDTH, _HEIGHT = 4, 2.7, 1.5
_STYLES = ("-", "--", ":", "-.")
"""Styles of lines; each has ten colours."""


def converge(job: ConvergeJob, overrides: list[str]) -> int | Result:
    """Run what is missing, compare the curves and write the report."""
    job.converge.validate(job)
    techniques = compose_techniques(job, overrides)
    code = sweep([run for technique in techniques for run in technique.runs.values()])
    if code in STOPPED or job.cluster.dry_run:
        return code
    compared = compare(techniques, job)
    if not compared:
        sys.stderr.write("no run of the control has ended; the same command again compares the curves\n")
        return Result({"rows": [], "summary": [], "report": None}, code=code)
    out = Path(job.converge.out or Path(job.runs_dir) / job.name / "converge")
    command = shlex.join(["harness", "converge", *overrides])
    made = report_of(job.name, compared, job.converge, out, command)
    files = made.write(out, "tables.md", "table.csv", "index.html")
    lines = "".join(f"{line}\n" for line in (*made.summary, files[0]))
    words = {each.word for each in compared} - {SKIPPED}
    return Result(
        {"rows": made.rows, "summary": made.summary, "report": files[0]},
        to_text(Table(SHORT, made.rows)) + lines,
        code=EXIT_OK if words == {CONTROL, EQUAL} else EXIT_DIFFERS,
    )


def compare(techniques: Sequence[Technique], job: ConvergeJob) -> list[Compared]:
    """Compare the curves of all techniques with the control's, the first; empty if no run of it has ended.

    Raises:
        UserError: the control has failed with every seed that has ended.
    """
    control = read_curves(techniques[0])
    if not control.curves.losses:
        if control.has_failed:
            raise UserError(f"the control failed: {next(iter(control.missing.values()))}")
        return []
    found = {each.name: read_curves(each, control.curves) for each in techniques[1:] if not each.skipped}
    curves = {name: each.curves for name, each in found.items() if each.curves.losses}
    twin = found[TWIN].curves if TWIN in found else None
    verdicts = judge(control.curves, twin, curves, job.converge)
    return [
        Compared(techniques[0], control),
        *(Compared(each, found.get(each.name), verdicts.get(each.name)) for each in techniques[1:]),
    ]


@dataclass(frozen=True)
class Found:
    """Curves of a technique's completed runs."""

    curves: Curves
    missing: dict[int, str]
    """The reason for each seed without a curve."""
    has_failed: bool
    """Whether any of these runs ended with an error."""


def read_curves(technique: Technique, control: Curves | None = None) -> Found:
    """Read the curves of a technique; those of other steps and seeds than the control's count as missing.

    None reads the control itself, whose curves must have the steps of the first.
    """
    steps = None if control is None else control.steps.tolist()
    losses: dict[int, Losses] = {}
    norms: dict[int, Losses] = {}
    missing: dict[int, str] = {}
    has_failed = False
    for seed, run in technique.runs.items():
        folder = RunFolder(run.job.run_dir)
        row = folder.row
        if row.get("exit_reason") != "completed":
            message = " ".join(str(row.get("error.message", "")).split())
            reason = ": ".join(filter(None, (row.get("error.kind", row.get("exit_reason", "")), message)))
            missing[seed] = reason or folder.state or "not started"
            has_failed |= row.get("exit_reason") == "failed"
            continue
        rows = [each for each in read_metrics(folder.path / "metrics.jsonl") if "loss" in each]
        values = np.array([each["loss"] for each in rows], np.float64)
        steps = [each["step"] for each in rows] if steps is None else steps
        if [each["step"] for each in rows] != steps:
            missing[seed] = "metrics.jsonl does not have the steps of the control"
        elif not np.isfinite(values).all():
            missing[seed], has_failed = "a loss is not finite", True
        elif control is not None and seed not in control.losses:
            missing[seed] = "the control has no curve of this seed"
        else:
            losses[seed] = values
            own = np.array([each["grad_norm"] for each in rows], np.float64)
            if np.isfinite(own).all() and own.all():  # a skipped step may have no finite norm
                norms[seed] = own
    same = not technique.differs_in
    return Found(Curves(np.array(steps or [], np.int64), losses, same, norms), missing, has_failed)


@dataclass(frozen=True)
class Compared:
    """One technique with its curves and its verdict, as far as there are any."""

    technique: Technique
    found: Found | None = None
    verdict: TechniqueVerdict | None = None

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
            reasons, all_runs = Counter(self.found.missing.values()), len(self.technique.runs)
            return "; ".join(
                f"{reason} ({count} of {plural(all_runs, 'run')})" for reason, count in reasons.items()
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


def _statistics(verdict: TechniqueVerdict, spread: float) -> Row:
    def power_of_ten(exponent: float) -> float:
        return 10.0**exponent if exponent < sys.float_info.max_10_exp else math.inf

    row: Row = {"p": verdict.p}
    for name, estimate in (("final", verdict.final), ("speed", verdict.speed)):
        row |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        if math.isfinite(estimate.low):
            row[f"{name}_interval"] = f"{estimate.low:+z.2%} to {estimate.high:+z.2%}"
        row[f"{name}_of_seeds"] = " ".join(f"{value:.6g}" for value in estimate.values)
    row["final_over_spread"] = verdict.final.mean / spread if spread > 0 else None
    if (departure := verdict.departure) is not None:
        for end, exponent in (("", departure.mean), ("_low", departure.low), ("_high", departure.high)):
            row[f"departure{end}"] = power_of_ten(exponent)
    return row


def report_of(
    title: str, compared: Sequence[Compared], config: ConvergeConfig, folder: Path, command: str
) -> Document:
    """Report on the techniques, the control first, and write the pictures into ``folder``."""
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
        text = "Mean and range of the seeds, each paired with the control of its seed. The grey band is the "
        text += "bound of the final loss."
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
        "Different: better, where the technique claims the control's numerics; or the same for the "
        "hypothesis that the geometric mean of the departure is at most "
        f"{config.rounding_factor:g} times the twin's. "
        f"Equal: the {100 * (1 - 2 * config.level):g}% intervals of all statistics are within the bounds "
        f"(two one-sided tests at {level}, for each technique by itself). Otherwise undecided: needs more "
        "seeds.",
    ]


def _provenance(control: Compared) -> list[str]:
    row = RunFolder(next(iter(control.technique.runs.values())).job.run_dir).row
    versions = [
        f"{name} {row[key]}" for name in ("torch", "torchao") if row.get(key := f"code.versions.{name}")
    ]
    facts = [str(row[key]) for key in ("device", "host.system") if row.get(key)]
    return [f"Ran on {', '.join([*facts, *versions])}."] if row else []


def draw_curves(
    path: Path, control: Curves, techniques: Mapping[str, Curves], config: ConvergeConfig
) -> None:
    """Plot each technique's mean curve over the control's, whose band is the range of its seeds."""
    figure = new_figure(9, 5)
    axis = figure.subplots()
    band = [smoothed(each.tolist(), config.smooth_steps) for each in control.losses.values()]
    low, high = np.min(band, axis=0), np.max(band, axis=0)
    axis.fill_between(control.steps, low, high, color="#dddddd", label="control, range of seeds")
    for number, (name, curves) in enumerate(techniques.items()):
        mean = np.mean(
            [smoothed(each.tolist(), config.smooth_steps) for each in curves.losses.values()], axis=0
        )
        style = _STYLES[number // 10 % len(_STYLES)]
        axis.plot(control.steps, mean, linewidth=0.8, linestyle=style, label=name)
    mean = np.mean(band, axis=0)
    axis.plot(control.steps, mean, color="black", linewidth=1.2, linestyle="--", label="control")
    axis.set(xlabel="step", ylabel=f"loss, nats per token, mean of {config.smooth_steps} steps", yscale="log")
    axis.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    axis.yaxis.set_minor_formatter(lambda value, _: f"{value:.3g}")
    axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right center", frameon=False, fontsize=7)
    save(figure, path)


def draw_differences(
    path: Path,
    control: Curves,
    techniques: Mapping[str, Curves],
    words: Mapping[str, str],
    config: ConvergeConfig,
) -> None:
    """Plot the relative difference from the control, paired by seed: mean and range of seeds."""
    rows = ceil(len(techniques) / _COLUMNS)
    figure = new_figure(_COLUMNS * _WIDTH, rows * _HEIGHT + 0.4)
    panels = figure.subplots(rows, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    for axis, (name, curves) in zip(panels.flat, techniques.items(), strict=False):
        apart = [
            smoothed((100 * (losses / control.losses[seed] - 1)).tolist(), config.smooth_steps)
            for seed, losses in curves.losses.items()
        ]
        word = words[name]
        color = COLORS["predicted"] if word == EQUAL else COLORS["measured"]
        axis.axhspan(-100 * config.final_bound, 100 * config.final_bound, color="#eeeeee", linewidth=0)
        axis.fill_between(
            control.steps, np.min(apart, axis=0), np.max(apart, axis=0), color=color, alpha=0.3, linewidth=0
        )
        axis.plot(control.steps, np.mean(apart, axis=0), color=color, linewidth=1)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(f"{name}: {word}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in panels.flat[len(techniques) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("difference from the control, %", fontsize=8)
    save(figure, path)


VERB = Verb("converge", converge, help=HELP, job=ConvergeJob, has_json=True, is_alone=True)
