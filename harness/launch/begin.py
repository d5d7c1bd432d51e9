"""Begin a run: lock its folder, move an earlier attempt aside, describe the job."""

import os
import shutil
from pathlib import Path

from harness.checkpoint.catalog import CheckpointFolder
from harness.checkpoint.resume import CONTINUES, can_resume
from harness.config.job import Job
from harness.launch.layouts import LAYOUTS, prepare
from harness.run.folder import LATEST, LAYOUT, METRICS, RunFolder, run_folders
from harness.run.result import EVALUATIONS, write_json_atomically
from harness.util.errors import UserError

DESCRIPTION = ("job.json", LAYOUTS, "overrides.txt", "code.json", CONTINUES, "slurm")
PER_ATTEMPT = (
    "result.json",
    LAYOUT,
    "errors",
    "logs",
    "evidence",
    "flight_recorder",
    "profile",
    "phases",
    "slow_ranks.json",
    # Last: without it, the run would count as never started.
    "status.json",
)
# An attempt that resumes appends to these.
RECORDS = ("tensors.bin", "tensors.json", "activations.bin", "activations.json")
PER_CURVE = (METRICS, *RECORDS, EVALUATIONS, "metrics", "tensorboard")


def begin(
    folder: RunFolder,
    job: Job,
    overrides: list[str],
    *,
    adopt: bool = False,
    state: str = "starting",
) -> None:
    """Prepare the folder for an attempt, and lock it.

    Files of an earlier attempt move to ``attempts/<n>``. The metrics stay if there is a checkpoint
    to resume from.

    Args:
        adopt: whether to resume from stopped runs of the same experiment on other layouts, if their
            checkpoints are newer.
        state: the new state in ``status.json``.
    """
    with folder.locked():
        others = _unfinished_siblings(job) if adopt else []
        seconds = folder.seconds()
        _archive_earlier_attempt(folder, job, (*DESCRIPTION, *PER_ATTEMPT))
        folder.describe(job, overrides)
        prepare(job, folder.path)
        if others:
            write_json_atomically(folder.path / CONTINUES, {"folders": others})
        folder.set_status(state, earlier_seconds=seconds)
        # The link ``latest`` beside the folder; nothing depends on it.
        link = folder.path.with_name(f".{LATEST}.{os.getpid()}")
        try:
            link.symlink_to(folder.path.name)
            link.replace(folder.path.with_name(LATEST))
        except OSError:  # a file system without links, or a folder of that name
            link.unlink(missing_ok=True)


def begin_again(folder: RunFolder, job: Job) -> None:
    """Prepare the folder for another attempt of the job described in it, and lock it.

    Before the first attempt of a submitted job, the folder is as ``begin`` left it.
    """
    with folder.locked():
        seconds = folder.seconds()
        if folder.state != "submitted":
            _archive_earlier_attempt(folder, job, PER_ATTEMPT)
        for name in ("errors", "logs"):
            (folder.path / name).mkdir(exist_ok=True)
        folder.set_status("starting", earlier_seconds=seconds)


def earlier_attempt(run_dir: Path) -> Path | None:
    """Return the folder with the files of the attempt before this one; None if this is the first."""
    attempts = [path for path in (run_dir / "attempts").glob("*") if path.name.isdigit()]
    return max(attempts, key=lambda path: int(path.name), default=None)


def _archive_earlier_attempt(folder: RunFolder, job: Job, names: tuple[str, ...]) -> None:
    if folder.state == "planned":
        return  # no earlier attempt
    resumes = can_resume(job, folder.path)
    names = names if resumes else (*names, *PER_CURVE)
    present = [folder.path / name for name in names if (folder.path / name).exists()]
    if not present:
        return
    last = earlier_attempt(folder.path)
    target = folder.path / "attempts" / str(1 if last is None else 1 + int(last.name))
    target.mkdir(parents=True)
    for path in present:
        path.rename(target / path.name)
    if resumes and job.checkpoint.load_step >= 0:
        # Keep copies: rows after load_step are cut off, and the new attempt may not repeat them.
        for name in (METRICS, *RECORDS):
            if (folder.path / name).exists():
                shutil.copy2(folder.path / name, target)


def _unfinished_siblings(job: Job) -> list[str]:
    """Checkpoint folders of stopped runs of the same experiment on other layouts.

    These have the same name and numerics, and another id. Completed and running ones are left out.
    """
    config = job.checkpoint
    runs = job.run_dir.parent
    if not config.enable or not config.resume or config.folder != type(config)().folder:
        return []
    found = []
    for path in run_folders(runs, levels=1):
        run = RunFolder(path)
        checkpoints = path / config.folder
        if path.name == job.id or not checkpoints.is_dir() or run.state in ("completed", None):
            continue
        try:
            is_same = run.read_job().numerics_id == job.numerics_id
        except UserError:  # this version cannot read it
            is_same = False
        if run.may_be_running or not is_same:
            continue
        if CheckpointFolder(str(checkpoints)).complete(1)[0]:
            found.append(str(checkpoints.resolve()))
    return found
