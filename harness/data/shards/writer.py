"""A folder that is written in shards, by one process or by several at the same time.

TARGET/plan.json         what determines the content; written first
TARGET/.unfinished/      locks, and files of work that is not finished
TARGET/manifest.json     written last: the folder is complete
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np

from harness.data.shards.manifest import MANIFEST
from harness.util.encoding import read_object
from harness.util.errors import ConfigError
from harness.util.files import write_atomically

UNFINISHED, PLAN = ".unfinished", "plan.json"


class Sized(Protocol):
    """A unit of work."""

    @property
    def nbytes(self) -> int:
        """Its size; only the ratio of sizes matters here."""
        ...


U = TypeVar("U", bound=Sized)


class ShardWriter(ABC):
    """Writes the shards of a folder. A shard is a list of units, which are finished one by one.

    Attributes:
        target: the folder.
        source_name: name of the source, for messages.
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
        """Whether the manifest is there."""
        return (self.target / MANIFEST).exists()

    @property
    def work(self) -> Path:
        """Folder of locks and of work that is not finished."""
        return self.target / UNFINISHED

    def check_target(self) -> None:
        """Check that the target is new, or an unfinished folder of the same job.

        Raises:
            ConfigError: the target has other files, or unfinished work of something else.
        """
        path, field = self.target / PLAN, f"{self.verb}.target"
        if path.exists():
            found = read_object(path)
            differing = [name for name, value in self.plan.items() if found.get(name) != value]
            if differing:
                raise ConfigError(
                    field,
                    self.target,
                    f"has an unfinished {self.noun} with another value of {', '.join(differing)}",
                    "the values of its command, another folder, or to remove this one",
                )
        elif self.target.exists() and any(path.name != UNFINISHED for path in self.target.iterdir()):
            raise ConfigError(field, self.target, "has other files", "a new folder")

    def begin(self) -> None:
        """Write the plan. If the source has changed, shards that were written from it are removed.

        Raises:
            OSError: the target cannot be written.
        """
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

    def remove_unfinished(self) -> None:
        """Remove what is not part of the complete folder."""
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
