"""Start the points of a sweep that are not complete: one by one here, or on SLURM in arrays by shape."""

from __future__ import annotations

import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.compose.composer import Composed
from harness.compose.verb import guarded
from harness.config.cluster import CLUSTERS
from harness.config.fields import with_value
from harness.config.job import Job
from harness.launch.begin import begin
from harness.launch.listing import rows_of, table_of
from harness.launch.queue import largest_array
from harness.launch.slurm import Shape, Submission, shape_of
from harness.launch.state import BUSY, HELD, RunState, SlurmJobRecord, read_states
from harness.launch.submit import confirm, cost_in_words, follow_points, states_of, submit
from harness.launch.sweep.folder import (
    Point,
    Skipped,
    SweepFolder,
    constant_labels,
    folder_of,
    labels,
    names_of,
    sets_label,
    unique_points,
)
from harness.metrics.console import progress
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_INTERRUPTED, EXIT_OK, STOPPED, UserError
from harness.util.tables import to_text
from harness.util.words import plural

SKIPPED_SHOWN = 10


@dataclass(frozen=True)
class Array:
    """Points of one shape that are submitted as one job array.

    At most ``at_once`` of them run at once. ``after`` is the index of the array that must end
    first, if any.
    """

    points: list[Point]
    at_once: int
    after: int | None


def arrays_of(points: Sequence[Point], limit: int) -> list[Array]:
    """Group points into arrays of which at most ``limit`` points run at once, over all arrays.

    SLURM limits each array separately, so each has an equal share. Of more arrays than the limit
    one point runs at once, and an array waits for the one ``limit`` places before it.
    """
    by_shape: dict[Shape, list[Point]] = {}
    for point in points:
        by_shape.setdefault(shape_of(point.job), []).append(point)
    most = largest_array()
    pieces = []
    for group in by_shape.values():
        pieces += [group[start : start + most] for start in range(0, len(group), most)]
    arrays = []
    for index, piece in enumerate(pieces):
        share, rest = divmod(limit, len(pieces))
        share = share + 1 if index < rest else max(1, share)
        arrays.append(Array(piece, share, index - limit if index >= limit else None))
    return arrays


@dataclass(frozen=True)
class Selection:
    """The points of a command, and those of them to start.

    Attributes:
        points: all points; ``seen`` are their states.
        wanted: those to start.
        oom: those left out because they ran out of memory.
    """

    folder: SweepFolder
    points: Sequence[Point]
    seen: Sequence[RunState]
    wanted: Sequence[Point]
    oom: Sequence[Point] = ()

    @classmethod
    def of(
        cls,
        folder: SweepFolder,
        points: Sequence[Point],
        seen: Sequence[RunState],
        *,
        out_of_memory: bool = False,
        rerun: bool = False,
    ) -> Selection:
        """Select what is not complete.

        Args:
            out_of_memory: also points that ran out of memory, and would do so again.
            rerun: also completed points whose job has ``checkpoint.resume=false``.
        """
        wanted = []
        oom = []
        for point, each in zip(points, seen, strict=True):
            again = rerun and each.state == "completed" and not point.job.checkpoint.resume
            if each.kind == "out_of_memory" and not out_of_memory:
                oom.append(point)
            elif again or each.state not in ("completed", *HELD):
                wanted.append(point)
        return cls(folder, points, seen, wanted, oom)

    @property
    def remote(self) -> list[Point]:
        """The points to submit to SLURM."""
        return [point for point in self.wanted if point.job.cluster.kind == "slurm"]

    def in_words(self, skipped: Sequence[Skipped]) -> str:
        """Say how many points run, where, and what is skipped."""
        points = plural(len(self.seen) + len(skipped), "point")
        lines = [f"{self.folder.path}: {points}, {len(self.wanted)} to run"]
        shapes = Counter(_resources(point.job) for point in self.wanted)
        lines += [f"  {count} x {resources}" for resources, count in shapes.items()]
        if self.remote:
            lines.append(f"  {cost_in_words([point.job for point in self.remote])}")
        started = [*self.wanted, *self.oom]
        states = Counter(
            each.state
            for point, each in zip(self.points, self.seen, strict=True)
            if point not in started
        )
        lines += [f"  {count} {state} already" for state, count in states.items()]
        if self.oom:
            left = "out of memory before, left out (resume --out-of-memory starts them)"
            lines.append(f"  {len(self.oom)} {left}")
        if skipped:
            lines.append(f"  {len(skipped)} skipped, which are not valid jobs")
            others = [point.overrides for point in self.points]
            lines += [f"    {line}" for line in _reasons(skipped, others)]
        return "\n".join(lines) + "\n"

    def arrays(self) -> list[Array]:
        """Return the arrays to submit."""
        limit = min((point.job.cluster.max_running for point in self.remote), default=1)
        return arrays_of(self.remote, limit)

    def submission(self, array: Array, name: str, after: Sequence[str]) -> Submission:
        """Return an array as it is submitted under a name, after other jobs."""
        return Submission(
            [each.job for each in array.points],
            [each.run_dir for each in array.points],
            self.folder.path,
            name,
            at_once=array.at_once,
            after=after,
        )

    def submit(self) -> None:
        """Submit the points for SLURM; those of equal shape form one array."""
        submitted: list[str] = []
        for array in self.arrays():
            after = [] if array.after is None else [submitted[array.after]]
            # A unique name, which identifies the jobs if this process dies while it submits.
            submission = self.submission(array, f"{self.folder.name}.{uuid.uuid4().hex[:8]}", after)
            folders = [RunFolder(path) for path in submission.run_dirs]
            ids = submit(submission, folders, [point.overrides for point in array.points])
            submitted.append(ids[0].partition("_")[0])
            tasks = f" to {submitted[-1]}_{len(ids) - 1}" if len(ids) > 1 else ""
            waits = f", after job {', '.join(after)}" if after else ""
            if submission.jobs[0].cluster.parsable:
                sys.stdout.write(f"{submitted[-1]}\n")
            shape = submission.shape.describe()
            sys.stderr.write(f"submitted {ids[0]}{tasks}: {len(ids)} x {shape}{waits}\n")


def sweep(composed: Sequence[Composed]) -> int:
    """Run a multirun; return the exit code: 0 if all valid points are complete or submitted."""
    legal = [each for each in composed if each.job is not None]
    constant = constant_labels([each.overrides for each in composed])
    skipped = []
    for each in composed:
        if each.job is None:
            swept = [text for text in each.overrides if sets_label(text) and text not in constant]
            skipped.append(Skipped(each.overrides, each.reason, tuple(swept)))
    if not legal:
        reasons = "".join(f"  {line}\n" for line in _reasons(skipped))
        raise UserError(
            f"none of {plural(len(composed), 'point')} is a valid job:\n{reasons}".rstrip()
        )
    folder = SweepFolder(folder_of([each.job for each in legal]))
    points = [in_group(point, folder) for point in unique_points(legal)]
    if legal[0].job.cluster.dry_run:
        return _show_dry(folder, points, skipped)
    with folder.controlled():
        for point in points:
            RunFolder(point.run_dir).plan(point.job, point.overrides)
        folder.add(points, skipped)
        # Start the jobs as composed now: labels such as the partition or the time limit may have
        # changed.
        stopped, submitted_only = _start(folder, points, skipped, rerun=True)
    return _finish(folder, points, stopped, submitted_only)


def resume(folder: SweepFolder, *, out_of_memory: bool = False) -> int:
    """Start the points of an existing sweep that are not complete; return the exit code.

    With ``out_of_memory`` also points that ran out of memory, which fail again unless something has
    changed.
    """
    with folder.controlled():
        points = folder.points()
        stopped, submitted_only = _start(folder, points, [], out_of_memory=out_of_memory)
    return _finish(folder, points, stopped, submitted_only)


def in_group(point: Point, folder: SweepFolder) -> Point:
    """Return the point, its job with a group of W&B: the sweep's, if it has none."""
    group = point.job.metrics.wandb_group or folder.name
    return replace(point, composed=with_value(point.job, "metrics.wandb_group", group))


def _start(
    folder: SweepFolder,
    points: Sequence[Point],
    skipped: Sequence[Skipped],
    *,
    out_of_memory: bool = False,
    rerun: bool = False,
) -> tuple[bool, bool]:
    """Print the plan, ask before a costly submission, then submit points to SLURM and run the local ones.

    Return whether the user interrupted the sweep, and whether all started points were only
    submitted.
    """
    for point in points:
        SlurmJobRecord.read(
            point.run_dir
        )  # without a readable record a point could be submitted twice
    selection = Selection.of(
        folder, points, states_of(points), out_of_memory=out_of_memory, rerun=rerun
    )
    sys.stderr.write(selection.in_words(skipped))
    if selection.remote:
        confirm([point.job for point in selection.remote])
        selection.submit()
    others = [each for each in selection.wanted if each not in selection.remote]
    return _run_here(others), not others and not selection.oom


def _resources(job: Job) -> str:
    kind = job.cluster.kind
    if kind == "slurm":
        return shape_of(job).describe()
    where = " here, one after another" if kind == "local" else f", cluster.kind={kind}"
    return f"{plural(job.world_size, 'rank')}{where}"


def _reasons(skipped: Sequence[Skipped], others: Sequence[list[str]] = ()) -> list[str]:
    names = labels([each.overrides for each in skipped], others)
    lines = [f"{name}: {each.reason}" for name, each in zip(names, skipped, strict=True)]
    left = len(lines) - SKIPPED_SHOWN
    return lines if left <= 1 else [*lines[:SKIPPED_SHOWN], f"and {left} more"]


def _show_dry(folder: SweepFolder, points: Sequence[Point], skipped: Sequence[Skipped]) -> int:
    seen = read_states([point.run_dir for point in points])
    selection = Selection.of(folder, points, seen, rerun=True)
    sys.stderr.write(selection.in_words(skipped))
    for array in selection.arrays():
        after = [] if array.after is None else [f"ID_OF_ARRAY_{array.after + 1}"]
        sys.stdout.write(
            f"{selection.submission(array, folder.name, after).script(planned=True)}\n"
        )
    return EXIT_OK


def _run_here(points: Sequence[Point]) -> bool:
    """Run points one after another; return whether the user interrupted them."""
    names = names_of(points)
    with progress(len(points)) as show:
        for name, point in zip(names, points, strict=True):
            show(name)
            if run_point(point) in STOPPED:
                return True
    return False


def run_point(point: Point) -> int:
    """Run one point in separate processes; return its exit code."""
    from harness.launch.local import launch

    def run() -> int:
        folder = RunFolder(point.run_dir)
        job = point.job
        if job.cluster.kind != "local":
            return CLUSTERS[job.cluster.kind].load()(job, folder, point.overrides)
        # Points of a sweep are compared, so no point resumes from another's checkpoint.
        begin(folder, job, point.overrides)
        return launch(job, folder, apart=True)

    return guarded(run)


def _finish(
    folder: SweepFolder, points: Sequence[Point], stopped: bool, submitted_only: bool
) -> int:
    names = names_of(points)
    waits = any(each.job.cluster.wait for each in points)
    if submitted_only and not waits:
        sys.stderr.write(f"harness runs {folder.path}\n")
        return EXIT_OK
    if waits and not stopped:
        stopped = follow_points(points, names) is None
    seen = read_states([point.run_dir for point in points])
    sys.stdout.write(to_text(table_of(rows_of(points, seen))))
    sys.stdout.flush()
    left = [
        f"  {name}: {each.about if each.kind else each.state}\n"
        for name, each in zip(names, seen, strict=True)
        if each.state not in ("completed", *BUSY)
    ]
    if left:
        sys.stderr.write(
            f"{len(left)} of {plural(len(seen), 'point')} did not complete:\n{''.join(left)}"
            f"harness sweep resume {folder.path}\n"
        )
    if stopped:
        return EXIT_INTERRUPTED
    return 1 if left else EXIT_OK
