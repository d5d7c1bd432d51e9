"""The verb ``sweep``."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

from harness.compose.arguments import Argument
from harness.compose.verb import Verb
from harness.launch.queue import cancel as cancel_jobs
from harness.launch.state import HELD, read_states
from harness.launch.sweep.folder import SweepFolder, points_in
from harness.launch.sweep.run import resume as resume_points
from harness.launch.sweep.study import StudyRecord
from harness.util.errors import EXIT_OK, UserError
from harness.util.words import plural

HELP = """`harness sweep resume|cancel FOLDER`: start the rest of a sweep, or cancel its jobs or a run's.

`harness runs FOLDER` lists its points, and `harness report FOLDER` compares them.
"""


def sweep(what: str, folder: Path, *, out_of_memory: bool) -> int:
    """Resume or cancel the points of a folder."""
    if what == "resume":
        return resume(folder, out_of_memory=out_of_memory)
    if what == "cancel" and not out_of_memory:
        return cancel(folder)
    works = f"resume, cancel, or harness runs {folder}, or harness report {folder}"
    typed = f"{what} --out-of-memory" if out_of_memory else what
    raise UserError(f"sweep {typed}: no such command; would work: {works}")


def resume(folder: Path, *, out_of_memory: bool) -> int:
    """Start the points that are not complete."""
    study = StudyRecord.read(folder)
    if study is not None:
        works = shlex.join(["harness", "train", "-m", *study.command])
        raise UserError(f"{folder}: optuna chooses its points; would work: {works}")
    return resume_points(SweepFolder.open(folder), out_of_memory=out_of_memory)


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


VERB = Verb(
    "sweep",
    sweep,
    help=HELP,
    arguments=(
        Argument(
            "what",
            metavar="resume|cancel",
            help="start the points that are not complete, or cancel waiting and running SLURM jobs, "
            "whose checkpoints are kept",
        ),
        Argument(
            "folder",
            type=Path,
            help="folder of a sweep, or to cancel also of a run, e.g. runs/llama3_8b-layouts_8",
        ),
        Argument("--out-of-memory", help="with resume: also start points that ran out of memory"),
    ),
)
