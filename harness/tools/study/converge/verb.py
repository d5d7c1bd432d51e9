"""``harness converge``: show that techniques train as well as a control.

The same job is trained under techniques (layouts, precisions, schedules, recomputation, compilation) and
without them, each with several seeds, as a sweep: the same command again starts the runs that are not
complete. Loss curves are compared in pairs of equal seed, and every technique gets a verdict.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.compose.verb import Result, Verb
from harness.launch.sweep.run import sweep
from harness.tools.study.converge.config import CONTROL, TWIN, ConvergeJob
from harness.tools.study.converge.curves import read_curves
from harness.tools.study.converge.judge import EQUAL, judge
from harness.tools.study.converge.points import Technique, compose_techniques
from harness.tools.study.converge.render import SHORT, SKIPPED, Compared, report_of
from harness.train.process import launched_ranks
from harness.util.errors import EXIT_OK, STOPPED, UserError
from harness.util.tables import Table, to_text

EXIT_DIFFERS = 1


def converge(job: ConvergeJob, overrides: list[str]) -> int | Result:
    """Run what is missing, compare the curves and write the report."""
    if launched_ranks() is not None:
        raise UserError("harness converge starts the ranks itself; start it without torchrun")
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
    """Read the curves of all techniques and compare them with those of the first, the control.

    Returns:
        The techniques in their order; empty if no run of the control has ended.

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


VERB = Verb("converge", converge, job=ConvergeJob, has_json=True)
