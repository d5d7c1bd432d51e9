"""``evaluations.jsonl`` beside a run: a flat row for each evaluated task. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.config.training import short_name
from harness.run.folder import EVALUATIONS
from harness.util.encoding import parse_object

PREFIX = "evaluation"
"""First part of a column's name: ``evaluation.<task>.<metric>``."""

ABOUT = (
    *("checkpoint", "step", "model", "seq_len", "stride", "limit"),
    *("precision", "layout", "time", "code"),
)
"""Fields of a row that are not metrics; ``code.*`` are versions of packages."""

COUNTS = ("documents", "tokens", "bytes", "examples", "versions", "n-shot")
"""Metrics that are not results."""

Metrics = dict[str, Any]


def columns(task: str, metrics: Metrics) -> dict[str, Any]:
    """The numbers of a task as columns."""
    return {
        f"{PREFIX}.{short_name(task)}.{name}": value
        for name, value in metrics.items()
        if isinstance(value, int | float)
    }


def newest(run_dir: Path) -> dict[str, Any]:
    """Columns of the newest row of each task beside a run; lines that cannot be read are left out."""
    found: dict[str, Any] = {}
    try:
        lines = (run_dir / EVALUATIONS).read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError):
        return found
    latest: dict[str, Metrics] = {}
    for line in lines:
        try:
            row = parse_object(line)
        except ValueError:
            continue
        if isinstance(row.get("task"), str):
            latest[row["task"]] = row
    for task, row in latest.items():
        metrics = {name: value for name, value in row.items() if name.split(".")[0] not in ABOUT}
        found |= columns(task, metrics)
    return found


def evaluated_columns(rows: Sequence[Metrics]) -> list[str]:
    """Names of the evaluation columns that any row has, without numbers of examples, tokens and bytes."""
    names = dict.fromkeys(name for row in rows for name in row if name.startswith(f"{PREFIX}."))
    return [name for name in names if name.rpartition(".")[2] not in COUNTS]


def shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
