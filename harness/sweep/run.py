"""Starts the points of a sweep that are not complete: here one after another, or all at once on SLURM."""

from __future__ import annotations

import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.app import guarded
from harness.cluster.follow import LAST_WORDS_SECONDS, is_live, settle_lost
from harness.cluster.queue import SlurmError
from harness.cluster.slurm import Shape, Submission, shape_of
from harness.cluster.submit import confirm, cost_in_words, submit
from harness.cluster.ticket import Ticket
from harness.compose import Composed
from harness.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, UserError
from harness.job import Job
from harness.metrics.views import log_sweep
from harness.run_folder import RunFolder
from harness.sweep.registry import Point, Registry, Skipped, folder_of, labels
from harness.sweep.state import BUSY, Seen, look_at_all
from harness.sweep.table import aligned, rows_of

SKIPPED_SHOWN = 10
# Between two looks at the queue: soon after something has changed, and ever more seldom.
FOLLOW_SECONDS, LONGEST_FOLLOW_SECONDS = 2.0, 30.0
# SLURM's MaxArraySize is 1001 unless a site says otherwise.
LARGEST_ARRAY = 1000


def sweep(composed: Sequence[Composed]) -> int:
    """Runs a multirun; returns the exit code: 0 if all points that can be are complete or submitted."""
    legal = [each for each in composed if each.job is not None]
    skipped = [Skipped(each.overrides, each.reason) for each in composed if each.job is None]
    jobs = [each.job for each in legal if each.job is not None]
    if not jobs:
        reasons = "".join(f"  {line}\n" for line in _reasons(skipped))
        raise UserError(f"none of the {len(composed)} points can be:\n{reasons}".rstrip())
    registry = Registry(folder_of(jobs))
    points: dict[str, Point] = {}
    for each, job in zip(legal, jobs, strict=True):
        if job.metrics.wandb_group is None:
            job.metrics.wandb_group = registry.name
        points.setdefault(job.id, Point(job.id, job.run_dir, each.overrides))
    if jobs[0].cluster.dry_run:
        return _show_dry(registry, list(points.values()), {job.id: job for job in jobs}, skipped)
    with registry.controlled():
        for job in {job.id: job for job in jobs}.values():
            RunFolder(job.run_dir).plan(job, points[job.id].overrides)
        registry.add(list(points.values()), skipped)
        # As composed now: labels such as the partition or the time limit may be others than last time.
        by_id = {job.id: job for job in jobs}
        started = _start(registry, look_at_all(list(points.values())), by_id, skipped, anew=True)
    return _finish(registry, list(points.values()), by_id, started)


def resume(registry: Registry, *, out_of_memory: bool = False) -> int:
    """Starts what is not complete of a sweep that was started before; returns the exit code.

    Args:
        registry: the sweep.
        out_of_memory: also points that failed for want of memory, which fail again unless something changed.
    """
    with registry.controlled():
        seen = look_at_all(registry.points())
        jobs = {each.point.id: each.point.job for each in seen}
        started = _start(registry, seen, jobs, [], out_of_memory=out_of_memory)
    return _finish(registry, [each.point for each in seen], jobs, started)


def _start(
    registry: Registry,
    seen: Sequence[Seen],
    jobs: dict[str, Job],
    skipped: Sequence[Skipped],
    *,
    out_of_memory: bool = False,
    anew: bool = False,
) -> _Started:
    """Shows what there is to do, asks where it is dear, and does it: here to the end, on SLURM by submitting.

    Args:
        registry: the sweep.
        seen: its points.
        jobs: their jobs, by id.
        skipped: what could not be.
        out_of_memory: start what failed for want of memory too.
        anew: start what is complete too, where the job says ``checkpoint.resume=false``.
    """
    seen = settle_lost_points(seen)
    wanted, starved = _sort(seen, jobs, out_of_memory=out_of_memory, anew=anew)
    sys.stderr.write(_plan_in_words(registry, seen, wanted, starved, jobs, skipped))
    remote = [each for each in wanted if jobs[each.point.id].cluster.kind == "slurm"]
    local = [each for each in wanted if jobs[each.point.id].cluster.kind == "local"]
    if remote:
        confirm([jobs[each.point.id] for each in remote])
        _submit(registry, [each.point for each in remote], jobs)
    stopped = _run_here(local, jobs)
    return _Started(stopped, submitted_only=not local and not starved)


def _sort(
    seen: Sequence[Seen], jobs: dict[str, Job], *, out_of_memory: bool, anew: bool
) -> tuple[list[Seen], list[Seen]]:
    """The points to start, and those that are left out because memory did not suffice."""
    starved = [] if out_of_memory else [each for each in seen if each.kind == "out_of_memory"]
    done = [
        each
        for each in seen
        if each.state == "completed" and (jobs[each.point.id].checkpoint.resume or not anew)
    ]
    return [each for each in seen if each.state not in BUSY and each not in (*done, *starved)], starved


@dataclass(frozen=True)
class _Started:
    """What was done: whether somebody asked to stop, and whether nothing has an end yet to be told of."""

    stopped: bool
    submitted_only: bool


def _finish(registry: Registry, points: Sequence[Point], jobs: dict[str, Job], started: _Started) -> int:
    """Follows what was submitted, if that is wanted, and tells the end; returns the exit code."""
    stopped, waits = started.stopped, any(job.cluster.wait for job in jobs.values())
    if not stopped and waits:
        stopped = _follow(points)
    if started.submitted_only and not waits:
        sys.stderr.write(f"python -m harness.sweep status {registry.path}\n")
        return EXIT_OK
    return _conclude(registry, points, jobs, stopped)


def settle_lost_points(seen: Sequence[Seen]) -> list[Seen]:
    """Writes down what became of points that are over without a word; returns how all points are then.

    What a job that has just ended wrote can take a while to be seen on a shared file system.
    """
    points = [each.point for each in seen]
    if any(each.state == "lost" and each.has_begun_elsewhere for each in seen):
        time.sleep(LAST_WORDS_SECONDS)
        seen = look_at_all(points)
    lost = [each.point for each in seen if each.state == "lost"]
    for point in lost:
        _settle_point(point)
    return look_at_all(points) if lost else list(seen)


def _settle_point(point: Point) -> None:
    """Writes the row of a point that is over without a word, unless somebody is at it after all."""
    job, folder, ticket = point.job, RunFolder(point.run_dir), Ticket.read(point.run_dir)
    try:
        folder.hold()
    except UserError:
        return
    try:
        # Whoever had the folder until now may have had something to say.
        if look_at_all([point])[0].state != "lost" or (ticket is not None and is_live(ticket)):
            return
        if ticket is not None:
            settle_lost(job, folder, ticket)
        else:
            folder.settle(job, "interrupted", EXIT_INTERRUPTED)
    finally:
        folder.release()


def _plan_in_words(
    registry: Registry,
    seen: Sequence[Seen],
    wanted: Sequence[Seen],
    starved: Sequence[Seen],
    jobs: dict[str, Job],
    skipped: Sequence[Skipped],
) -> str:
    """The lines a sweep starts with."""
    lines = [f"{registry.path}: {len(seen) + len(skipped)} points, {len(wanted)} to run"]
    shapes = Counter(_place(jobs[each.point.id]) for each in wanted)
    lines += [f"  {count} x {place}" for place, count in shapes.items()]
    costly = [jobs[each.point.id] for each in wanted if jobs[each.point.id].cluster.kind == "slurm"]
    if costly:
        lines.append(f"  {cost_in_words(costly)}")
    states = Counter(each.state for each in seen if each not in wanted and each not in starved)
    lines += [f"  {count} {state} already" for state, count in states.items()]
    if starved:
        lines.append(f"  {len(starved)} out of memory before, left out")
    if skipped:
        lines.append(f"  {len(skipped)} skipped, which no job can be made of")
        lines += [f"    {line}" for line in _reasons(skipped, [each.point.overrides for each in seen])]
    return "\n".join(lines) + "\n"


def _place(job: Job) -> str:
    if job.cluster.kind == "slurm":
        return shape_of(job).describe()
    return f"{job.world_size} rank{'s' if job.world_size > 1 else ''} here, one after another"


def _reasons(skipped: Sequence[Skipped], others: Sequence[list[str]] = ()) -> list[str]:
    names = labels([each.overrides for each in skipped], others)
    lines = [f"{name}: {each.reason}" for name, each in zip(names, skipped, strict=True)]
    left = len(lines) - SKIPPED_SHOWN
    return lines if left <= 1 else [*lines[:SKIPPED_SHOWN], f"and {left} more"]


def _show_dry(
    registry: Registry, points: Sequence[Point], jobs: dict[str, Job], skipped: Sequence[Skipped]
) -> int:
    """Shows the scripts of a sweep without touching anything."""
    seen = look_at_all(points)
    wanted, starved = _sort(seen, jobs, out_of_memory=False, anew=True)
    sys.stderr.write(_plan_in_words(registry, seen, wanted, starved, jobs, skipped))
    remote = [jobs[each.point.id] for each in wanted if jobs[each.point.id].cluster.kind == "slurm"]
    for group in _by_shape(remote):
        sys.stdout.write(
            f"{Submission(group, [job.run_dir for job in group], registry.path, registry.name).script()}\n"
        )
    return EXIT_OK


def _by_shape(jobs: Sequence[Job]) -> list[list[Job]]:
    groups: dict[Shape, list[Job]] = {}
    for job in jobs:
        groups.setdefault(shape_of(job), []).append(job)
    return [
        group[start : start + LARGEST_ARRAY]
        for group in groups.values()
        for start in range(0, len(group), LARGEST_ARRAY)
    ]


def _submit(registry: Registry, points: Sequence[Point], jobs: dict[str, Job]) -> None:
    """Submits points, those of equal shape as one array."""
    by_id = {point.id: point for point in points}
    for group in _by_shape([jobs[point.id] for point in points]):
        own = [by_id[job.id] for job in group]
        # A name that no other job has, by which they are found again if this process dies while it submits.
        run_dirs = [point.run_dir for point in own]
        submission = Submission(group, run_dirs, registry.path, f"{registry.name}.{uuid.uuid4().hex[:8]}")
        folders = [RunFolder(path) for path in run_dirs]
        ids = submit(submission, folders, [point.overrides for point in own])
        first = ids[0].partition("_")[0]
        tasks = f" to {first}_{len(ids) - 1}" if len(ids) > 1 else ""
        sys.stderr.write(f"submitted {ids[0]}{tasks}: {len(ids)} x {submission.shape.describe()}\n")


def _run_here(seen: Sequence[Seen], jobs: dict[str, Job]) -> bool:
    """Runs points one after another; one that fails does not keep the next from running.

    Returns:
        whether somebody asked to stop.
    """
    names = labels([each.point.overrides for each in seen])
    for number, (name, each) in enumerate(zip(names, seen, strict=True), start=1):
        sys.stderr.write(f"[{number}/{len(seen)}] {name}\n")
        if _run_point(jobs[each.point.id], each.point) in STOPPED:
            return True
    return False


def _run_point(job: Job, point: Point) -> int:
    """Runs one point in processes of its own; returns its exit code."""
    from harness.cluster.local import launch

    def run() -> int:
        folder = RunFolder(point.run_dir)
        # Points of a sweep over layouts are compared: none of them goes on from another.
        folder.begin(job, point.overrides)
        return launch(job, folder, apart=True)

    return guarded(run)


def _follow(points: Sequence[Point]) -> bool:
    """Waits until SLURM is done with all points, and says when one changes.

    Returns:
        whether somebody asked to stop waiting.
    """
    names = labels([point.overrides for point in points])
    told: dict[str, str] = {}
    wait = FOLLOW_SECONDS
    try:
        while True:
            before = dict(told)
            try:
                seen = settle_lost_points(look_at_all(points))
            except SlurmError as error:
                sys.stderr.write(f"WARNING {error}\n")
                time.sleep(LONGEST_FOLLOW_SECONDS)
                continue
            for name, each in zip(names, seen, strict=True):
                if told.get(each.point.id, "pending") != each.state:
                    about = f" ({each.about})" if each.kind else ""
                    sys.stderr.write(f"{name}: {each.state}{about}\n")
                told[each.point.id] = each.state
            if not any(each.state in BUSY for each in seen):
                return False
            wait = FOLLOW_SECONDS if told != before else min(1.3 * wait, LONGEST_FOLLOW_SECONDS)
            time.sleep(wait)
    except KeyboardInterrupt:
        sys.stderr.write("\nnot following any more; the jobs go on\n")
        return True


def _conclude(registry: Registry, points: Sequence[Point], jobs: dict[str, Job], stopped: bool) -> int:
    """Shows the table, names what did not complete, and decides the exit code."""
    seen = look_at_all(points)
    sys.stdout.write(aligned(rows_of(seen)))
    sys.stdout.flush()
    left = [each for each in seen if each.state not in ("completed", *BUSY)]
    if left:
        names = labels([point.overrides for point in points])
        named = dict(zip([point.id for point in points], names, strict=True))
        lines = "".join(
            f"  {named[each.point.id]}: {each.about if each.kind else each.state}\n" for each in left
        )
        sys.stderr.write(
            f"{len(left)} of {len(seen)} points did not complete:\n{lines}"
            f"python -m harness.sweep resume {registry.path}\n"
        )
    if stopped:
        return EXIT_INTERRUPTED
    log_table(registry, seen, list(jobs.values()))
    return 1 if left else EXIT_OK


def log_table(registry: Registry, seen: Sequence[Seen], jobs: Sequence[Job]) -> None:
    """Logs the table of a sweep to W&B, if its runs go there too."""
    wanting = [job for job in jobs if job.metrics.wandb]
    if not wanting:
        return
    try:
        log_sweep(wanting[0].metrics, registry.path, registry.name, rows_of(seen, whole=True))
    except Exception as error:
        # What a client of a remote service raises is not ours to list, and the table is here.
        sys.stderr.write(f"WARNING the table could not be logged to W&B: {type(error).__name__}: {error}\n")
