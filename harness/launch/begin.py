"""Begin an attempt in a run folder: lock it, move an earlier attempt aside, describe the job."""

from __future__ import annotations

import shutil
from pathlib import Path

from harness.checkpoint.catalog import CheckpointFolder
from harness.checkpoint.resume import CONTINUES, can_resume
from harness.config.job import Job
from harness.run.folder import EVALUATIONS, METRICS, RunFolder, RunStatus
from harness.run.result import write_json_atomically
from harness.util.errors import UserError

DESCRIPTION = ("job.json", "overrides.txt", "code.json", CONTINUES, "slurm")
PER_ATTEMPT = (
    *("result.json", "status.json", "errors", "logs", "evidence", "flight_recorder", "profile", "phases"),
    "slow_ranks.json",
)
# An attempt that resumes appends to these.
PER_CURVE = (METRICS, EVALUATIONS, "metrics", "tensorboard")


def begin(
    folder: RunFolder, job: Job, overrides: list[str], *, adopt: bool = False, state: str = "starting"
) -> None:
    """Prepare the folder for an attempt, and lock it.

    Files of an earlier attempt move to ``attempts/<n>``. The metrics stay if there is a checkpoint to
    resume from.

    Args:
        folder: the run folder.
        job: the resolved job.
        overrides: the overrides on the command line.
        adopt: whether to resume from stopped runs of the same experiment on other layouts, if their
            checkpoints are newer.
        state: the new state in ``status.json``.

    Raises:
        UserError: the same job is running in the folder, or the folder cannot be written.
    """
    with folder.locked(job):
        others = _unfinished_siblings(job) if adopt else []
        _archive_earlier_attempt(folder, job, (*DESCRIPTION, *PER_ATTEMPT))
        folder.describe(job, overrides)
        if others:
            write_json_atomically(folder.path / CONTINUES, {"folders": others})
        folder.set_status(state)


def begin_again(folder: RunFolder, job: Job) -> None:
    """Prepare the folder for another attempt of the job described in it, and lock it.

    Before the first attempt of a submitted job, the folder is as ``begin`` left it.

    Raises:
        UserError: the same job is running in the folder, or the folder cannot be written.
    """
    with folder.locked(job):
        if folder.state != "submitted":
            _archive_earlier_attempt(folder, job, PER_ATTEMPT)
        for name in ("errors", "logs"):
            (folder.path / name).mkdir(exist_ok=True)
        folder.set_status("starting")


def _archive_earlier_attempt(folder: RunFolder, job: Job, names: tuple[str, ...]) -> None:
    """Move files of an earlier attempt to ``attempts/<n>``."""
    if folder.state == "planned":
        return  # no earlier attempt
    resumes = can_resume(job, folder.path)
    names = names if resumes else (*names, *PER_CURVE)
    present = [folder.path / name for name in names if (folder.path / name).exists()]
    if not present:
        return
    last = folder.earlier_attempt
    target = folder.path / "attempts" / str(1 if last is None else 1 + int(last.name))
    target.mkdir(parents=True)
    for path in present:
        path.rename(target / path.name)
    curve = folder.path / METRICS
    if resumes and job.checkpoint.load_step >= 0 and curve.exists():
        # Keep a copy: rows after load_step are cut off, and the new attempt may not repeat them.
        shutil.copy2(curve, target)


def _unfinished_siblings(job: Job) -> list[str]:
    """Checkpoint folders of stopped runs of the same experiment on other layouts.

    These have the same name and numerics, and another id. Completed and running ones are left out.
    """
    config, runs = job.checkpoint, job.run_dir.parent
    if not config.enable or not config.resume or config.folder != type(config)().folder or not runs.is_dir():
        return []
    found = []
    for path in sorted(runs.iterdir()):
        run, checkpoints = RunStatus(path), path / config.folder
        if path.name == job.id or not checkpoints.is_dir() or run.state in ("completed", None):
            continue
        if run.may_be_running or _numerics_id(path) != job.numerics_id:
            continue
        if CheckpointFolder(str(checkpoints)).complete(1)[0]:
            found.append(str(checkpoints.resolve()))
    return found


def _numerics_id(run_dir: Path) -> str | None:
    """``numerics_id`` of the job in a run folder; None if this version cannot read it."""
    try:
        return Job.read(run_dir / "job.json").numerics_id
    except (FileNotFoundError, UserError):
        return None
