"""Load rows of runs, the input of tables, plots and notebooks. Imports no torch.

A row has the flat fields of ``result.json``, and:

* ``point``: its name among the other rows; ``overrides`` and ``command`` that started it;
* ``state``: ``completed``, ``failed``, ``cancelled``, ``stopped``, ``running``, ``pending``,
  ``planned``, ``lost``, or ``skipped`` (not a valid job); ``kind`` (class of the failure) and
  ``reason``;
* ``measured.*``, for completed runs: ``tokens_per_second_per_rank`` (see
  ``harness/metrics/window.py``), ``low`` and ``high`` (10th and 90th percentile of the rates of
  single steps), ``spread`` (their difference divided by the rate), ``step_seconds`` (median),
  ``memory_gib``, ``mfu``;
* ``torchtitan.tokens_per_second_per_rank``, if it was measured in turn with the run;
* ``slow``: the ranks that the run found slow, if any (``SlowRank``, as text).
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from harness.config.fields import LABEL, leaves
from harness.config.job import Job
from harness.launch.state import read_or_warn
from harness.launch.sweep.folder import FILE as SWEEP
from harness.launch.sweep.folder import (
    Point,
    SweepFolder,
    command_of,
    labels,
    names_of,
    typed_overrides,
)
from harness.metrics.mfu import mfu
from harness.metrics.tensor_file import TENSORS, read_tensors
from harness.run.folder import RunFolder, run_folders
from harness.run.result import newest
from harness.util.encoding import flatten, parse_object
from harness.util.errors import UserError

Row = dict[str, Any]

KEPT = "results.jsonl"
"""Rows that are kept after the runs are deleted: one JSON object per line."""
# Names of machines and folders mean nothing elsewhere; lists of checkpoints are no results.
_NOT_KEPT = ("host.name", "run_dir", "resumed_from", "saved", "slow")
_PATH = re.compile(r"(?:\w+\.)+(?=\w+=)")


def load(folder: Path) -> list[Row]:
    """Load all rows of a folder with a sweep, runs, one run, or ``results.jsonl``."""
    if not folder.is_dir():
        raise UserError(
            f"{folder}: no such folder; would work: a folder of runs/, or of experiments/"
        )
    if (folder / SWEEP).is_file():
        return of_sweep(SweepFolder(folder))
    if (folder / KEPT).is_file():
        return read_kept(folder)
    runs = run_folders(folder)
    if not runs:
        raise UserError(
            f"{folder}: no rows of runs found; would work: a folder of runs/ (runs/NAME, or one run's), "
            "or of experiments/"
        )
    points = [Point(path.name, path, typed_overrides(path)) for path in runs]
    # Started one by one, they may have the same overrides.
    names = names_of(points)
    names = [
        name if names.count(name) == 1 else f"{name} {point.id}"
        for name, point in zip(names, points, strict=True)
    ]
    return of_points(points, names)


def of_sweep(folder: SweepFolder) -> list[Row]:
    """Return rows of all points of a sweep, including skipped ones."""
    points = folder.points()
    skipped = folder.skipped()
    names = labels([each.overrides for each in skipped], [point.overrides for point in points])
    rows = [
        {
            "point": shortened(name),
            "state": "skipped",
            "reason": each.reason,
            **_typed(each.overrides),
        }
        for name, each in zip(names, skipped, strict=True)
    ]
    return [*of_points(points), *rows]


def of_points(points: Sequence[Point], names: Sequence[str] | None = None) -> list[Row]:
    """Return rows of points that have a job, in order; named by their overrides unless names are given."""
    names = names_of(points) if names is None else names
    seen, _ = read_or_warn([point.run_dir for point in points])
    rows = []
    for name, point, each in zip(names, points, seen, strict=True):
        # The overrides of the last start; the sweep has those of the first.
        overrides = typed_overrides(point.run_dir) or point.overrides
        row = {
            **as_planned(shortened(name), point.job, overrides),
            **RunFolder(point.run_dir).row,
            **newest(point.run_dir),
            "state": each.state,
            "kind": each.kind,
            "reason": each.reason,
            "run_dir": str(point.run_dir),
        }
        if each.slow:
            row["slow"] = "; ".join(map(str, each.slow))
        rows.append(completed(row))
    return rows


def as_planned(name: str, job: Job, overrides: list[str]) -> Row:
    """Return the row of a job that was not run."""
    return {
        "point": name,
        "state": "planned",
        "kind": None,
        "reason": "",
        "id": job.id,
        "numerics_id": job.numerics_id,
        "name": job.name,
        "world_size": job.world_size,
        **_typed(overrides),
        **flatten({"job": job.to_dict()}),
    }


def _typed(overrides: Sequence[str]) -> Row:
    own = [each for each in overrides if not each.startswith("runs_dir=")]
    return {"overrides": own, "command": command_of(own)}


def completed(row: Row) -> Row:
    """Add ``measured.*`` to the row of a completed run that has a throughput."""
    total = row.get("window.tokens_per_second")
    if row["state"] != "completed" or total is None:
        return row
    rate = total / row["world_size"]
    ends = [row.get(f"window.tokens_per_second_p{percent}") for percent in (10, 90)]
    low, high = (None if end is None else end / row["world_size"] for end in ends)
    measured = {
        "tokens_per_second_per_rank": rate,
        "low": low,
        "high": high,
        "spread": None if low is None or high is None else (high - low) / rate,
        "step_seconds": row.get("window.step_seconds_median"),
        "memory_gib": row.get("memory_gib"),
        "mfu": mfu(rate, row.get("flops_per_token_full"), row.get("peak_flops")),
    }
    return {**row, **{f"measured.{name}": value for name, value in measured.items()}}


def fastest_first(rows: Iterable[Row]) -> list[Row]:
    """Sort rows by measured throughput per rank, fastest first; rows without one come last."""
    return sorted(rows, key=lambda row: -(row.get("measured.tokens_per_second_per_rank") or 0.0))


def of_tensors(run_dir: Path, name: str = TENSORS) -> list[Row]:
    """Return a row for each recorded step and tensor of a run: the input of a data frame.

    A row has ``step``, ``tensor`` and the numbers that were recorded: of ``metrics.tensors=norms``
    ``gradient``, ``weight`` and ``update``; with ``activations`` as the name, statistics of blocks.
    ``read_tensors`` in ``harness/metrics/tensor_file.py`` has the same numbers as one array, and the
    number of elements of each tensor.

    Raises:
        UserError: the run has written none.
    """
    records = read_tensors(run_dir, name)
    rows = []
    for step, numbers in zip(records.steps.tolist(), records.data.tolist(), strict=True):
        for tensor, *own in zip(records.names, *numbers, strict=True):
            known = dict(zip(records.values, own, strict=True))
            rows.append({"step": step, "tensor": tensor, **known})
    return rows


def job_of(row: Row) -> Job | None:
    """Return the job of a row; None for a skipped point."""
    plain: dict[str, Any] = {}
    for key, value in row.items():
        part, _, name = key.partition(".")
        if part == "job":
            *path, leaf = name.split(".")
            inner = plain
            for step in path:
                inner = inner.setdefault(step, {})
            inner[leaf] = value
    return Job.from_stored(plain) if plain else None


def shortened(label: str) -> str:
    """Remove the parts of the job from a label's field names: ``parallelism.tp=2`` becomes ``tp=2``."""
    return _PATH.sub("", label)


def read_kept(folder: Path) -> list[Row]:
    """Read the rows of ``results.jsonl``; empty if there is no such file."""
    path = folder / KEPT
    if not path.is_file():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        try:
            row = parse_object(line)
        except ValueError as error:
            raise UserError(f"{path}: line {number} is not a JSON object: {error}") from error
        if missing := [name for name in ("point", "state") if name not in row]:
            raise UserError(f"{path}: line {number} is not a row of a run: {missing[0]} is missing")
        rows.append(completed(row))
    return rows


def keep(folder: Path, rows: Iterable[Row]) -> Path:
    """Write ``results.jsonl`` without fields that are specific to a machine; return its path."""
    path = folder / KEPT
    fields = [
        name for name, role, _ in leaves(Job()) if role == LABEL and not name.startswith("cluster.")
    ]
    left_out = {
        *_NOT_KEPT,
        *(f"job.{name}" for name in fields if name not in ("name", "model.name")),
    }
    dropped = ("predicted.", "expected.", "published.", "delta.", "checkpoint.")
    lines = []
    for row in rows:
        kept = {}
        for key, value in row.items():
            # Keep None for job fields: it is a value, and may differ from the default.
            is_known = value is not None or key.startswith("job.")
            if is_known and not key.startswith(dropped) and key not in left_out:
                kept[key] = value
        lines.append(f"{json.dumps(kept)}\n")
    path.write_text("".join(lines))
    return path
