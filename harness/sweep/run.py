"""Starts the points of a sweep that are not complete: here one after another, or all at once on SLURM."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.app import guarded
from harness.cluster.queue import SlurmError
from harness.cluster.slurm import Submission, shape_of
from harness.cluster.submit import confirm, cost_in_words, submit
from harness.compose import Composed
from harness.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, UserError
from harness.job import Job
from harness.metrics.views import log_sweep
from harness.run_folder import RunFolder
from harness.sweep.arrays import Array, arrays_of
from harness.sweep.distinct import one_of_each
from harness.sweep.lost import look_and_close
from harness.sweep.registry import Point, Registry, Skipped, folder_of, labels
from harness.sweep.state import BUSY, Seen, look_at_all
from harness.sweep.table import aligned, rows_of

SKIPPED_SHOWN = 10
# Between two looks at the queue: soon after something has changed, and ever more seldom.
FOLLOW_SECONDS, LONGEST_FOLLOW_SECONDS = 2.0, 30.0


def sweep(composed: Sequence[Composed]) -> int:
    """Runs a multirun; returns the exit code: 0 if all points that can be are complete or submitted."""
    legal = [each for each in composed if each.job is not None]
    skipped = [Skipped(each.overrides, each.reason) for each in composed if each.job is None]
    jobs = [each.job for each in legal if each.job is not None]
    if not jobs:
        reasons = "".join(f"  {line}\n" for line in _reasons(skipped))
        raise UserError(f"none of the {len(composed)} points can be:\n{reasons}".rstrip())
    tasks = one_of_each(legal)
    registry = Registry(folder_of(jobs))
    for _, job in tasks:
        if job.metrics.wandb_group is None:
            job.metrics.wandb_group = registry.name
    points = [point for point, _ in tasks]
    by_folder = {point.run_dir: job for point, job in tasks}
    if jobs[0].cluster.dry_run:
        return _show_dry(registry, points, by_folder, skipped)
    with registry.controlled():
        for point, job in tasks:
            RunFolder(point.run_dir).plan(job, point.overrides)
        registry.add(points, skipped)
        # As composed now: labels such as the partition or the time limit may be others than last time.
        seen = look_and_close(points)
        started = _start(registry, seen, by_folder, skipped, anew=True, busy=_busy_besides(registry, points))
    return _finish(registry, points, by_folder, started)


def resume(registry: Registry, *, out_of_memory: bool = False) -> int:
    """Starts what is not complete of a sweep that was started before; returns the exit code.

    Args:
        registry: the sweep.
        out_of_memory: also start points that ran out of memory; they fail again unless something changed.
    """
    with registry.controlled():
        seen = look_and_close(registry.points())
        jobs = {each.point.run_dir: each.point.job for each in seen}
        started = _start(registry, seen, jobs, [], out_of_memory=out_of_memory)
    return _finish(registry, [each.point for each in seen], jobs, started)


def _start(
    registry: Registry,
    seen: Sequence[Seen],
    jobs: dict[Path, Job],
    skipped: Sequence[Skipped],
    *,
    out_of_memory: bool = False,
    anew: bool = False,
    busy: Sequence[Seen] = (),
) -> _Started:
    """Print the plan, ask before a costly submission, then submit points to SLURM and run the local ones.

    Args:
        registry: the sweep.
        seen: its points.
        jobs: their jobs, by run folder.
        skipped: points that are not legal jobs.
        out_of_memory: also start points that ran out of memory.
        anew: also start completed points whose job has ``checkpoint.resume=false``.
        busy: other points of the sweep that are pending or running.
    """
    wanted, starved = _sort(seen, jobs, out_of_memory=out_of_memory, anew=anew)
    sys.stderr.write(_plan_in_words(registry, seen, wanted, starved, jobs, skipped))
    remote = [each for each in wanted if jobs[each.point.run_dir].cluster.kind == "slurm"]
    local = [each for each in wanted if jobs[each.point.run_dir].cluster.kind == "local"]
    if remote:
        confirm([jobs[each.point.run_dir] for each in remote])
        _submit(registry, remote, jobs, [*(each for each in seen if each.state in BUSY), *busy])
    stopped = _run_here(local, jobs)
    return _Started(stopped, submitted_only=not local and not starved)


def _busy_besides(registry: Registry, points: Sequence[Point]) -> list[Seen]:
    """Points that another command has added to the sweep, and that wait or run."""
    typed = {os.path.normpath(point.run_dir) for point in points}
    others = [point for point in registry.points() if os.path.normpath(point.run_dir) not in typed]
    return [each for each in look_at_all(others) if each.state in BUSY]


def _sort(
    seen: Sequence[Seen], jobs: dict[Path, Job], *, out_of_memory: bool, anew: bool
) -> tuple[list[Seen], list[Seen]]:
    """Return the points to start, and those left out because they ran out of memory."""
    starved = [] if out_of_memory else [each for each in seen if each.kind == "out_of_memory"]
    done = [
        each
        for each in seen
        if each.state == "completed" and (jobs[each.point.run_dir].checkpoint.resume or not anew)
    ]
    return [each for each in seen if each.state not in BUSY and each not in (*done, *starved)], starved


@dataclass(frozen=True)
class _Started:
    """Whether the user stopped the sweep, and whether all started points were only submitted."""

    stopped: bool
    submitted_only: bool


def _finish(registry: Registry, points: Sequence[Point], jobs: dict[Path, Job], started: _Started) -> int:
    """Follows what was submitted, if that is wanted, and tells the end; returns the exit code."""
    stopped, waits = started.stopped, any(job.cluster.wait for job in jobs.values())
    if not stopped and waits:
        stopped = _follow(points)
    if started.submitted_only and not waits:
        sys.stderr.write(f"python -m harness.sweep status {registry.path}\n")
        return EXIT_OK
    return _conclude(registry, points, jobs, stopped)


def _plan_in_words(
    registry: Registry,
    seen: Sequence[Seen],
    wanted: Sequence[Seen],
    starved: Sequence[Seen],
    jobs: dict[Path, Job],
    skipped: Sequence[Skipped],
) -> str:
    """The lines a sweep starts with."""
    lines = [f"{registry.path}: {len(seen) + len(skipped)} points, {len(wanted)} to run"]
    shapes = Counter(_place(jobs[each.point.run_dir]) for each in wanted)
    lines += [f"  {count} x {place}" for place, count in shapes.items()]
    costly = [jobs[each.point.run_dir] for each in wanted if jobs[each.point.run_dir].cluster.kind == "slurm"]
    if costly:
        lines.append(f"  {cost_in_words(costly)}")
    states = Counter(each.state for each in seen if each not in wanted and each not in starved)
    lines += [f"  {count} {state} already" for state, count in states.items()]
    if starved:
        lines.append(f"  {len(starved)} out of memory before, left out (resume --out-of-memory starts them)")
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
    registry: Registry, points: Sequence[Point], jobs: dict[Path, Job], skipped: Sequence[Skipped]
) -> int:
    """Shows the scripts of a sweep without touching anything."""
    seen = look_at_all(points)
    wanted, starved = _sort(seen, jobs, out_of_memory=False, anew=True)
    sys.stderr.write(_plan_in_words(registry, seen, wanted, starved, jobs, skipped))
    remote = [each for each in wanted if jobs[each.point.run_dir].cluster.kind == "slurm"]
    busy = [*(each for each in seen if each.state in BUSY), *_busy_besides(registry, points)]
    arrays, first = _arrays(remote, jobs, busy)
    for array in arrays:
        after = first if array.after is None else [f"ID_OF_ARRAY_{array.after + 1}"]
        script = _submission(registry, array, registry.name, after).script(planned=True)
        sys.stdout.write(f"{script}\n")
    return EXIT_OK


def _arrays(
    wanted: Sequence[Seen], jobs: dict[Path, Job], busy: Sequence[Seen]
) -> tuple[list[Array], list[str]]:
    """The arrays of points, and ids of the jobs that have to end before the first of them may start.

    Points of the sweep that SLURM has already count for ``cluster.max_running`` as well.
    """
    points = [(each.point, jobs[each.point.run_dir]) for each in wanted]
    limit = min((job.cluster.max_running for _, job in points), default=1)
    there = [each for each in busy if each.ticket is not None]
    left = limit - len(there)
    if left > 0:
        return arrays_of(points, left), []
    ids = {each.job_id.partition("_")[0] for each in there if each.job_id is not None}
    return arrays_of(points, limit), sorted(ids)


def _submission(registry: Registry, array: Array, name: str, after: Sequence[str]) -> Submission:
    run_dirs = [point.run_dir for point in array.points]
    return Submission(array.jobs, run_dirs, registry.path, name, at_once=array.at_once, after=after)


def _submit(registry: Registry, wanted: Sequence[Seen], jobs: dict[Path, Job], busy: Sequence[Seen]) -> None:
    """Submits points, those of equal shape as one array."""
    arrays, first = _arrays(wanted, jobs, busy)
    submitted: list[str] = []
    for array in arrays:
        after = first if array.after is None else [submitted[array.after]]
        # A name that no other job has, by which they are found again if this process dies while it submits.
        submission = _submission(registry, array, f"{registry.name}.{uuid.uuid4().hex[:8]}", after)
        folders = [RunFolder(path) for path in submission.run_dirs]
        ids = submit(submission, folders, [point.overrides for point in array.points])
        submitted.append(ids[0].partition("_")[0])
        tasks = f" to {submitted[-1]}_{len(ids) - 1}" if len(ids) > 1 else ""
        waits = f", after job {', '.join(after)}" if after else ""
        if array.jobs[0].cluster.parsable:
            sys.stdout.write(f"{submitted[-1]}\n")
        sys.stderr.write(f"submitted {ids[0]}{tasks}: {len(ids)} x {submission.shape.describe()}{waits}\n")


def _run_here(seen: Sequence[Seen], jobs: dict[Path, Job]) -> bool:
    """Runs points one after another; one that fails does not keep the next from running.

    Returns:
        whether somebody asked to stop.
    """
    names = labels([each.point.overrides for each in seen])
    for number, (name, each) in enumerate(zip(names, seen, strict=True), start=1):
        sys.stderr.write(f"[{number}/{len(seen)}] {name}\n")
        if _run_point(jobs[each.point.run_dir], each.point) in STOPPED:
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
    told: dict[Path, str] = {}
    wait = FOLLOW_SECONDS
    try:
        while True:
            before = dict(told)
            try:
                seen = look_and_close(points)
            except SlurmError as error:
                sys.stderr.write(f"WARNING {error}\n")
                time.sleep(LONGEST_FOLLOW_SECONDS)
                continue
            for name, each in zip(names, seen, strict=True):
                if told.get(each.point.run_dir, "pending") != each.state:
                    about = f" ({each.about})" if each.kind else ""
                    sys.stderr.write(f"{name}: {each.state}{about}\n")
                told[each.point.run_dir] = each.state
            if not any(each.state in BUSY for each in seen):
                return False
            wait = FOLLOW_SECONDS if told != before else min(1.3 * wait, LONGEST_FOLLOW_SECONDS)
            time.sleep(wait)
    except KeyboardInterrupt:
        sys.stderr.write("\nnot following any more; the jobs go on\n")
        return True


def _conclude(registry: Registry, points: Sequence[Point], jobs: dict[Path, Job], stopped: bool) -> int:
    """Shows the table, names what did not complete, and decides the exit code."""
    seen = look_at_all(points)
    sys.stdout.write(aligned(rows_of(seen)))
    sys.stdout.flush()
    left = [each for each in seen if each.state not in ("completed", *BUSY)]
    if left:
        names = labels([point.overrides for point in points])
        named = dict(zip([point.run_dir for point in points], names, strict=True))
        lines = "".join(
            f"  {named[each.point.run_dir]}: {each.about if each.kind else each.state}\n" for each in left
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
        # W&B's client raises errors of many kinds. The table is in the sweep's folder in any case.
        sys.stderr.write(f"WARNING the table could not be logged to W&B: {type(error).__name__}: {error}\n")
