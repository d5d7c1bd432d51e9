"""The verb ``converge``."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np

from harness.compose.verb import Result, Verb
from harness.launch.sweep.run import sweep
from harness.metrics.jsonl import read_metrics
from harness.run.folder import METRICS, RunFolder
from harness.tools.study.judge import (
    EQUAL,
    FINAL,
    NORM,
    SPEED,
    Curves,
    Losses,
    TechniqueVerdict,
    final_losses,
    judge,
)
from harness.tools.study.techniques import (
    CONTROL,
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
SKIPPED = "skipped"
FAILED = "failed"
INCOMPLETE = "incomplete"

COLUMNS = (
    Column("technique", "technique"),
    Column("ranks", "ranks", "d"),
    Column("seeds", "seeds", "d"),
    Column("final_loss", "final loss", ".4f"),
    Column("final", "difference", "+z.2%"),
    Column("final_interval", "interval of difference"),
    Column("speed", "learning speed", "+z.2%"),
    Column("speed_interval", "interval of speed"),
    Column("norm", "gradient norm", "+z.2%"),
    Column("norm_interval", "interval of norm"),
    Column("verdict", "verdict"),
    Column("reason", "reason"),
)
_NARROW = ("technique", "final_loss", "final", "speed", "norm", "verdict", "reason")
SHORT = tuple(column for column in COLUMNS if column.key in _NARROW)
"""Columns of the table on the terminal."""
_TYPED = (Column("technique", "technique"), Column("overrides", "overrides"))
DIFFERENCES = "differences.png"
_PREFIXES = {FINAL: "final", SPEED: "speed", NORM: "norm"}
"""Beginning of the columns of each measure."""
_COLUMNS = 4
_WIDTH = 2.7
_HEIGHT = 1.5


def converge(job: ConvergeJob, overrides: list[str]) -> int | Result:
    """Run what is missing, compare the curves and write the report."""
    job.converge.validate(job)
    techniques = compose_techniques(job, overrides)
    code = sweep(list(chain.from_iterable(technique.runs.values() for technique in techniques)))
    if code in STOPPED or job.cluster.dry_run:
        return code
    compared = compare(techniques, job)
    if not compared:
        sys.stderr.write(
            "no run of the control has ended; the same command again compares the curves\n"
        )
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


@dataclass(frozen=True)
class Compared:
    """One technique with the curves of its completed runs, and its verdict if there is one."""

    technique: Technique
    curves: Curves | None = None
    """None if it is skipped."""
    missing: Mapping[int, str] = field(default_factory=dict)
    """The reason for each seed without a curve."""
    has_failed: bool = False
    """Whether any of these runs ended with an error."""
    verdict: TechniqueVerdict | None = None

    @property
    def word(self) -> str:
        """The verdict in one word; a technique with a run that failed has no other."""
        if self.technique.skipped:
            return SKIPPED
        if self.missing:
            return FAILED if self.has_failed else INCOMPLETE
        return CONTROL if self.verdict is None else self.verdict.word

    @property
    def reason(self) -> str:
        """The measure that decided, or why there is no verdict."""
        if self.technique.skipped:
            return self.technique.skipped
        if self.missing:
            runs = plural(len(self.technique.runs), "run")
            counts = Counter(self.missing.values())
            return "; ".join(f"{reason} ({count} of {runs})" for reason, count in counts.items())
        return "" if self.verdict is None else self.verdict.reason


def compare(techniques: Sequence[Technique], job: ConvergeJob) -> list[Compared]:
    """Compare the curves of all techniques with the control's, the first; empty if no run of it has ended.

    Raises:
        UserError: the control has failed with every seed that has ended.
    """
    control = read_curves(techniques[0])
    assert control.curves is not None, "a control is never skipped"
    if not control.curves.losses:
        if control.has_failed:
            raise UserError(f"the control failed: {next(iter(control.missing.values()))}")
        return []
    compared = [control]
    for technique in techniques[1:]:
        each = Compared(technique) if technique.skipped else read_curves(technique, control.curves)
        if each.curves is not None and each.curves.losses:
            each = replace(each, verdict=judge(control.curves, each.curves, job.converge))
        compared.append(each)
    return compared


def read_curves(technique: Technique, control: Curves | None = None) -> Compared:
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
        result = folder.row
        ended = result.get("exit_reason", "")
        if ended != "completed":
            message = " ".join(str(result.get("error.message", "")).split())
            words = [word for word in (result.get("error.kind", ended), message) if word]
            missing[seed] = ": ".join(words) or folder.state or "not started"
            has_failed |= ended == "failed"
            continue
        rows = [row for row in read_metrics(folder.path / METRICS) if "loss" in row]
        logged = [row["step"] for row in rows]
        if steps is None:
            steps = logged
        values = np.array([row["loss"] for row in rows], np.float64)
        if logged != steps:
            missing[seed] = "metrics.jsonl does not have the steps of the control"
        elif not np.isfinite(values).all():
            missing[seed] = "a loss is not finite"
            has_failed = True
        elif control is not None and seed not in control.losses:
            missing[seed] = "the control has no curve of this seed"
        else:
            losses[seed] = values
            sizes = np.array([row["grad_norm"] for row in rows], np.float64)
            if np.isfinite(sizes).all() and sizes.all():  # a skipped step may have no finite norm
                norms[seed] = sizes
    curves = Curves(np.array(steps or [], np.int64), losses, not technique.differs_in, norms)
    return Compared(technique, curves, missing, has_failed)


def rows_of(compared: Sequence[Compared], config: ConvergeConfig) -> list[Row]:
    """Return a row for every technique; the first is the control."""
    rows = []
    for each in compared:
        technique = each.technique
        row: Row = {
            "technique": technique.name,
            "verdict": each.word,
            "reason": each.reason,
            "overrides": technique.overrides,
        }
        if each.curves is not None:
            finals = list(final_losses(each.curves, config.smooth_steps).values())
            row["ranks"] = technique.job.world_size
            row["seeds"] = len(finals)
            row["final_loss"] = statistics.fmean(finals) if finals else None
        if each.verdict is not None:
            row |= _measures(each.verdict)
        rows.append(row)
    return rows


def _measures(verdict: TechniqueVerdict) -> Row:
    row: Row = {}
    for measure, estimate in verdict.estimates.items():
        name = _PREFIXES[measure]
        row |= {name: estimate.mean, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        if len(estimate.values) > 1:
            row[f"{name}_interval"] = f"{estimate.low:+z.2%} to {estimate.high:+z.2%}"
        row[f"{name}_of_seeds"] = " ".join(f"{value:.6g}" for value in estimate.values)
    return row


def report_of(
    title: str, compared: Sequence[Compared], config: ConvergeConfig, folder: Path, command: str
) -> Document:
    """Report on the techniques, the control first, and write the pictures into ``folder``."""
    rows = rows_of(compared, config)
    control = compared[0].curves
    assert control is not None, "a control is never skipped"
    judged = [each for each in compared if each.verdict is not None]
    blocks: list[Block] = [Table(COLUMNS, rows, "Verdicts", _method(config))]
    if judged:
        draw_differences(folder / DIFFERENCES, control, judged, config)
        text = "Mean and range of the seeds, each paired with the control of its seed. The grey band is the "
        text += "bound of the final loss. The losses themselves: `harness report` of the folder of the runs."
        blocks += ["## Paired differences", text, Figure(DIFFERENCES, "Paired differences")]
    blocks.append(Table(_TYPED, rows, "Techniques", [f"`{command}`", *_provenance(compared[0])]))
    return Document(title, summary_of(compared, config), blocks, rows)


def summary_of(compared: Sequence[Compared], config: ConvergeConfig) -> list[str]:
    """Return the number of techniques by verdict, and the techniques that are not equal."""
    counts = Counter(each.word for each in compared[1:])
    counted = ", ".join(f"{count} {word}" for word, count in counts.items())
    seeds = f"seed{'s' if len(config.seeds) > 1 else ''} {', '.join(map(str, config.seeds))}"
    lines = [f"Against the control, {seeds}: {counted}."]
    named: dict[tuple[str, str], list[str]] = {}
    for each in compared:
        if each.word not in (CONTROL, EQUAL, SKIPPED):
            named.setdefault((each.word, each.reason), []).append(each.technique.name)
    for (word, reason), names in named.items():
        lines.append(f"{', '.join(names)}: {word} ({reason}).")
    return lines


def _method(config: ConvergeConfig) -> list[str]:
    return [
        "A technique and the control are paired by seed, which determines initial values and data order. "
        "Every measure is one value per seed, with one interval over seeds by Student's t, which assumes "
        f"normally distributed values ({100 * (1 - 2 * config.level):g}%, for each technique by itself):",
        f"- difference: final loss (mean of the last {config.smooth_steps} steps) over the control's;\n"
        "- learning speed: how far the curve runs ahead of the control's, as a share of the steps (least "
        "squares over all steps, weighted by 1 / step);\n"
        "- gradient norm: over the control's, mean of all steps, weighted by 1 / step; for "
        "techniques that claim the control's numerics.",
        "Equal: the intervals of all measures are within their bounds: "
        f"{config.final_bound:.1%} of the final loss, {config.speed_bound:.1%} of the learning speed, "
        f"{config.norm_bound:.1%} of the gradient norm. Worse, better: an interval is beyond its bound as a "
        "whole. Different: the same, where the technique claims the control's numerics. Otherwise undecided: "
        "needs more seeds.",
    ]


def _provenance(control: Compared) -> list[str]:
    row = RunFolder(control.technique.job.run_dir).row
    facts = [str(row[key]) for key in ("device", "host.system") if row.get(key)]
    for package in ("torch", "torchao"):
        version = row.get(f"code.versions.{package}")
        if version:
            facts.append(f"{package} {version}")
    return [f"Ran on {', '.join(facts)}."] if row else []


def draw_differences(
    path: Path, control: Curves, judged: Sequence[Compared], config: ConvergeConfig
) -> None:
    """Plot the relative difference from the control, paired by seed: mean and range of seeds."""
    lines = ceil(len(judged) / _COLUMNS)
    figure = new_figure(_COLUMNS * _WIDTH, lines * _HEIGHT + 0.4)
    panels = figure.subplots(lines, _COLUMNS, sharex=True, sharey=True, squeeze=False)
    bound = 100 * config.final_bound
    for axis, each in zip(panels.flat, judged, strict=False):
        assert each.curves is not None
        percent = [
            100 * (own / control.losses[seed] - 1) for seed, own in each.curves.losses.items()
        ]
        smooth = [smoothed(curve.tolist(), config.smooth_steps) for curve in percent]
        color = COLORS["predicted"] if each.word == EQUAL else COLORS["measured"]
        axis.axhspan(-bound, bound, color="#eeeeee", linewidth=0)
        low = np.min(smooth, axis=0)
        high = np.max(smooth, axis=0)
        axis.fill_between(control.steps, low, high, color=color, alpha=0.3, linewidth=0)
        axis.plot(control.steps, np.mean(smooth, axis=0), color=color, linewidth=1)
        axis.axhline(0, color="black", linewidth=0.5)
        axis.set_title(f"{each.technique.name}: {each.word}", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.spines[["top", "right"]].set_visible(False)
    for axis in panels.flat[len(judged) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("difference from the control, %", fontsize=8)
    save(figure, path)


VERB = Verb("converge", converge, help=HELP, job=ConvergeJob, has_json=True, is_alone=True)
