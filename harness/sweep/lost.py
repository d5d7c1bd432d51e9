"""Write the rows of points whose process or job ended without one; done by every command on a sweep."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from harness.cluster.follow import LAST_WRITES_SECONDS, is_live, record_lost_job
from harness.cluster.queue import Jobs, last_states
from harness.errors import EXIT_INTERRUPTED, UserError
from harness.run_folder import RunFolder
from harness.sweep.registry import Point
from harness.sweep.state import PointState, queued_jobs, read_state


def record_lost(points: Sequence[Point]) -> list[PointState]:
    """Write the rows of points that ended without one; return the states of all points.

    Queries SLURM once for its jobs, and once more for the final states of jobs that it does not list.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    listed = queued_jobs(points)
    seen = {point.run_dir: read_state(point, listed) for point in points}
    lost = [each for each in seen.values() if each.state == "lost"]
    if any(each.has_begun_elsewhere for each in lost):
        # A shared file system may show the last writes of a job only some time after it has ended.
        time.sleep(LAST_WRITES_SECONDS)
        seen |= {each.point.run_dir: read_state(each.point, listed) for each in lost}
        lost = [each for each in seen.values() if each.state == "lost"]
    ids = [
        each.job_record.job_id
        for each in lost
        if each.job_record is not None and each.job_record.job_id is not None
    ]
    known = {} if listed is None else listed.states
    states = {**last_states([job_id for job_id in ids if job_id not in known]), **known}
    closed = []
    for each in lost:
        state = None if each.job_record is None else states.get(each.job_record.job_id or "")
        if state is not None and is_live(state):
            seen[each.point.run_dir] = replace(
                each, state="running", kind=None, reason=f"another user's job, which is {state}"
            )
        else:
            try:
                if _close(each, state):
                    closed.append(read_state(each.point, listed))
            except UserError as error:  # its job.json is damaged, so no row can be written
                seen[each.point.run_dir] = replace(each, kind="user", reason=str(error))
    seen |= {each.point.run_dir: each for each in closed}
    if closed:
        counts = Counter(each.kind or each.state for each in closed)
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        count = f"{len(closed)} point{'s' if len(closed) > 1 else ''}"
        sys.stderr.write(f"{count} ended without a result: {named}\n")
    return list(seen.values())


def _close(lost: PointState, state: str | None) -> bool:
    """Write the row of a point unless its folder is in use; return whether it was written.

    Args:
        lost: the point.
        state: SLURM's final state of its job, or None.
    """
    folder = RunFolder(lost.point.run_dir)
    try:
        folder.hold()
    except UserError:
        return False
    try:
        # Another process may have held the folder until now, and finished or resubmitted the run.
        now = read_state(lost.point, Jobs([]))
        if now.state != "lost" or now.job_record != lost.job_record:
            return False
        if lost.job_record is None:
            folder.ensure_result(lost.point.job, "interrupted", EXIT_INTERRUPTED)
        else:
            record_lost_job(lost.point.job, folder, lost.job_record, state, quiet=True)
        return True
    finally:
        folder.release()
