"""Points whose process or job is over without a row: the row is written by whoever looks at the sweep."""

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
from harness.sweep.state import Seen, jobs_of, look_at


def look_and_close(points: Sequence[Point]) -> list[Seen]:
    """How all points are, after the rows of those that are over without one were written.

    SLURM is asked once for its jobs, and once more for how the jobs ended that it does not list.

    Raises:
        SlurmError: the scheduler does not answer.
    """
    listed = jobs_of(points)
    seen = {point.run_dir: look_at(point, listed) for point in points}
    lost = [each for each in seen.values() if each.state == "lost"]
    if any(each.has_begun_elsewhere for each in lost):
        # What a job that has just ended wrote can take a while to be seen on a shared file system.
        time.sleep(LAST_WRITES_SECONDS)
        seen |= {each.point.run_dir: look_at(each.point, listed) for each in lost}
        lost = [each for each in seen.values() if each.state == "lost"]
    ids = [each.ticket.job_id for each in lost if each.ticket is not None and each.ticket.job_id is not None]
    known = {} if listed is None else listed.states
    states = {**last_states([job_id for job_id in ids if job_id not in known]), **known}
    closed = []
    for each in lost:
        state = None if each.ticket is None else states.get(each.ticket.job_id or "")
        if state is not None and is_live(state):
            seen[each.point.run_dir] = replace(
                each, state="running", kind=None, reason=f"another user's job, which is {state}"
            )
        else:
            try:
                if _close(each, state):
                    closed.append(look_at(each.point, listed))
            except UserError as error:  # its job.json is damaged: no row can be made of it
                seen[each.point.run_dir] = replace(each, kind="user", reason=str(error))
    seen |= {each.point.run_dir: each for each in closed}
    if closed:
        counts = Counter(each.kind or each.state for each in closed)
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        count = f"{len(closed)} point{'s' if len(closed) > 1 else ''}"
        sys.stderr.write(f"{count} ended without a result: {named}\n")
    return list(seen.values())


def _close(lost: Seen, state: str | None) -> bool:
    """Write the row of a point unless its folder is in use; return whether it was written.

    Args:
        lost: the point.
        state: SLURM's word for how its job ended; None if it does not know it.
    """
    folder = RunFolder(lost.point.run_dir)
    try:
        folder.hold()
    except UserError:
        return False
    try:
        # Until now another process may have had the folder, and may have finished or submitted it again.
        now = look_at(lost.point, Jobs([]))
        if now.state != "lost" or now.ticket != lost.ticket:
            return False
        if lost.ticket is None:
            folder.settle(lost.point.job, "interrupted", EXIT_INTERRUPTED)
        else:
            record_lost_job(lost.point.job, folder, lost.ticket, state, quiet=True)
        return True
    finally:
        folder.release()
