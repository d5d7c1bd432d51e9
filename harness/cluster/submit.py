"""From a job to SLURM's queue: shown or asked for first, never submitted twice."""

from __future__ import annotations

import math
import sys

from harness.cluster.follow import follow, job_id_of, queued
from harness.cluster.queue import Queued
from harness.cluster.slurm import Submission, device_hours
from harness.errors import EXIT_OK, UserError
from harness.job import Job
from harness.run_folder import RunFolder


def submit_one(job: Job, folder: RunFolder, overrides: list[str]) -> int:
    """Submits one job, or shows what would be submitted; returns the exit code.

    Raises:
        UserError: there is no SLURM here, it refuses the job, or the job may cost more than was agreed to.
    """
    submission = Submission([job], [folder.path], folder.path, f"{job.name}.{job.id}")
    if job.cluster.dry_run:
        sys.stdout.write(f"{submission.script()}\n# {submission.shape.describe()}, {cost_in_words([job])}\n")
        return EXIT_OK
    found = _queued_unless_failed(folder)
    if found is None:
        confirm([job])
        folder.hold()
        # Another controller may have been quicker.
        found = _queued_unless_failed(folder)
        if found is None:
            submit(submission, [folder], [overrides], adopt=True)
        folder.release()
    how = "submitted" if found is None else f"already submitted ({found.state})"
    sys.stdout.write(
        f"{job.name}: {how} as job {job_id_of(folder.path)}, {submission.shape.describe()}, "
        f"{cost_in_words([job])}\nrun folder {folder.path}\n"
    )
    sys.stdout.flush()
    return follow(job, folder) if job.cluster.wait else EXIT_OK


def _queued_unless_failed(folder: RunFolder) -> Queued | None:
    """The job in the queue, unless it has failed and is only being cleaned up."""
    return None if folder.state == "failed" else queued(folder.path)


def submit(
    submission: Submission, folders: list[RunFolder], overrides: list[list[str]], *, adopt: bool = False
) -> list[str]:
    """Makes the run folders ready, submits, and lets the folders go; returns the job ids.

    Raises:
        UserError: a folder is in use or cannot be written, there is no SLURM here, or it refuses the job.
        SlurmError: SLURM cannot be talked to.
    """
    try:
        for job, folder, own in zip(submission.jobs, folders, overrides, strict=True):
            folder.begin(job, own, adopt=adopt, state="submitted")
        return submission.submit()
    except Exception:
        for folder in folders:
            if folder.state == "submitted":
                folder.set_status("planned")
        raise
    finally:
        for folder in folders:
            folder.release()


def cost_in_words(jobs: list[Job]) -> str:
    """The most that jobs may cost until their time limit, e.g. ``at most 16 GPU-hours (H100 SXM)``."""
    unit = "rank-hours" if jobs[0].cluster.device == "cpu" else "GPU-hours"
    kinds = sorted({job.cluster.accelerator for job in jobs if job.cluster.accelerator})
    of = f" ({', '.join(kinds)})" if kinds else ""
    return f"at most {sum(map(device_hours, jobs)):.4g} {unit}{of}"


def confirm(jobs: list[Job]) -> None:
    """Asks whether to spend what jobs may cost, if that is more than ``cluster.confirm_gpu_hours``.

    Raises:
        UserError: the answer is no, or there is nobody to ask.
    """
    limit, hours = min(job.cluster.confirm_gpu_hours for job in jobs), sum(map(device_hours, jobs))
    if hours <= limit:
        return
    if not sys.stdin.isatty():
        raise UserError(
            f"cluster.confirm_gpu_hours={limit:g}: this may cost {cost_in_words(jobs)}, and there is nobody "
            f"to ask; would work: cluster.confirm_gpu_hours={math.ceil(hours)}, a shorter cluster.time"
        )
    sys.stderr.write(f"this may cost {cost_in_words(jobs)}; submit? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was submitted")
