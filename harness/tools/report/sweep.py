"""The verb ``sweep``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from harness.compose.arguments import Argument
from harness.compose.verb import Result, Verb
from harness.launch.queue import cancel as cancel_jobs
from harness.launch.state import HELD, RunState, read_or_warn, read_states
from harness.launch.sweep.folder import Point, SweepFolder, points_in
from harness.launch.sweep.run import log_table, states_of
from harness.launch.sweep.run import resume as resume_points
from harness.launch.sweep.study import StudyRecord, best_in_words, counted, table_of_states
from harness.tools.report.verb import report
from harness.util.errors import EXIT_OK, UserError
from harness.util.tables import plural, to_text

HELP = """`harness sweep VERB FOLDER`: show, resume, tabulate or cancel a sweep, or single runs."""


def status(folder: Path, *, verify: bool = False) -> Result:
    """Show every point: state, step, speed, memory, reason of failure."""
    points = points_in(folder)
    seen, code = read_or_warn([point.run_dir for point in points], lambda _: states_of(points))
    skipped = SweepFolder(folder).skipped()
    study = StudyRecord.read(folder)
    objective = study.objective if study else None
    table = to_text(table_of_states(points, seen, objective)) + counted(seen, skipped)
    table += best_in_words(study, points) if study else ""
    data: dict[str, Any] = {
        "points": [_as_dict(point, each) for point, each in zip(points, seen, strict=True)],
        "skipped": [{"overrides": each.overrides, "reason": each.reason} for each in skipped],
    }
    if study is not None:
        best = study.best_of(points)
        data["study"] = {
            "objective": study.objective,
            "direction": study.direction,
            "best": None if best is None else best.overrides,
        }
    if not verify:
        return Result(data, table, code)
    sys.stdout.write(table)
    checkpoints, verified = _verify(seen)
    return Result(data | {"checkpoints": checkpoints}, code=verified or code)


def _as_dict(point: Point, each: RunState) -> dict[str, Any]:
    return {
        "run_dir": each.run_dir,
        "overrides": point.overrides,
        "state": each.state,
        "step": each.step,
        "steps": each.steps,
        "kind": each.kind,
        "reason": each.reason,
        **({"slow": [asdict(slow) for slow in each.slow]} if each.slow else {}),
        **(each.facts or {}),
    }


def _verify(seen: Sequence[RunState]) -> tuple[list[dict[str, Any]], int]:
    """Verify the newest checkpoint of each completed point."""
    from harness.checkpoint.verify import verify_all

    verdicts: list[dict[str, Any]] = []
    code = EXIT_OK
    for each in seen:
        if each.state == "completed":
            try:
                found, found_code = verify_all([str(each.run_dir)], newest=True)
            except UserError as error:  # the point was configured to save nothing
                sys.stdout.write(f"{error}\n")
                continue
            verdicts += map(asdict, found)
            code = max(code, found_code)
    return verdicts, code


def resume(folder: Path, *, out_of_memory: bool) -> int:
    """Start the points that are not complete."""
    study = StudyRecord.read(folder)
    if study is not None:
        works = shlex.join(["harness", "train", "-m", *study.command])
        raise UserError(f"{folder}: optuna chooses its points; would work: {works}")
    return resume_points(SweepFolder.open(folder), out_of_memory=out_of_memory)


def collect(folder: Path) -> Result:
    """Write what ``harness report`` writes, and log the table to W&B if the runs are there."""
    sweep = SweepFolder.open(folder)
    log_table(sweep, points := sweep.points(), states_of(points))
    return report(folder)


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
        sys.stdout.write(f"{here} run on this machine: ^C in their controller's terminal ends them\n")
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
    return Argument("folder", type=Path, help=f"folder of a sweep{also}, e.g. runs/llama3_8b-layouts_8")


VERB = Verb(
    "sweep",
    help=HELP,
    parts=(
        Verb(
            "status",
            status,
            help="Show every point: state, step, speed, memory, reason of failure.",
            arguments=(
                _folder(", or of a run"),
                Argument(
                    "--verify",
                    help="also compare the newest checkpoint of each completed point with its checksums",
                ),
            ),
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
            help="Write what `harness report` writes; log the table to W&B if the runs are there.",
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
