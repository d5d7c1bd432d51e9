"""Write ``evaluations.jsonl``, and show results as a table. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from harness.checkpoint.catalog import is_url
from harness.config.parallelism import degrees_in_words
from harness.run.evaluations import ABOUT, Metrics, shown
from harness.run.folder import EVALUATIONS
from harness.run.result import versions
from harness.tools.inference.evaluate.config import EvaluateJob
from harness.util.encoding import dumps, flatten
from harness.util.errors import MachineError
from harness.util.tables import aligned
from harness.weights.detect import WeightFolder


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


def table(results: Sequence[tuple[str, Metrics]]) -> str:
    """Metrics as aligned text, one line for each."""
    lines = [
        {"task": task, "metric": name, "value": shown(value)}
        for task, metrics in results
        for name, value in metrics.items()
    ]
    return aligned(lines, left=("task", "metric"), indent="")
