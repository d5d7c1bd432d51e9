"""``sweep.jsonl``: which points a sweep has, and which ones it could not have. Only ever appended to."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.errors import UserError
from harness.job import Job
from harness.locks import Held, lock

FILE = "sweep.jsonl"
LOCK = ".sweep.lock"
LONGEST_NAME = 120


@dataclass(frozen=True)
class Point:
    """One job of a sweep.

    Attributes:
        id: of the job.
        run_dir: its run folder.
        overrides: what it was composed from.
    """

    id: str
    run_dir: Path
    overrides: list[str]

    @property
    def job(self) -> Job:
        """The resolved job, as its run folder has it.

        Raises:
            UserError: the folder is gone.
        """
        try:
            return Job.from_json((self.run_dir / "job.json").read_text())
        except FileNotFoundError:
            command = " ".join(self.overrides)
            raise UserError(f"{self.run_dir}: the run folder is gone; it was made by: {command}") from None


@dataclass(frozen=True)
class Skipped:
    """A point that no job can be made of.

    Attributes:
        overrides: what was to be composed.
        reason: the rule that forbids it, in one line.
    """

    overrides: list[str]
    reason: str


class Registry:
    """The folder of a sweep.

    Args:
        path: ``runs_dir/<name>``; run folders of its points lie in it, or beside it if they have other names.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Registry:
        """The registry of a sweep that exists.

        Raises:
            UserError: there is none.
        """
        if not (path / FILE).is_file():
            known = sorted(str(each.parent) for each in path.parent.glob(f"*/{FILE}"))
            works = f"; would work: {', '.join(known)}" if known else ""
            raise UserError(f"{path}: no sweep was started in this folder{works}")
        return cls(path)

    @property
    def name(self) -> str:
        """What people call it."""
        return self.path.name

    @contextmanager
    def controlled(self) -> Iterator[None]:
        """Keeps other controllers out; ends with the process however that ends.

        Raises:
            UserError: another one is at it, or the folder cannot be written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            held = lock(self.path / LOCK, create=True)
        except Held:
            raise UserError(
                f"{self.path}: another process is starting the jobs of this sweep; wait for it"
            ) from None
        except OSError as error:
            raise UserError(f"{self.path}: cannot write the folder of the sweep: {error}") from error
        try:
            yield
        finally:
            if held is not None:
                held.close()

    def add(self, points: Sequence[Point], skipped: Sequence[Skipped]) -> None:
        """Notes points that are not in it yet."""
        there = {point.id for point in self.points()}
        told = {(tuple(each.overrides), each.reason) for each in self.skipped()}
        rows: list[dict[str, Any]] = [
            {
                "point": point.id,
                # Relative, so that the folder of all runs can be moved.
                "run_dir": os.path.relpath(point.run_dir, self.path),
                "overrides": point.overrides,
            }
            for point in points
            if point.id not in there
        ]
        rows += [
            {"skipped": each.reason, "overrides": each.overrides}
            for each in skipped
            if (tuple(each.overrides), each.reason) not in told
        ]
        if rows:
            self._append(rows)

    def points(self) -> list[Point]:
        """All points, in the order in which they were added."""
        found = {
            row["point"]: Point(row["point"], self.path / row["run_dir"], row["overrides"])
            for row in self._rows()
            if "point" in row
        }
        return list(found.values())

    def skipped(self) -> list[Skipped]:
        """All points that could not be."""
        return [Skipped(row["overrides"], row["skipped"]) for row in self._rows() if "skipped" in row]

    def _rows(self) -> list[dict[str, Any]]:
        try:
            lines = (self.path / FILE).read_bytes().split(b"\n")
        except FileNotFoundError:
            return []
        rows = []
        for line in lines:
            # A writer that was killed leaves a part of a line; the next one begins a new line behind it.
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                rows.append(row)
        return rows

    def _append(self, rows: list[dict[str, Any]]) -> None:
        path = self.path / FILE
        now = time.time()
        text = "".join(json.dumps({**row, "time": now}) + "\n" for row in rows).encode()
        with path.open("ab+") as file:
            if file.tell() > 0:
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    text = b"\n" + text
            file.write(text)
            file.flush()
            os.fsync(file.fileno())


def folder_of(jobs: Sequence[Job]) -> Path:
    """The folder of the sweep that consists of these jobs: named as they are, all names if they differ."""
    names = sorted({job.name for job in jobs})
    name = "+".join(names)
    if len(name) > LONGEST_NAME:
        name = f"{names[0]}+{len(names) - 1}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return Path(jobs[0].runs_dir) / name


def labels(overrides: Sequence[Sequence[str]], others: Sequence[Sequence[str]] = ()) -> list[str]:
    """What tells points from each other, and from others: the overrides that not all of them have."""
    shared = set.intersection(*(set(each) for each in (*overrides, *others))) if overrides else set()
    return [" ".join(o for o in each if o not in shared) or "the only point" for each in overrides]
