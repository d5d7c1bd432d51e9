"""Start the points of a sweep that are not complete: one by one here, or on SLURM in arrays by shape."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.compose.composer import Composed
from harness.compose.verb import guarded
from harness.config.cluster import CLUSTERS
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch.begin import begin
from harness.launch.queue import SlurmError
from harness.launch.slurm import Shape, Submission, shape_of
from harness.launch.state import BUSY, HELD, RunState, SlurmJobRecord, read_states, record_lost
from harness.launch.submit import confirm, cost_in_words, submit
from harness.launch.sweep.registry import (
    Point,
    Registry,
    Skipped,
    constant_labels,
    folder_of,
    labels,
    sets_label,
    unique_points,
)
from harness.launch.sweep.table import rows_of, table_text
from harness.metrics.views import log_sweep
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, UserError

# SLURM's default MaxArraySize is 1001.
LARGEST_ARRAY = 1000


@dataclass(frozen=True)
class Array:
    """Points that are submitted as one job array.

    Attributes:
        points: the points, all of one shape.
        at_once: maximum number of points that run at once.
        after: index of the array that must end first; None for an array that starts at once.
    """

    points: list[Point]
    jobs: list[Job]
    at_once: int
    after: int | None


def arrays_of(points: Sequence[tuple[Point, Job]], limit: int) -> list[Array]:
    """Group points into arrays of which at most ``limit`` points run at once, over all arrays.

    SLURM limits each array separately, so the limit is divided among the arrays. If there are more arrays
    than the limit, some wait until another one has ended.
    """
    groups: dict[Shape, list[tuple[Point, Job]]] = {}
    for point, job in points:
        groups.setdefault(shape_of(job), []).append((point, job))
    pieces = [
        group[start : start + LARGEST_ARRAY]
        for group in groups.values()
        for start in range(0, len(group), LARGEST_ARRAY)
    ]
    counts = [len(piece) for piece in pieces]
    after = _predecessors(counts, limit)
    at_once = _shares(counts, limit) if len(pieces) <= limit else [1] * len(pieces)
    return [
        Array([point for point, _ in piece], [job for _, job in piece], share, before)
        for piece, share, before in zip(pieces, at_once, after, strict=True)
    ]


def _shares(counts: Sequence[int], limit: int) -> list[int]:
    shares = [1] * len(counts)
    for _ in range(limit - len(counts)):
        longest = max(range(len(counts)), key=lambda index: counts[index] / shares[index], default=None)
        if longest is None or counts[longest] <= shares[longest]:
            break
        shares[longest] += 1
    return shares


def _predecessors(counts: Sequence[int], limit: int) -> list[int | None]:
    """Return the array that each one waits for, so that at most ``limit`` arrays run at once."""
    chains = min(limit, len(counts))
    last: list[int | None] = [None] * chains
    lengths = [0] * chains
    after = []
    for index, count in enumerate(counts):
        shortest = lengths.index(min(lengths))
        after.append(last[shortest])
        last[shortest] = index
        lengths[shortest] += count
    return after


SKIPPED_SHOWN = 10
# Interval between queries of the queue: short after a change, then increasing.
FOLLOW_SECONDS, LONGEST_FOLLOW_SECONDS = 2.0, 30.0

Task = tuple[Point, Job]


def sweep(composed: Sequence[Composed]) -> int:
    """Run a multirun; return the exit code: 0 if all valid points are complete or submitted."""
    legal = [each for each in composed if each.job is not None]
    skipped = _skipped(composed)
    jobs = [each.job for each in legal if each.job is not None]
    if not jobs:
        reasons = "".join(f"  {line}\n" for line in _reasons(skipped))
        raise UserError(f"none of the {len(composed)} points is a valid job:\n{reasons}".rstrip())
    registry = Registry(folder_of(jobs))
    tasks = [(point, with_group(job, registry)) for point, job in unique_points(legal)]
    if jobs[0].cluster.dry_run:
        return _show_dry(registry, tasks, skipped)
    with registry.controlled():
        for point, job in tasks:
            RunFolder(point.run_dir).plan(job, point.overrides)
        registry.add([point for point, _ in tasks], skipped)
        # Start the jobs as composed now: labels such as the partition or the time limit may have changed.
        stopped, submitted_only = _start(registry, tasks, skipped, rerun=True)
    return _finish(registry, tasks, stopped, submitted_only)


def _skipped(composed: Sequence[Composed]) -> list[Skipped]:
    constant = constant_labels([each.overrides for each in composed])
    return [
        Skipped(
            each.overrides,
            each.reason,
            tuple(o for o in each.overrides if sets_label(o) and o not in constant),
        )
        for each in composed
        if each.job is None
    ]


def resume(registry: Registry, *, out_of_memory: bool = False) -> int:
    """Start the points of an existing sweep that are not complete; return the exit code.

    Args:
        out_of_memory: also start points that ran out of memory; they fail again unless something has changed.
    """
    with registry.controlled():
        tasks = [(point, point.job) for point in registry.points()]
        stopped, submitted_only = _start(registry, tasks, [], out_of_memory=out_of_memory)
    return _finish(registry, tasks, stopped, submitted_only)


def with_group(job: Job, registry: Registry) -> Job:
    """Return the job with a group of W&B: the sweep's, if it has none."""
    return with_value(job, "metrics.wandb_group", job.metrics.wandb_group or registry.name)


def states_of(points: Sequence[Point]) -> list[RunState]:
    """Return the states of points; write missing rows of ended points."""
    seen, closed = record_lost([point.run_dir for point in points])
    if closed:
        counts = Counter(each.kind or each.state for each in closed)
        named = ", ".join(f"{count} {name}" for name, count in counts.items())
        count = f"{len(closed)} point{'s' if len(closed) > 1 else ''}"
        sys.stderr.write(f"{count} ended without a result: {named}\n")
    return seen


def _start(
    registry: Registry,
    tasks: Sequence[Task],
    skipped: Sequence[Skipped],
    *,
    out_of_memory: bool = False,
    rerun: bool = False,
) -> tuple[bool, bool]:
    """Print the plan, ask before a costly submission, then submit points to SLURM and run the local ones.

    Args:
        tasks: points and their jobs.
        skipped: points that are not valid jobs.
        out_of_memory: also start points that ran out of memory.
        rerun: also start completed points whose job has ``checkpoint.resume=false``.

    Returns:
        whether the user interrupted the sweep, and whether all started points were only submitted.
    """
    for point, _ in tasks:
        SlurmJobRecord.read(point.run_dir)  # without a readable record a point could be submitted twice
    seen = states_of([point for point, _ in tasks])
    wanted, oom = _select(tasks, seen, out_of_memory=out_of_memory, rerun=rerun)
    sys.stderr.write(_plan_in_words(registry, tasks, seen, wanted, oom, skipped))
    remote = [each for each in wanted if each[1].cluster.kind == "slurm"]
    others = [each for each in wanted if each not in remote]
    if remote:
        confirm([job for _, job in remote])
        submit_points(registry, remote, busy_points(registry, tasks, seen))
    return _run_here(others), not others and not oom


def busy_points(registry: Registry, tasks: Sequence[Task], seen: Sequence[RunState]) -> list[RunState]:
    """Return the pending and running points, including those that other commands have added to the sweep."""
    typed = {os.path.normpath(point.run_dir) for point, _ in tasks}
    others = [each.run_dir for each in registry.points() if os.path.normpath(each.run_dir) not in typed]
    return [each for each in (*seen, *read_states(others)) if each.state in BUSY]


def _select(
    tasks: Sequence[Task], seen: Sequence[RunState], *, out_of_memory: bool, rerun: bool
) -> tuple[list[Task], list[Task]]:
    """Return the points to start, and those left out because they ran out of memory."""
    wanted, oom = [], []
    for task, each in zip(tasks, seen, strict=True):
        again = rerun and each.state == "completed" and not task[1].checkpoint.resume
        if each.kind == "out_of_memory" and not out_of_memory:
            oom.append(task)
        elif again or each.state not in ("completed", *HELD):
            wanted.append(task)
    return wanted, oom


def _plan_in_words(
    registry: Registry,
    tasks: Sequence[Task],
    seen: Sequence[RunState],
    wanted: Sequence[Task],
    oom: Sequence[Task],
    skipped: Sequence[Skipped],
) -> str:
    lines = [f"{registry.path}: {len(seen) + len(skipped)} points, {len(wanted)} to run"]
    shapes = Counter(_resources(job) for _, job in wanted)
    lines += [f"  {count} x {resources}" for resources, count in shapes.items()]
    costly = [job for _, job in wanted if job.cluster.kind == "slurm"]
    if costly:
        lines.append(f"  {cost_in_words(costly)}")
    states = Counter(
        each.state for task, each in zip(tasks, seen, strict=True) if task not in wanted and task not in oom
    )
    lines += [f"  {count} {state} already" for state, count in states.items()]
    if oom:
        lines.append(f"  {len(oom)} out of memory before, left out (resume --out-of-memory starts them)")
    if skipped:
        lines.append(f"  {len(skipped)} skipped, which are not valid jobs")
        lines += [f"    {line}" for line in _reasons(skipped, [point.overrides for point, _ in tasks])]
    return "\n".join(lines) + "\n"


def _resources(job: Job) -> str:
    if job.cluster.kind == "slurm":
        return shape_of(job).describe()
    if job.cluster.kind != "local":
        return f"{job.world_size} rank{'s' if job.world_size > 1 else ''}, cluster.kind={job.cluster.kind}"
    return f"{job.world_size} rank{'s' if job.world_size > 1 else ''} here, one after another"


def _reasons(skipped: Sequence[Skipped], others: Sequence[list[str]] = ()) -> list[str]:
    names = labels([each.overrides for each in skipped], others)
    lines = [f"{name}: {each.reason}" for name, each in zip(names, skipped, strict=True)]
    left = len(lines) - SKIPPED_SHOWN
    return lines if left <= 1 else [*lines[:SKIPPED_SHOWN], f"and {left} more"]


def _show_dry(registry: Registry, tasks: Sequence[Task], skipped: Sequence[Skipped]) -> int:
    seen = read_states([point.run_dir for point, _ in tasks])
    wanted, oom = _select(tasks, seen, out_of_memory=False, rerun=True)
    sys.stderr.write(_plan_in_words(registry, tasks, seen, wanted, oom, skipped))
    remote = [each for each in wanted if each[1].cluster.kind == "slurm"]
    arrays, first = _arrays(remote, busy_points(registry, tasks, seen))
    for array in arrays:
        after = first if array.after is None else [f"ID_OF_ARRAY_{array.after + 1}"]
        script = _submission(registry, array, registry.name, after).script(planned=True)
        sys.stdout.write(f"{script}\n")
    return EXIT_OK


def _arrays(wanted: Sequence[Task], busy: Sequence[RunState]) -> tuple[list[Array], list[str]]:
    """Return the arrays to submit, and ids of the jobs that must end before the first array may start.

    Points of the sweep that are already in SLURM's queue count towards ``cluster.max_running``.
    """
    limit = min((job.cluster.max_running for _, job in wanted), default=1)
    there = [each for each in busy if each.job_record is not None]
    left = limit - len(there)
    if left > 0:
        return arrays_of(wanted, left), []
    ids = {each.job_id.partition("_")[0] for each in there if each.job_id is not None}
    return arrays_of(wanted, limit), sorted(ids)


def _submission(registry: Registry, array: Array, name: str, after: Sequence[str]) -> Submission:
    run_dirs = [point.run_dir for point in array.points]
    return Submission(array.jobs, run_dirs, registry.path, name, at_once=array.at_once, after=after)


def submit_points(registry: Registry, wanted: Sequence[Task], busy: Sequence[RunState]) -> None:
    """Submit points; those of equal shape form one array."""
    arrays, first = _arrays(wanted, busy)
    submitted: list[str] = []
    for array in arrays:
        after = first if array.after is None else [submitted[array.after]]
        # A unique name, which identifies the jobs if this process dies while it submits.
        submission = _submission(registry, array, f"{registry.name}.{uuid.uuid4().hex[:8]}", after)
        folders = [RunFolder(path) for path in submission.run_dirs]
        ids = submit(submission, folders, [point.overrides for point in array.points])
        submitted.append(ids[0].partition("_")[0])
        tasks = f" to {submitted[-1]}_{len(ids) - 1}" if len(ids) > 1 else ""
        waits = f", after job {', '.join(after)}" if after else ""
        if array.jobs[0].cluster.parsable:
            sys.stdout.write(f"{submitted[-1]}\n")
        sys.stderr.write(f"submitted {ids[0]}{tasks}: {len(ids)} x {submission.shape.describe()}{waits}\n")


def _run_here(tasks: Sequence[Task]) -> bool:
    """Run points one after another; continue after a failed point."""
    names = labels([point.overrides for point, _ in tasks])
    for number, (name, (point, job)) in enumerate(zip(names, tasks, strict=True), start=1):
        sys.stderr.write(f"[{number}/{len(tasks)}] {name}\n")
        if run_point(job, point) in STOPPED:
            return True
    return False


def run_point(job: Job, point: Point) -> int:
    """Run one point in separate processes; return its exit code."""
    from harness.launch.local import launch

    def run() -> int:
        folder = RunFolder(point.run_dir)
        if job.cluster.kind != "local":
            return CLUSTERS[job.cluster.kind].load()(job, folder, point.overrides)
        # Points of a sweep are compared, so no point resumes from another's checkpoint.
        begin(folder, job, point.overrides)
        return launch(job, folder, apart=True)

    return guarded(run)


def follow_points(points: Sequence[Point], names: Sequence[str]) -> bool:
    """Wait until no point is pending or running; print changes of state.

    Returns:
        whether the user interrupted the wait.
    """
    shown: dict[Path, str] = {}
    wait = FOLLOW_SECONDS
    try:
        while True:
            before = dict(shown)
            try:
                seen = states_of(points)
            except SlurmError as error:
                sys.stderr.write(f"WARNING {error}\n")
                time.sleep(LONGEST_FOLLOW_SECONDS)
                continue
            for name, each in zip(names, seen, strict=True):
                if shown.get(each.run_dir, "pending") != each.state:
                    about = f" ({each.about})" if each.kind else ""
                    sys.stderr.write(f"{name}: {each.state}{about}\n")
                shown[each.run_dir] = each.state
            if not any(each.state in BUSY for each in seen):
                return False
            wait = FOLLOW_SECONDS if shown != before else min(1.3 * wait, LONGEST_FOLLOW_SECONDS)
            time.sleep(wait)
    except KeyboardInterrupt:
        sys.stderr.write("\nstopped following; the jobs continue\n")
        return True


def _finish(registry: Registry, tasks: Sequence[Task], stopped: bool, submitted_only: bool) -> int:
    points, waits = [point for point, _ in tasks], any(job.cluster.wait for _, job in tasks)
    if submitted_only and not waits:
        sys.stderr.write(f"harness sweep status {registry.path}\n")
        return EXIT_OK
    if waits and not stopped:
        stopped = follow_points(points, labels([point.overrides for point in points]))
    seen = read_states([point.run_dir for point in points])
    sys.stdout.write(table_text(rows_of(points, seen)))
    sys.stdout.flush()
    names = labels([point.overrides for point in points])
    left = [
        f"  {name}: {each.about if each.kind else each.state}\n"
        for name, each in zip(names, seen, strict=True)
        if each.state not in ("completed", *BUSY)
    ]
    if left:
        sys.stderr.write(
            f"{len(left)} of {len(seen)} points did not complete:\n{''.join(left)}"
            f"harness sweep resume {registry.path}\n"
        )
    if stopped:
        return EXIT_INTERRUPTED
    log_table(registry, tasks, seen)
    return 1 if left else EXIT_OK


def log_table(registry: Registry, tasks: Sequence[Task], seen: Sequence[RunState]) -> None:
    """Log the table of a sweep to W&B if its runs use W&B."""
    logged = [job for _, job in tasks if job.metrics.wandb]
    if not logged:
        return
    try:
        rows = rows_of([point for point, _ in tasks], seen, full_reasons=True)
        log_sweep(logged[0].metrics, registry.path, registry.name, rows)
    except Exception as error:
        # W&B's client raises errors of many kinds. The table is in the sweep's folder in any case.
        sys.stderr.write(f"WARNING the table could not be logged to W&B: {type(error).__name__}: {error}\n")
