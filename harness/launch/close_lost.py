"""Write the rows of runs whose process or job ended without one."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from harness.config.job import Job
from harness.launch.queue import Jobs, is_live, last_states
from harness.launch.slurm_record import JobLost, SlurmJobRecord
from harness.launch.state import RunState, queued_jobs, read_state
from harness.run.folder import RunFolder
from harness.train.finish import finish_run
from harness.util.errors import EXIT_INTERRUPTED, UserError

# A shared file system may show a job's last writes up to this long after the job has left the queue.
LAST_WRITES_SECONDS = 15.0


def record_lost(run_dirs: Sequence[Path]) -> tuple[list[RunState], list[RunState]]:
    """Write the rows of runs that ended without one.

    Queries SLURM once for its jobs, and once more for the final states of jobs that it does not list.

    Returns:
        the states of all runs, and of those whose rows were written.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    listed = queued_jobs(run_dirs)
    seen = {run_dir: read_state(run_dir, listed) for run_dir in run_dirs}
    lost = _lost(seen)
    if _jobs_of(lost):
        jobs = "1 job is" if len(lost) == 1 else f"{len(lost)} jobs are"
        wait = f"in {LAST_WRITES_SECONDS:.0f} s missing rows are written"
        sys.stderr.write(f"{jobs} not in SLURM's queue and without a result; {wait}\n")
        sys.stderr.flush()
        time.sleep(LAST_WRITES_SECONDS)
        seen |= {each.run_dir: read_state(each.run_dir, listed) for each in lost}
        lost = _lost(seen)
    known = {} if listed is None else listed.states
    states = {**last_states([each for each in _jobs_of(lost) if each not in known]), **known}
    closed = []
    for each in lost:
        state = None if each.job_record is None else states.get(each.job_record.key)
        if is_live(state):
            reason = f"another user's job, which is {state}"
            seen[each.run_dir] = replace(each, state="running", kind=None, reason=reason)
            continue
        try:
            if _close_unless_held(each, state):
                closed.append(read_state(each.run_dir, listed))
        except UserError as error:  # its job.json is damaged, so no row can be written
            seen[each.run_dir] = replace(each, kind="user", reason=str(error))
    seen |= {each.run_dir: each for each in closed}
    return [seen[run_dir] for run_dir in run_dirs], closed


def _lost(seen: dict[Path, RunState]) -> list[RunState]:
    return [each for each in seen.values() if each.state == "lost" and not each.is_damaged]


def _jobs_of(seen: list[RunState]) -> list[tuple[str, str]]:
    return [each.job_record.key for each in seen if each.job_record and each.job_record.job_id]


def _close_unless_held(lost: RunState, state: str | None) -> bool:
    """Write the row of a run unless its folder is in use; return whether it was written.

    Args:
        lost: the run.
        state: SLURM's final state of its job, or None.
    """
    folder = RunFolder(lost.run_dir)
    try:
        folder.hold()
    except UserError:
        return False
    try:
        # Another process may have held the folder until now, and finished or resubmitted the run.
        now = read_state(lost.run_dir, Jobs([]))
        if now.state != "lost" or now.job_record != lost.job_record:
            return False
        close_run(folder.read_job(), folder, lost.job_record, state, quiet=True)
        return True
    finally:
        folder.release()


def close_run(
    job: Job, folder: RunFolder, job_record: SlurmJobRecord | None, state: str | None, *, quiet: bool = False
) -> int:
    """Write the row of a run that ended without one; return the run's exit code.

    A cancelled job, and a run of this machine, count as interrupted, not as failed.

    Args:
        job: the resolved job.
        folder: its run folder, held by this process.
        job_record: the record of its SLURM job; None if the run was not submitted.
        state: SLURM's final state of the job, or None.
        quiet: print nothing.
    """
    if job_record is None:
        return finish_run(job, folder, EXIT_INTERRUPTED, quiet=quiet)
    lost = JobLost(job_record, state)
    if lost.kind == "cancelled":
        if not job_record.cancelled:
            replace(job_record, cancelled=True).write(folder.path)
        return finish_run(job, folder, EXIT_INTERRUPTED, quiet=quiet)
    folder.record_error(None, lost)
    return finish_run(job, folder, lost.exit_code, quiet=quiet)
