"""Points of a sweep: ``sweep.jsonl``, which is only appended to, and the run folders of points."""

from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import shlex
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.compose.composer import Composed
from harness.config.fields import LABEL, leaves
from harness.config.job import Job
from harness.metrics.jsonl import repair_tail
from harness.run.folder import run_folders
from harness.util.encoding import flat_items, parse_object
from harness.util.errors import UserError
from harness.util.files import LockedError, lock, sync_file

FILE = "sweep.jsonl"
LOCK = ".sweep.lock"
LONGEST_NAME = 120
_ALONE = "the only point"


@dataclass(frozen=True)
class Point:
    """One job of a sweep; ``composed`` is the job if this process has composed it."""

    id: str
    run_dir: Path
    overrides: list[str]
    composed: Job | None = field(default=None, repr=False, compare=False)

    @functools.cached_property
    def job(self) -> Job:
        """The resolved job, composed or read from its run folder."""
        if self.composed is not None:
            return self.composed
        try:
            return Job.read(self.run_dir / "job.json")
        except FileNotFoundError:
            command = " ".join(self.overrides)
            raise UserError(
                f"{self.run_dir}: the run folder is gone; it was created by: {command}"
            ) from None


@dataclass(frozen=True)
class Skipped:
    """A point that is not a valid job.

    Attributes:
        reason: the violated rule, in one line.
        swept: its overrides of labels that are axes of the sweep.
    """

    overrides: list[str]
    reason: str
    swept: tuple[str, ...] = ()


class SweepFolder:
    """The folder of a sweep, ``runs_dir/<name>``, with the points' run folders of this name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.name

    @classmethod
    def open(cls, path: Path) -> SweepFolder:
        """Return the folder of an existing sweep."""
        sweep = cls(path)
        if not sweep.exists:
            raise UserError(f"{path}: no sweep was started in this folder{sweep.neighbours()}")
        return sweep

    @property
    def exists(self) -> bool:
        """Whether a sweep was started in the folder."""
        return (self.path / FILE).is_file()

    def neighbours(self) -> str:
        """Return the sweeps next to this folder, formatted to end an error message; empty without any."""
        known = sorted(str(file.parent) for file in self.path.parent.glob(f"*/{FILE}"))
        return f"; would work: {', '.join(known)}" if known else ""

    @contextmanager
    def controlled(self) -> Iterator[None]:
        """Hold the sweep's lock, which is released when the process ends."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = lock(self.path / LOCK, create=True)
        except LockedError:
            raise UserError(
                f"{self.path}: another process is starting the jobs of this sweep; wait for it"
            ) from None
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot write the folder of the sweep: {error}"
            ) from error
        try:
            yield
        finally:
            if held is not None:
                held.close()

    def add(self, points: Sequence[Point], skipped: Sequence[Skipped]) -> None:
        """Append the points that are not in the file yet."""
        known_points = {self._relative(point) for point in self.points()}
        known_skipped = {_identity(each) for each in self.skipped()}
        rows: list[dict[str, Any]] = [
            {"point": point.id, "run_dir": self._relative(point), "overrides": point.overrides}
            for point in points
            if self._relative(point) not in known_points
        ]
        rows += [
            {"skipped": each.reason, "overrides": each.overrides, "swept": each.swept}
            for each in skipped
            if _identity(each) not in known_skipped
        ]
        if rows:
            repair_tail(self.path / FILE)
            with (self.path / FILE).open("ab") as file:
                now = time.time()
                file.write(
                    "".join(json.dumps({**row, "time": now}) + "\n" for row in rows).encode()
                )
                sync_file(file)

    def points(self) -> list[Point]:
        """All points, in the order in which they were added."""
        found = {
            row["run_dir"]: Point(row["point"], self.path / row["run_dir"], row["overrides"])
            for row in self._rows()
            if "point" in row
        }
        return list(found.values())

    def skipped(self) -> list[Skipped]:
        """All skipped points, without duplicates."""
        found = [
            Skipped(row["overrides"], row["skipped"], tuple(row.get("swept", ())))
            for row in self._rows()
            if "skipped" in row
        ]
        # From the back, so of equal points the dictionary keeps the first, at the place of the last.
        kept = {_identity(each): each for each in reversed(found)}
        return list(reversed(kept.values()))

    def _relative(self, point: Point) -> str:
        # Relative, so that the folder of all runs can be moved.
        return os.path.relpath(point.run_dir, self.path)

    def _rows(self) -> list[dict[str, Any]]:
        """All rows, without a last one that a killed writer left incomplete."""
        path = self.path / FILE
        rows = []
        try:
            lines = path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from error
        for number, line in enumerate(lines, start=1):
            try:
                rows.append(_checked(parse_object(line)))
            except ValueError as error:
                if number < len(lines):
                    works = "would work: the file without this line, and without its point"
                    raise UserError(f"{path}: line {number} is damaged: {error}; {works}") from None
        return rows


def _checked(row: dict[str, Any]) -> dict[str, Any]:
    """Return the row. Raise ValueError unless its values are texts, and lists of texts."""
    texts = [row.get("point"), row.get("run_dir")] if "point" in row else [row.get("skipped")]
    for overrides in (row.get("overrides"), row.get("swept", [])):
        texts += overrides if isinstance(overrides, list) else [None]  # None is refused below
    if not all(isinstance(text, str) for text in texts) or not row.get("run_dir", "").isprintable():
        raise ValueError("it is neither a point nor a skipped one")
    return row


def folder_of(jobs: Sequence[Job]) -> Path:
    """Return the sweep folder of these jobs: the jobs' name, or all names joined if they differ."""
    names = sorted({job.name for job in jobs})
    name = "+".join(names)
    if len(name) > LONGEST_NAME:
        name = f"{names[0]}+{len(names) - 1}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return Path(jobs[0].runs_dir) / name


def points_in(folder: Path, levels: int = 1) -> list[Point]:
    """Return the points of a sweep folder, the run of a run folder, or all runs in the folders below.

    Runs are searched in ``levels`` of folders; with one, the folder of a name gives all its runs.
    """
    sweep = SweepFolder(folder)
    if sweep.exists:
        return sweep.points()
    found = run_folders(folder, levels)
    if not found:
        works = (
            sweep.neighbours() or "; would work: harness train, or the folder that runs_dir= names"
        )
        raise UserError(f"{folder}: no runs{works}")
    return [Point(path.name, path, typed_overrides(path)) for path in found]


def typed_overrides(run_dir: Path) -> list[str]:
    """Return the overrides that a run was last started with; empty if they are not recorded."""
    path = run_dir / "overrides.txt"
    return path.read_text().splitlines() if path.is_file() else []


def command_of(overrides: Iterable[str]) -> str:
    """Return the command that repeats a run."""
    return shlex.join(["harness", "train", *overrides])


def labels(overrides: Sequence[Sequence[str]], others: Sequence[Sequence[str]] = ()) -> list[str]:
    """Name each point by those of its overrides that not all points share, ``others`` included.

    A label field with a single value is left out, if the names differ without it.
    """
    constant = constant_labels((*overrides, *others))
    everywhere = [set(point) for point in (*overrides, *others)]
    shared = set.intersection(*everywhere) if everywhere else set()
    named = _without(overrides, shared | constant)
    if len(set(named)) < len(named):
        named = _without(overrides, shared)
    # In Hydra's syntax an override of a mapping's key begins with ++, and a colon of an axis has a
    # backslash. Users have not typed them.
    return [re.sub(r"(^| )\+\+|\\(?=:)", r"\1", name) or _ALONE for name in named]


def names_of(points: Sequence[Point]) -> list[str]:
    """Name points as ``labels`` does, and by its id a point that has no override of its own."""
    names = labels([point.overrides for point in points])
    return [point.id if name == _ALONE else name for name, point in zip(names, points, strict=True)]


def _without(points: Sequence[Sequence[str]], left_out: set[str]) -> list[str]:
    names = []
    for overrides in points:
        names.append(" ".join(override for override in overrides if override not in left_out))
    return names


def constant_labels(overrides: Sequence[Sequence[str]]) -> set[str]:
    """Return the overrides of labels that have one value in all points that set them."""
    everywhere: set[str] = set().union(*overrides)
    keys = Counter(map(override_key, everywhere))
    return {each for each in everywhere if sets_label(each) and keys[override_key(each)] == 1}


def sets_label(override: str) -> bool:
    """Whether an override sets a label field, or a key of one, and so does not change the job's id."""
    key = override_key(override)
    return any(key == name or key.startswith(f"{name}.") for name in _label_fields())


def override_key(override: str) -> str:
    """Return the field or group that an override sets."""
    return override.lstrip("+~").partition("=")[0]


@functools.cache
def _label_fields() -> frozenset[str]:
    return frozenset(name for name, role, _ in leaves(Job()) if role == LABEL)


def _identity(skipped: Skipped) -> tuple[tuple[str, ...], str]:
    kept = [text for text in skipped.overrides if text in skipped.swept or not sets_label(text)]
    return tuple(kept), skipped.reason


COMMAND_LABELS = {
    f"cluster.{name}"
    for name in ("confirm_gpu_hours", "dry_run", "max_running", "parsable", "wait")
}
"""Labels that configure the command that starts a sweep, not its runs."""


def unique_points(
    composed: Sequence[Composed], swept: Collection[str] | None = None
) -> list[Point]:
    """Return one point for each run folder, with its job.

    ``swept`` are labels: each of their values has a run of its own. None stands for those that
    ``swept_labels`` finds.
    """
    swept = swept_labels([each.job for each in composed]) if swept is None else swept
    if of_command := COMMAND_LABELS.intersection(swept):
        rule = "configures the command, not its runs; would work: one value for all points"
        raise UserError(f"{min(of_command)}: {rule}")
    found: dict[Path, Point] = {}
    for each in composed:
        path = run_dir_of(each.job, swept)
        found.setdefault(path, Point(each.job.id, path, each.overrides, each.job))
    return list(found.values())


def swept_labels(jobs: Sequence[Job]) -> set[str]:
    """Return the labels that differ between jobs of the same run folder.

    The name of a mapping ends with the key that differs.
    """
    first: dict[Path, dict[str, Any]] = {}
    names = set()
    for job in jobs:
        values = _label_values(job)
        other = first.setdefault(job.run_dir, values)
        for name in {**other, **values}:
            if values.get(name) != other.get(name):
                names.add(name)
    return names


def run_dir_of(job: Job, swept: Collection[str]) -> Path:
    """Return the run folder of a point: that of its job, with a digest of the swept labels added."""
    run_dir: Path = job.run_dir
    if not swept:
        return run_dir
    values = _label_values(job)
    pairs = [(name, values.get(name)) for name in sorted(swept)]
    digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()[:8]
    return run_dir.with_name(f"{run_dir.name}-{digest}")


def _label_values(job: Job) -> dict[str, Any]:
    labels_of_job = {name: value for name, role, value in leaves(job) if role == LABEL}
    return dict(flat_items(labels_of_job))
