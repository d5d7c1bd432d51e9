"""The verb ``sweep``."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from harness.compose.arguments import Argument
from harness.compose.verb import Result, Verb
from harness.launch.queue import cancel as cancel_jobs
from harness.launch.state import HELD, read_states
from harness.launch.sweep.folder import SweepFolder, points_in
from harness.launch.sweep.run import resume as resume_points
from harness.launch.sweep.study import StudyRecord
from harness.tools.report.listing import list_runs
from harness.tools.report.verb import report
from harness.util.errors import EXIT_OK, UserError
from harness.util.words import plural

HELP = """`harness sweep VERB FOLDER`: show, resume, tabulate or cancel a sweep, or single runs."""


def resume(folder: Path, *, out_of_memory: bool) -> int:
    """Start the points that are not complete."""
    study = StudyRecord.read(folder)
    if study is not None:
        works = shlex.join(["harness", "train", "-m", *study.command])
        raise UserError(f"{folder}: optuna chooses its points; would work: {works}")
    return resume_points(SweepFolder.open(folder), out_of_memory=out_of_memory)


def collect(folder: Path) -> Result:
    """Write what ``harness report`` writes."""
    return report(SweepFolder.open(folder).path)


def cancel(folder: Path) -> int:
    """Cancel waiting and running SLURM jobs; their checkpoints are kept."""
    points = points_in(folder)
    seen = read_states([point.run_dir for point in points])
    busy = [each for each in seen if each.state in HELD]
    ids = []
    for each in busy:
        if each.job_record is not None and each.job_id is not None:
            replace(each.job_record, job_id=each.job_id, cancelled=True).write(each.run_dir)
            ids.append(each.job_id)
    cancel_jobs(ids)
    sys.stdout.write(f"cancelled {len(ids)} of {plural(len(points), 'point')}\n")
    here = sum(each.job_record is None for each in busy)
    if here:
        sys.stdout.write(
            f"{here} run on this machine: ^C in their controller's terminal ends them\n"
        )
    elsewhere = len(busy) - len(ids) - here
    if elsewhere:
        raise UserError(
            f"{plural(elsewhere, 'point')} submitted to SLURM, and there is no squeue here; would work: a "
            "login node of the cluster"
        )
    for each in seen:
        if each.is_damaged:
            raise UserError(each.reason)
    return EXIT_OK


def _folder(also: str = "") -> Argument:
    return Argument(
        "folder", type=Path, help=f"folder of a sweep{also}, e.g. runs/llama3_8b-layouts_8"
    )


VERB = Verb(
    "sweep",
    help=HELP,
    parts=(
        Verb(
            "status",
            list_runs,
            help="Show every point, as `harness runs FOLDER` does.",
            arguments=(_folder(", or of a run"),),
            has_json=True,
        ),
        Verb(
            "resume",
            resume,
            help="Start the points that are not complete.",
            arguments=(
                _folder(),
                Argument("--out-of-memory", help="also start points that ran out of memory"),
            ),
        ),
        Verb(
            "collect",
            collect,
            help="Write what `harness report` writes.",
            arguments=(_folder(),),
        ),
        Verb(
            "cancel",
            cancel,
            help="Cancel waiting and running SLURM jobs; their checkpoints are kept.",
            arguments=(_folder(", or of a run"),),
        ),
    ),
)
