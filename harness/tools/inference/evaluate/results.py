"""``evaluations.jsonl``: a flat row for each evaluated task. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.checkpoint.catalog import is_url
from harness.config.evaluation import short_name
from harness.metrics.result import flatten, versions
from harness.run.status import EVALUATIONS
from harness.tools.inference.evaluate.config import EvaluateJob
from harness.util.encoding import dumps, parse_object
from harness.util.errors import MachineError
from harness.util.tables import aligned, degrees_in_words, markdown
from harness.weights.detect import WeightFolder

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


def rows_of(job: EvaluateJob, found: WeightFolder, results: Sequence[tuple[str, Metrics]]) -> list[Metrics]:
    """Rows of the file: metrics of each task, and what they were computed with."""
    about = (
        found.path,
        found.manifest.get("step"),
        job.model.name,
        job.evaluate.seq_len,
        job.evaluate.stride,
        job.evaluate.limit,
        job.precision.param_dtype,
        degrees_in_words(job.parallelism.degrees),
        time.time(),
        versions(),
    )
    described = dict(zip(ABOUT, about, strict=True))
    return [flatten({"task": task, **metrics, **described}) for task, metrics in results]


def file_of(job: EvaluateJob, found: WeightFolder) -> Path:
    """The file to append to: ``evaluate.out``, or beside the run that the weights are from."""
    if job.evaluate.out is not None:
        return Path(job.evaluate.out)
    folders = [] if is_url(found.path) else Path(found.path).resolve().parents
    runs = [folder for folder in folders if (folder / "job.json").is_file()]
    return runs[0] / EVALUATIONS if runs else Path(EVALUATIONS)


def append(file: Path, rows: Sequence[Metrics]) -> None:
    """Append rows.

    Raises:
        MachineError: the file cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("a", encoding="utf-8") as out:
            out.write("".join(f"{dumps(row)}\n" for row in rows))
    except OSError as error:
        raise MachineError(f"{file}: cannot be written: {error.strerror}") from error


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


def evaluations_markdown(points: Sequence[str], rows: Sequence[Metrics]) -> str:
    """A table of the evaluations of some runs; empty if none has any."""
    names = evaluated_columns(rows)
    if not names:
        return ""
    cells = [
        [point, *(_shown(row.get(name)) for name in names)] for point, row in zip(points, rows, strict=True)
    ]
    headings = ["point", *(name.removeprefix(f"{PREFIX}.") for name in names)]
    return f"\n{markdown(headings, cells)}\n"


def table(results: Sequence[tuple[str, Metrics]]) -> str:
    """Metrics as aligned text, one line for each."""
    lines = [
        {"task": task, "metric": name, "value": _shown(value)}
        for task, metrics in results
        for name, value in metrics.items()
    ]
    return aligned(lines, left=("task", "metric"), indent="")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}"
    return "-" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
