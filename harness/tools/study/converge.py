"""The verb ``converge``."""

import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from harness.compose.verb import Result, Verb
from harness.launch.sweep.run import sweep
from harness.metrics.jsonl import read_metrics
from harness.run.folder import METRICS, RunFolder
from harness.tools.study.judge import EQUAL, Curves, differences, final_losses, judge
from harness.tools.study.techniques import (
    CONTROL,
    ConvergeConfig,
    ConvergeJob,
    Technique,
    compose_techniques,
)
from harness.util.document import Document
from harness.util.errors import EXIT_OK, STOPPED, UserError
from harness.util.tables import Table, columns_of, to_text
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

COLUMNS = columns_of("""
    technique                  technique
    ranks                      ranks                   d
    seeds                      seeds                   d
    final loss                 final loss              .4f
    final loss difference      difference              +z.2%
    final loss interval        interval of difference
    learning speed difference  learning speed          +z.2%
    learning speed interval    interval of speed
    gradient norm difference   gradient norm           +z.2%
    gradient norm interval     interval of norm
    verdict                    verdict
    reason                     reason
    overrides                  overrides
""")
SHORT = tuple(each for each in COLUMNS if not each.key.endswith(("interval", "overrides")))
"""Columns of the table on the terminal."""


def converge(job: ConvergeJob, overrides: list[str]) -> int | Result:
    """Run what is missing, compare the curves and write the report."""
    config = job.converge
    config.validate(job)
    techniques = compose_techniques(job, overrides)
    code = sweep(list(chain.from_iterable(technique.runs.values() for technique in techniques)))
    if code in STOPPED or job.cluster.dry_run:
        return code
    control, failed = read_curves(techniques[0])
    if not control.losses:
        if failed["verdict"] == FAILED:
            raise UserError(f"the control failed: {failed['reason']}")
        sys.stderr.write(
            "no run of the control has ended; the same command again compares the curves\n"
        )
        return Result({"rows": [], "summary": [], "report": None}, code=code)
    rows = [compare(technique, control, config) for technique in techniques]
    out = Path(config.out or Path(job.runs_dir) / job.name / "converge")
    command = shlex.join(["harness", "converge", *overrides])
    table = Table(COLUMNS, rows, "Verdicts", [*_method(config), f"`{command}`"])
    made = Document(job.name, summary_of(rows, config.seeds), [table], rows)
    files = made.write(out, "tables.md", "table.csv", "index.html")
    lines = "".join(f"{line}\n" for line in (*made.summary, files[0]))
    words = {row["verdict"] for row in rows} - {SKIPPED}
    return Result(
        {"rows": rows, "summary": made.summary, "report": files[0]},
        to_text(Table(SHORT, rows)) + lines,
        code=EXIT_OK if words == {CONTROL, EQUAL} else EXIT_DIFFERS,
    )


def read_curves(technique: Technique, control: Curves | None = None) -> tuple[Curves, Row]:
    """Read the curves of a technique, and why some are missing: columns ``verdict`` and ``reason``.

    Curves of other steps and seeds than the control's count as missing. None reads the control
    itself, whose curves must have the steps of the first.
    """
    steps = None if control is None else control.steps.tolist()
    found = Curves(np.array([], np.int64))
    missing: list[str] = []
    verdict = INCOMPLETE
    for seed, run in technique.runs.items():
        folder = RunFolder(run.job.run_dir)
        result = folder.row
        ended = result.get("exit_reason", "")
        if ended != "completed":
            message = " ".join(str(result.get("error.message", "")).split())
            words = [word for word in (result.get("error.kind", ended), message) if word]
            missing.append(": ".join(words) or folder.state or "not started")
            verdict = FAILED if ended == "failed" else verdict
            continue
        rows = [row for row in read_metrics(folder.path / METRICS) if "loss" in row]
        logged = [row["step"] for row in rows]
        steps = steps or logged
        losses = np.array([row["loss"] for row in rows], np.float64)
        norms = np.array([row["grad_norm"] for row in rows], np.float64)
        if logged != steps:
            missing.append("metrics.jsonl does not have the steps of the control")
        elif not np.isfinite(losses).all():
            missing.append("a loss is not finite")
            verdict = FAILED
        elif control is not None and seed not in control.losses:
            missing.append("the control has no curve of this seed")
        else:
            found.losses[seed] = losses
            # A skipped step may have no finite norm.
            if technique.has_same_numerics and np.isfinite(norms).all() and norms.all():
                found.norms[seed] = norms
    found = Curves(np.array(steps or [], np.int64), found.losses, found.norms)
    if not missing:
        return found, {}
    counts = Counter(missing)
    runs = plural(len(technique.runs), "run")
    reason = "; ".join(f"{reason} ({count} of {runs})" for reason, count in counts.items())
    return found, {"verdict": verdict, "reason": reason}


def compare(technique: Technique, control: Curves, config: ConvergeConfig) -> Row:
    """Return the row of a technique with its verdict."""
    row: Row = {"technique": technique.name, "overrides": technique.overrides}
    if technique.skipped:
        return row | {"verdict": SKIPPED, "reason": technique.skipped}
    is_control = technique.name == CONTROL
    curves, missing = read_curves(technique, None if is_control else control)
    finals = final_losses(curves, config.smooth_steps).values()
    row |= {
        "ranks": next(iter(technique.runs.values())).job.world_size,
        "seeds": len(finals),
        "final loss": statistics.fmean(finals) if finals else None,
        "verdict": CONTROL,
        "reason": "",
    }
    if curves.losses and not is_control:
        estimates = differences(control, curves, config)
        for name, each in estimates.items():
            row[f"{name} difference"] = each.mean
            interval = f"{each.low:+z.2%} to {each.high:+z.2%}"
            row[f"{name} interval"] = interval if len(each.values) > 1 else None
            row[f"{name} of seeds"] = " ".join(f"{value:.6g}" for value in each.values)
        row["verdict"], row["reason"] = judge(
            estimates, config.bound, has_same_numerics=technique.has_same_numerics
        )
    # A technique with a run that failed or is missing has no other verdict.
    return row | missing


def summary_of(rows: Sequence[Row], seeds: Sequence[int]) -> list[str]:
    """Return the number of techniques by verdict, and the techniques that are not equal."""
    counts = Counter(row["verdict"] for row in rows[1:])
    counted = ", ".join(f"{count} {word}" for word, count in counts.items())
    lines = [f"Against the control, seeds {', '.join(map(str, seeds))}: {counted}."]
    named: dict[str, list[str]] = {}
    for row in rows:
        if row["verdict"] not in (CONTROL, EQUAL, SKIPPED):
            named.setdefault(f"{row['verdict']} ({row['reason']})", []).append(row["technique"])
    return lines + [f"{', '.join(names)}: {words}." for words, names in named.items()]


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
        f"Equal: the intervals of all measures are within the bound of {config.bound:.1%}. Worse, better: an "
        "interval is beyond it as a whole. Different: the same, where the technique claims the control's "
        "numerics. Otherwise undecided: needs more seeds.",
    ]


VERB = Verb("converge", converge, help=HELP, job=ConvergeJob, has_json=True, is_alone=True)
