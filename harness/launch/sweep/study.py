"""``study.json``: the objective of a sweep whose points are chosen by their results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.config.fields import from_dict
from harness.launch.sweep.folder import Point, command_of, names_of
from harness.run.folder import RunFolder
from harness.run.result import write_json_atomically
from harness.train.rows import metrics_of_result
from harness.util.encoding import read_object
from harness.util.errors import ConfigError, UserError

FILE = "study.json"
OBJECTIVE = "sweep.objective"
MINIMIZE = "minimize"
MAXIMIZE = "maximize"
DIRECTIONS = (MINIMIZE, MAXIMIZE)
# Units of columns that are no numbers to optimize.
_NO_NUMBERS = ("text", "hash", "path", "bool", "list", "field", "number")
_MORE_IS_BETTER = ("tokens_per_second", "tflops", "mfu")
# Metrics of tasks: accuracy, but also perplexity.
_EITHER = "evaluation."


class PointFailedError(UserError):
    """A point has no value: it failed, is no valid job, or its result has no number there."""


@dataclass(frozen=True)
class StudyRecord:
    """What a study optimizes, and what all of its points share.

    Attributes:
        objective: column of ``result.json``.
        direction: ``minimize`` or ``maximize``.
        shared: overrides of all points, without labels.
        command: the overrides that the study was last started with.
    """

    objective: str
    direction: str
    shared: list[str]
    command: list[str]

    @classmethod
    def read(cls, folder: Path) -> StudyRecord | None:
        """Read the record of a sweep's folder; None if it is no study."""
        path = folder / FILE
        if not path.is_file():
            return None
        try:
            record: StudyRecord = from_dict(cls, read_object(path))
            if record.direction not in DIRECTIONS:
                raise ConfigError("direction", record.direction, "no such choice", DIRECTIONS)
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None
        return record

    def is_same(self, other: StudyRecord) -> bool:
        """Whether values of both are comparable."""
        return replace(self, command=other.command) == other

    def write(self, folder: Path) -> None:
        """Write the record into a sweep's folder."""
        write_json_atomically(folder / FILE, asdict(self))

    def value(self, row: dict[str, Any]) -> float:
        """Return the objective of a completed run; PointFailedError if it has no finite number."""
        value: Any = row.get(self.objective)
        if not _is_number(value):
            raise PointFailedError(f"{self.objective} of its result is {value}, no finite number")
        return float(value)

    def ranked(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Return the indices of completed runs with a value, the best first."""
        completed = []
        for index, row in enumerate(rows):
            if row.get("exit_reason") == "completed" and _is_number(row.get(self.objective)):
                completed.append(index)
        # Equal runs keep their order, also with a negative sign.
        sign = -1 if self.direction == MAXIMIZE else 1
        return sorted(completed, key=lambda index: sign * rows[index][self.objective])

    def best_of(self, points: Sequence[Point]) -> Point | None:
        """Return the best completed point; None if no point completed."""
        ranked = self.ranked([RunFolder(point.run_dir).row for point in points])
        return points[ranked[0]] if ranked else None

    def format(self, value: float) -> str:
        """Format a value: ``loss=3.214``."""
        return f"{self.objective}={value:.6g}"

    def describe(self) -> str:
        """Return the objective in words: ``minimize loss``."""
        return f"{self.direction} {self.objective}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def check_objective(name: str) -> None:
    """Refuse an objective that is no column of ``result.json`` with a number."""
    known = {column.name for column in metrics_of_result() if column.unit not in _NO_NUMBERS}
    known_or_open = known | {f"{_EITHER}*"}
    families = [f"{name[:end]}.*" for end, letter in enumerate(name) if letter == "."]
    if name not in known and known_or_open.isdisjoint(families):
        close = [column for column in sorted(known) if name in column]
        raise ConfigError(
            OBJECTIVE, name, "must be a column of result.json with a number", close or sorted(known)
        )


def natural_direction(name: str, field: str) -> str:
    """Return in which direction a column improves; ``field`` is the setting that says it otherwise."""
    if name.startswith(_EITHER):
        rule = f"must be given, because {name} may improve in either direction"
        raise ConfigError(field, None, rule, DIRECTIONS)
    return MAXIMIZE if any(word in name for word in _MORE_IS_BETTER) else MINIMIZE


def best_in_words(record: StudyRecord, points: Sequence[Point]) -> str:
    """Return the best point of a study with its value and its command; empty if none completed."""
    best = record.best_of(points)
    if best is None:
        return ""
    names = names_of(points)
    value = record.format(record.value(RunFolder(best.run_dir).row))
    found = f"best ({record.describe()}): {names[points.index(best)]}: {value}"
    return f"{found}\n  {command_of(best.overrides)}\n"
