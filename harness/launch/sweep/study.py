"""``study.json``, the objective of a sweep whose points are chosen by their results; tables of points."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from harness.config.fields import from_dict
from harness.launch.state import RunState
from harness.launch.sweep.folder import Point, Skipped, command_of, labels
from harness.metrics.window import THROUGHPUT
from harness.run.folder import RunFolder
from harness.run.result import write_json_atomically
from harness.train.rows import metrics_of_result
from harness.util.encoding import read_object
from harness.util.errors import ConfigError, UserError
from harness.util.tables import Column, Table, shortened

FILE = "study.json"
OBJECTIVE = "sweep.objective"
MINIMIZE, MAXIMIZE = "minimize", "maximize"
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
        sweeper: ``optuna``; of earlier versions, also another sweeper of Hydra.
        objective: columns of ``result.json``.
        direction: ``minimize`` or ``maximize``, for each column.
        shared: overrides of all points, without labels.
        command: the overrides that the study was last started with.
    """

    sweeper: str
    objective: list[str]
    direction: list[str]
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
            if not 0 < len(record.objective) == len(record.direction):
                raise ConfigError("direction", record.direction, "must have one for each of objective")
            check_directions(record.direction, record.objective, "direction")
        except ConfigError as error:
            raise UserError(f"{path}: damaged, or another version wrote it: {error}") from None
        return record

    def is_same(self, other: StudyRecord) -> bool:
        """Whether values of both are comparable."""
        return replace(self, command=other.command) == other

    def write(self, folder: Path) -> None:
        """Write the record into a sweep's folder."""
        write_json_atomically(folder / FILE, asdict(self))

    def values(self, row: dict[str, Any]) -> list[float]:
        """Return the columns of a completed run; PointFailedError if one has no finite number."""
        values = []
        for name in self.objective:
            value = _number(row.get(name))
            if value is None:
                raise PointFailedError(f"{name} of its result is {row.get(name)}, no finite number")
            values.append(value)
        return values

    def best(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Return the indices of the best completed runs; of several columns, those that none beats in all."""
        costs = self._costs(rows)
        if len(self.objective) == 1:
            return [min(costs, key=lambda index: costs[index])] if costs else []
        return [
            index
            for index, cost in costs.items()
            if not any(
                other != cost and all(a <= b for a, b in zip(other, cost, strict=True))
                for other in costs.values()
            )
        ]

    def ranked(self, rows: Sequence[dict[str, Any]]) -> list[int]:
        """Return the indices of completed runs: the best, then the others by the first column."""
        costs, best = self._costs(rows), self.best(rows)
        return sorted(costs, key=lambda index: (index not in best, costs[index]))

    def _costs(self, rows: Sequence[dict[str, Any]]) -> dict[int, list[float]]:
        signs = [-1.0 if each == MAXIMIZE else 1.0 for each in self.direction]
        costs = {}
        for index, row in enumerate(rows):
            values = [value for name in self.objective if (value := _number(row.get(name))) is not None]
            if row.get("exit_reason") == "completed" and len(values) == len(signs):
                costs[index] = [sign * value for sign, value in zip(signs, values, strict=True)]
        return costs

    def best_of(self, points: Sequence[Point]) -> list[Point]:
        """Return the best completed points; none if no point completed."""
        return [points[index] for index in self.best([RunFolder(each.run_dir).row for each in points])]

    def format(self, values: Sequence[float]) -> str:
        """Format values: ``loss=3.214``."""
        return ", ".join(f"{name}={each:.6g}" for name, each in zip(self.objective, values, strict=True))

    def describe(self) -> str:
        """Return the objective in words: ``minimize loss``."""
        pairs = zip(self.direction, self.objective, strict=True)
        return ", ".join(f"{direction} {name}" for direction, name in pairs)


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def check_objective(value: Any) -> list[str]:
    """Return the columns that ``sweep.objective`` names."""
    names = [str(each) for each in value] if isinstance(value, list) else [str(value)]
    known = {column.name for column in metrics_of_result() if column.unit not in _NO_NUMBERS}
    for name in names:
        prefixes = [f"{name[:end]}.*" for end, letter in enumerate(name) if letter == "."]
        if name not in known and not any(each in known or each == f"{_EITHER}*" for each in prefixes):
            rule = "must be a column of result.json with a number, or a list of columns"
            close = [each for each in sorted(known) if name in each]
            raise ConfigError(OBJECTIVE, name, rule, close or sorted(known))
    if not names or len(set(names)) < len(names):
        raise ConfigError(OBJECTIVE, names, "must name each column once", "loss")
    return names


def natural_direction(name: str) -> str | None:
    """Return in which direction a column improves; None if its name does not tell."""
    if name.startswith(_EITHER):
        return None
    return MAXIMIZE if any(word in name for word in _MORE_IS_BETTER) else MINIMIZE


def check_directions(given: Any, objective: Sequence[str], field: str) -> list[str]:
    """Return the direction of each column: the given ones, or without any those in which they improve.

    ``field`` is the setting, for errors.
    """
    if given is None:
        found = [natural_direction(name) for name in objective]
        for name, direction in zip(objective, found, strict=True):
            if direction is None:
                rule = f"must be given, because {name} may improve in either direction"
                raise ConfigError(field, None, rule, DIRECTIONS)
        return [each for each in found if each is not None]
    names = given if isinstance(given, list) else [given]
    if len(names) != len(objective) or any(name not in DIRECTIONS for name in names):
        each = f" for each of {', '.join(objective)}" if len(objective) > 1 else ""
        raise ConfigError(field, ",".join(names), f"must be a direction{each}", DIRECTIONS)
    return names


LONGEST_REASON = 110
_COLUMNS = (
    Column("point", "point"),
    Column("state", "state"),
    Column("step", "step", str),
    Column("tokens_per_second", "tokens/s", ",.0f"),
    Column("tokens_per_second_per_rank", "tokens/s/rank", ",.1f"),
    Column("mfu", "MFU", ".1%"),
    Column("memory_gib", "memory GiB", ".2f"),
    Column("loss", "loss", ".4f"),
)
# Columns of result.json that the table has.
SHOWN = ("loss", "window.tokens_per_second", "tokens_per_second_per_rank", "mfu", "memory_gib")


def table_of_states(
    points: Sequence[Point],
    seen: Sequence[RunState],
    objective: Sequence[str] = (),
    *,
    full_reasons: bool = False,
) -> Table:
    """Return a row per point.

    Args:
        objective: columns of ``result.json`` that a study optimizes, which are shown too.
        full_reasons: do not shorten reasons.
    """
    more = [name for name in objective if name not in SHOWN]
    rows: list[dict[str, Any]] = []
    for name, each in zip(labels([point.overrides for point in points]), seen, strict=True):
        result = RunFolder(each.run_dir).row if more else {}
        reason = each.about if full_reasons else shortened(each.about, LONGEST_REASON)
        row = {"point": name, "state": each.state, "step": f"{each.step}/{each.steps}", "reason": reason}
        rows.append({**(each.facts or {}), **{name: result.get(name) for name in more}, **row})
    notes = [THROUGHPUT] if any(row.get("tokens_per_second") is not None for row in rows) else []
    columns = (*_COLUMNS, *(Column(name, name, ".6g") for name in more), Column("reason", "reason"))
    return Table(columns, rows, notes=notes, missing="")


def counted(seen: Sequence[RunState], skipped: Sequence[Skipped]) -> str:
    """Count the points by state, in a line."""
    counts = Counter([*(each.state for each in seen), *(["skipped"] * len(skipped))])
    return f"{', '.join(f'{count} {state}' for state, count in counts.items())}\n"


def best_in_words(record: StudyRecord, points: Sequence[Point]) -> str:
    """Return the best points of a study, each with its value and its command; empty if none completed."""
    names = labels([point.overrides for point in points])
    best = record.best_of(points)
    lines = []
    for point, name in zip(points, names, strict=True):
        if point in best:
            value = record.format(record.values(RunFolder(point.run_dir).row))
            lines.append(f"best ({record.describe()}): {name}: {value}\n")
            lines.append(f"  {command_of(point.overrides)}\n")
    return "".join(lines)
