"""A folder that is written in shards, by one process or by several at the same time.

TARGET/plan.json         what determines the content; written first
TARGET/.unfinished/      locks, and files of work that is not finished
TARGET/manifest.json     written last: the folder is complete
"""

import dataclasses
import json
import shutil
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from harness.util.encoding import parse_object, read_object
from harness.util.errors import ConfigError, DataError, MachineError
from harness.util.files import write_atomically
from harness.util.store import only_builder

MANIFEST = "manifest.json"
PLAN = "plan.json"
UNFINISHED = ".unfinished"
FORMAT_VERSION = 1


class Sized(Protocol):
    """A unit of work."""

    @property
    def nbytes(self) -> int:
        """Its size; only the ratio of sizes matters here."""


U = TypeVar("U", bound=Sized)


class ShardWriter(ABC):
    """Writes the shards of a folder. A shard is a list of units, which are finished one by one.

    Attributes:
        shards: units of each shard.
    """

    target: Path
    source_name: str
    shards: Sequence[Sequence[Any]]
    verb: str
    """Name of the verb, and of its part of the job."""
    noun: str
    """Name of the complete folder, for messages."""

    @property
    @abstractmethod
    def key(self) -> str:
        """Hash of everything that determines the content."""

    @property
    @abstractmethod
    def plan(self) -> dict[str, Any]:
        """Values that must not change until the folder is complete, by their names for errors."""

    @abstractmethod
    def missing(self, shard: int) -> Sequence[Any]:
        """Units of a shard that are not finished."""

    @abstractmethod
    def write(self, shards: Sequence[int], workers: int | None) -> None:
        """Finish the units of shards, in ``workers`` processes."""

    @abstractmethod
    def finish(self) -> Any | None:
        """Write the manifest if all units are finished, and return it."""

    @abstractmethod
    def forget(self, shard: int) -> None:
        """Remove a shard that was written from a source that has changed."""

    @property
    def is_complete(self) -> bool:
        return (self.target / MANIFEST).exists()

    @property
    def work(self) -> Path:
        """Folder of locks and of work that is not finished."""
        return self.target / UNFINISHED

    def check_target(self) -> None:
        """Check that the target is new, or an unfinished folder of the same job."""
        path = self.target / PLAN
        field = f"{self.verb}.target"
        if path.exists():
            found = read_object(path)
            differing = [name for name, value in self.plan.items() if found.get(name) != value]
            if differing:
                rule = f"has an unfinished {self.noun} with another value of {', '.join(differing)}"
                works = "the values of its command, another folder, or to remove this one"
                raise ConfigError(field, self.target, rule, works)
        elif self.target.exists() and any(
            path.name != UNFINISHED for path in self.target.iterdir()
        ):
            raise ConfigError(field, self.target, "has other files", "a new folder")

    def begin(self) -> None:
        """Write the plan. If the source has changed, shards that were written from it are removed."""
        path = self.target / PLAN
        self.work.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self.is_same_source:
            for shard in range(len(self.shards)):
                self.forget(shard)
        write_atomically(path, json.dumps({**self.plan, "key": self.key}).encode())

    @property
    def is_same_source(self) -> bool:
        """Whether the source has not changed since the plan was written."""
        return bool(read_object(self.target / PLAN).get("key") == self.key)

    def write_all(self, workers: int | None) -> None:
        self.begin()
        self.write(range(len(self.shards)), workers)
        self.finish()
        self.remove_unfinished()

    def remove_unfinished(self) -> None:
        for folder in (self.work, *self.target.glob(".shard-*")):
            shutil.rmtree(folder, ignore_errors=True)


def cut_units(units: Sequence[U], count: int) -> list[list[U]]:
    """Cut units into ``count`` contiguous ranges of about equal size."""
    ends = np.cumsum([unit.nbytes for unit in units])
    total = int(ends[-1]) if len(units) else 0
    # A unit belongs to the range that its middle is in.
    ranges: list[list[U]] = [[] for _ in range(count)]
    for unit, end in zip(units, ends.tolist(), strict=True):
        middle = end - unit.nbytes / 2
        ranges[min(count - 1, int(middle * count / total)) if total else 0].append(unit)
    return ranges


def write_here(writer: ShardWriter, workers: int | None) -> float:
    """Write what is missing, and the manifest; return the seconds."""
    started = time.monotonic()
    try:
        with only_builder(writer.target / UNFINISHED, lambda: writer.is_complete) as building:
            if building is not None:
                writer.write_all(workers)
                building.is_useless = True
    except OSError as error:
        if error.filename is not None:
            raise
        name = f"{writer.verb}.target={writer.target}"
        raise MachineError(f"{name}: {error.strerror}; finished units are kept") from error
    except KeyboardInterrupt:
        sys.stderr.write("stopped; the same command continues\n")
        raise
    return time.monotonic() - started


def write_manifest(folder: Path, manifest: Any) -> None:
    """Write the manifest, a dataclass, which makes a folder complete."""
    text = json.dumps(dataclasses.asdict(manifest), indent=1, ensure_ascii=False)
    write_atomically(folder / MANIFEST, f"{text}\n".encode())


def load_manifest(folder: Path, verb: str, noun: str) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        found = parse_object(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        rule = f"is not a complete {noun} of harness {verb}: it has no {MANIFEST}"
        raise DataError(
            f"{folder} {rule}; would work: harness {verb} {verb}.target={folder}"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}") from None
    version = found.get("version")
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path} has format version {version!r}; this harness reads version {FORMAT_VERSION}"
        )
    return found
