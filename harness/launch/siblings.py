"""Stopped runs of the same experiment on other layouts, from whose checkpoints a run can resume."""

from __future__ import annotations

from pathlib import Path

from harness.checkpoint.catalog import CheckpointFolder
from harness.config.job import Job
from harness.run.status import RunStatus
from harness.util.errors import UserError


def unfinished_siblings(job: Job) -> list[str]:
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
