"""Submit jobs to SLURM: show them, ask for confirmation, never submit a job twice, follow them."""

import math
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from harness.config.job import Job
from harness.launch.begin import begin
from harness.launch.inputs import require_inputs
from harness.launch.queue import SlurmError, jobs, require_slurm
from harness.launch.slurm import Submission, device_hours, shape_of
from harness.launch.state import BUSY, RunState, SlurmJobRecord, record_lost
from harness.launch.sweep.folder import Point
from harness.run.folder import RunFolder
from harness.train.finish import format_failure
from harness.util.errors import EXIT_INTERRUPTED, EXIT_MACHINE, EXIT_OK, ConfigError, UserError
from harness.util.words import dollars, figure, plural, summed

FOLLOW_SECONDS = 10.0
"""Interval between queries of the queue."""


def submit_one(job: Job, folder: RunFolder, overrides: list[str]) -> int:
    """Submit one job, or show what would be submitted; return the exit code."""
    submission = Submission([job], [folder.path], folder.path, f"{job.name}.{job.id}")
    if job.cluster.dry_run:
        script = submission.script(planned=True)
        sys.stdout.write(f"{script}\n# {submission.shape.describe()}, {cost_in_words([job])}\n")
        return EXIT_OK
    require_slurm()
    ident: str | None
    there = job
    how = "submitted"
    about = ""
    seen = _last_state(folder, submission)
    if not seen.is_held:
        confirm([job])
        folder.hold()
        # Another controller may have submitted the job meanwhile.
        seen = _last_state(folder, submission)
        if not seen.is_held:
            [ident] = submit(submission, [folder], [overrides], adopt=True)
        folder.release()
    if seen.is_held:
        there = folder.read_job()
        how = f"already submitted ({seen.state})"
        about = f"{seen.about}\nscancel it first to change its sbatch options\n"
        ident = seen.job_id  # another controller may have died before it wrote the id
    words = (
        f"{job.name}: {how} as job {ident}, {shape_of(there).describe()}, {cost_in_words([there])}\n"
        f"{about}run folder {folder.path}\n"
    )
    if job.cluster.parsable:
        sys.stderr.write(words)
        words = f"{ident}\n"
    sys.stdout.write(words)
    sys.stdout.flush()
    if not job.cluster.wait:
        return EXIT_OK
    ends = follow_points([Point(job.id, folder.path, overrides, job)], [job.name])
    if ends is None:
        return EXIT_INTERRUPTED
    if ends[0].is_damaged or ends[0].state == "blocked":
        raise UserError(ends[0].reason)
    error = folder.errors.first() if folder.state == "failed" else None
    if error is not None:
        sys.stderr.write(format_failure(error, job.world_size, folder))
    if folder.stop_reason is not None:
        sys.stderr.write(f"{folder.stop_reason}\n")
    # The row may be damaged, or not yet visible on a shared file system.
    unknown = EXIT_OK if folder.state == "completed" else EXIT_MACHINE
    return int(folder.row.get("exit_code", unknown))


def _last_state(folder: RunFolder, submission: Submission) -> RunState:
    """Return the state of a run that may have a job; write the row of a job that is lost."""
    if SlurmJobRecord.read(folder.path) is None:
        found = SlurmJobRecord(submission.name).find(jobs())
        if found is not None:
            raise UserError(
                f"{folder.path}: SLURM job {found.id} ({found.state}) has this run's name, and its folder "
                f"was removed or is elsewhere; would work: scancel {found.id}, or another name=NAME"
            )
    [[seen], closed] = record_lost([folder.path])
    for each in closed:
        sys.stderr.write(f"its last attempt: {each.state}, {each.about}\n")
    return seen


def submit(
    submission: Submission,
    folders: list[RunFolder],
    overrides: list[list[str]],
    *,
    adopt: bool = False,
) -> list[str]:
    """Prepare the run folders, submit, and release the folders; return the job ids."""
    for job in submission.jobs:
        require_inputs(job)
    try:
        for job, folder, own in zip(submission.jobs, folders, overrides, strict=True):
            begin(folder, job, own, adopt=adopt, state="submitted")
        return submission.submit()
    except BaseException as error:
        # After ^C the job may be in the queue; it is found by its name.
        if isinstance(error, Exception) or not submission.is_sent:
            for folder in folders:
                try:
                    if folder.state == "submitted":
                        folder.set_status("planned")
                except OSError as failure:
                    sys.stderr.write(
                        f"WARNING {folder.path}: status.json cannot be written: {failure}\n"
                    )
        if isinstance(error, OSError):
            raise UserError(
                f"{submission.home}: cannot write the job's files, so it was not submitted: {error}"
            ) from error
        raise
    finally:
        for folder in folders:
            folder.release()


def cost_in_words(jobs: list[Job]) -> str:
    """Describe the maximum cost of jobs until their time limit: ``at most 16 GPU-hours (H100 SXM), $40.00``.

    There is no price if one job has none, or if the ranks are on CPUs.
    """
    unit = "rank-hours" if jobs[0].cluster.device == "cpu" else "GPU-hours"
    kinds = sorted({job.cluster.accelerator for job in jobs if job.cluster.accelerator})
    accelerators = f" ({', '.join(kinds)})" if kinds else ""
    hours = summed(map(device_hours, jobs))
    if hours is None:
        return f"{unit} up to the partition's time limit, which is not known here{accelerators}"
    price = None if unit == "rank-hours" else summed(map(_dollars, jobs))
    return f"at most {figure(hours)} {unit}{accelerators}{'' if price is None else f', {dollars(price)}'}"


def _dollars(job: Job) -> float | None:
    price = job.cluster.dollars_per_gpu_hour
    hours = device_hours(job)
    return None if price is None or hours is None else price * hours


def confirm(jobs: list[Job]) -> None:
    """Ask for confirmation if jobs may cost more than ``cluster.confirm_gpu_hours``."""
    limit = min(job.cluster.confirm_gpu_hours for job in jobs)
    hours = summed(map(device_hours, jobs))
    if hours is None:
        raise ConfigError(
            "cluster.time",
            None,
            "there is no scontrol here to read the partition's limit from",
            "4:00:00",
        )
    if hours <= limit:
        return
    if not sys.stdin.isatty():
        raise UserError(
            f"cluster.confirm_gpu_hours={limit:g}: this may cost {cost_in_words(jobs)}, and stdin is not a "
            f"terminal; would work: cluster.confirm_gpu_hours={math.ceil(hours)}, a shorter cluster.time"
        )
    sys.stderr.write(f"this may cost {cost_in_words(jobs)}; submit? [y/N] ")
    sys.stderr.flush()
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        raise UserError("nothing was submitted")


def states_of(points: Sequence[Point]) -> list[RunState]:
    """Return the states of points; write missing rows of ended points."""
    seen, closed = record_lost([point.run_dir for point in points])
    if closed:
        counts = Counter(each.kind or each.state for each in closed)
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        sys.stderr.write(f"{plural(len(closed), 'point')} ended without a result: {named}\n")
    return seen


def follow_points(points: Sequence[Point], names: Sequence[str]) -> list[RunState] | None:
    """Wait until no point is pending or running, printing changes; return their last states.

    None if the user interrupted it.
    """
    shown: dict[Path, str] = {}
    try:
        while True:
            try:
                seen = states_of(points)
            except SlurmError as error:
                sys.stderr.write(f"WARNING {error}\n")
                time.sleep(FOLLOW_SECONDS)
                continue
            for name, each in zip(names, seen, strict=True):
                if shown.get(each.run_dir, "pending") != each.state:
                    about = f" ({each.about})" if each.kind else ""
                    sys.stderr.write(f"{name}: {each.state}{about}\n")
                shown[each.run_dir] = each.state
            # A job that is lost may yet be closed by the process that holds its folder.
            if not any(each.state in (*BUSY, "lost") and not each.is_damaged for each in seen):
                return seen
            time.sleep(FOLLOW_SECONDS)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped following; the jobs continue\n")
        return None
