"""torchtitan's published rows of December 2024, and the jobs of the experiments that repeat them."""

import csv
import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from harness.compose.composer import Composed, compose_points
from harness.config.fields import with_value
from harness.config.job import Job
from harness.tools.plan.constants import Software
from harness.util.errors import UserError

FOLDER = Path(__file__).resolve().parent
FILE = FOLDER / "published.csv"
_MODELS = {"llama3.1-8B": "llama3_8b", "llama3.1-70B": "llama3_70b", "llama3.1-405B": "llama3_405b"}
_CHECKPOINTING = {"selective": "selective_op", "full": "full", "none": "none"}
_ACCELERATORS = {"H100-96GB-HBM2e-500W": "H100 96GB"}
_YES = {"yes": True, "no": False}


@dataclass(frozen=True)
class Recipe:
    """The fields by which published tables describe a run; equal for a row and the job that reproduces it."""

    model: str
    ranks: int
    dp_shard: int
    cp: int
    tp: int
    pp: int
    local_batch_size: int
    seq_len: int
    activation_checkpoint: str
    compiled: bool
    linear: str
    """Format of linear layers; ``none`` is bfloat16."""
    async_tp: bool
    schedule: str
    """Pipeline schedule; empty without a pipeline."""


@dataclass(frozen=True)
class Published:
    """One row of ``published.csv``."""

    recipe: Recipe
    global_batch_size: int | None
    """Sequences per step; None if the table does not state it."""
    tokens_per_second_per_rank: float
    memory_gib: float
    """Peak memory per rank, GiB."""
    accelerator: str
    """Name in ``harness/util/hardware.py``."""
    layout: str
    """As published, e.g. ``FSDP8 TP8 PP8``."""
    table: str
    """Stem of the experiment's file: ``table1``."""
    source: str
    software: Software = field(default_factory=Software)
    notes: str = field(default="", compare=False)
    memory_inexpressible: str = field(default="", compare=False)
    """Why our options cannot express the run's memory; empty if they can."""


def read() -> list[Published]:
    """Return the rows of ``published.csv``.

    Raises:
        UserError: a row cannot be read.
    """
    rows = []
    with FILE.open(newline="") as file:
        for number, raw in enumerate(csv.DictReader(file), start=2):
            try:
                rows.append(_row(raw))
            except (KeyError, ValueError) as error:
                raise UserError(
                    f"{FILE}: line {number}: {type(error).__name__}: {error}"
                ) from error
    return rows


@cache
def tables() -> dict[str, list[tuple[Composed, Published]]]:
    """Return the points of each table's experiment, each with the row that it repeats.

    Raises:
        UserError: a point is no job, or points and rows are not one to one.
    """
    by_table: dict[str, list[Published]] = {}
    for row in read():
        by_table.setdefault(row.table, []).append(row)
    found = {}
    for table, rows in sorted(by_table.items()):
        points = compose_points([f"experiment=llama3_h100/{table}"])
        for point in points:
            if point.job is None:
                raise UserError(f"{table}.yaml: {' '.join(point.overrides)}: {point.reason}")
        if [find(point.job, rows) for point in points] != rows:
            raise UserError(
                f"{table}.yaml: its points do not match the published rows of {table} one to one"
            )
        found[table] = list(zip(points, rows, strict=True))
    return found


def jobs() -> list[tuple[Published, Job]]:
    """Return each row with its job, on the machine of the tables."""
    found = []
    for pairs in tables().values():
        for point, row in pairs:
            found.append((row, with_value(point.job, "cluster.accelerator", row.accelerator)))
    return found


def _row(raw: dict[str, str]) -> Published:
    degrees = {
        name: int(degree) for name, degree in re.findall(r"([A-Z]+)(\d+)", raw["parallel_layout"])
    }
    recipe = Recipe(
        model=_MODELS[raw["model"]],
        ranks=int(raw["num_gpus"]),
        dp_shard=degrees["FSDP"],
        cp=degrees.get("CP", 1),
        tp=degrees.get("TP", 1),
        pp=degrees.get("PP", 1),
        local_batch_size=int(raw["local_batch_size"]),
        seq_len=int(raw["seq_len"]),
        activation_checkpoint=_CHECKPOINTING[raw["ac_mode"]],
        compiled=_YES[raw["compile"]],
        linear="none" if raw["quantization"] == "bf16" else raw["quantization"],
        async_tp=_YES[raw["async_tp"]],
        schedule=raw["pp_schedule"],
    )
    return Published(
        recipe=recipe,
        global_batch_size=int(raw["global_batch_size"]) if raw["global_batch_size"] else None,
        tokens_per_second_per_rank=float(raw["tps_per_gpu"]),
        memory_gib=float(raw["memory_gib"]),
        accelerator=_ACCELERATORS[raw["gpu"]],
        layout=raw["parallel_layout"],
        table=raw["source"].split()[-2].lower() + raw["source"].split()[-1],
        source=raw["source"],
        software=software_of(raw),
        notes=raw["notes"],
        memory_inexpressible=raw.get("memory_inexpressible", ""),
    )


def software_of(raw: dict[str, str]) -> Software:
    """Return the software of a row's trainer. An empty column is as in this harness."""
    return Software(
        raw["attention"],
        fused_norm=_YES[raw["fused_norm"] or "yes"],
        speed=float(raw["speed"] or 1),
        joint_ends=_YES[raw.get("joint_ends") or "no"],
        repeats_keys=_YES[raw.get("repeats_keys") or "no"],
        keeps_outputs=_YES[raw.get("keeps_outputs") or "no"],
    )


def recipe_of(job: Job) -> Recipe:
    """Return the fields of a job by which published tables describe a run."""
    layout = job.parallelism
    return Recipe(
        model=job.model.name,
        ranks=job.world_size,
        dp_shard=layout.dp_shard,
        cp=layout.cp,
        tp=layout.tp,
        pp=layout.pp,
        local_batch_size=job.local_batch_size,
        seq_len=job.training.seq_len,
        activation_checkpoint=job.activation_checkpoint.mode,
        compiled=job.compile.enable,
        linear=job.precision.linear,
        async_tp=layout.async_tp,
        schedule=layout.pp_schedule if layout.pp > 1 else "",
    )


def find(job: Job, rows: list[Published]) -> Published | None:
    """Return the published row that a job reproduces, or None."""
    recipe = recipe_of(job)
    for row in rows:
        if row.recipe == recipe and row.global_batch_size in (None, job.global_batch_size):
            return row
    return None


# Names of field values in row names.
_WORDS: dict[str, dict[Any, str]] = {
    "compiled": {True: "compile", False: "eager"},
    "linear": {"none": "bf16", "float8_tensorwise": "float8"},
    "async_tp": {True: "async TP", False: "no async TP"},
}
ASKED = {"compiled": "compile", "linear": "float8", "async_tp": "async TP", "schedule": "schedule"}
"""Fields whose effect is reported for two rows of a table that differ in nothing else."""


def names(rows: list[Published]) -> list[str]:
    """Name the rows of one table by the fields in which they differ."""
    fields = Recipe.__dataclass_fields__
    varying = [name for name in fields if len({getattr(row.recipe, name) for row in rows}) > 1]
    layout = {"dp_shard", "cp", "tp", "pp"} & set(varying)
    named = []
    for row in rows:
        words = [row.layout] if layout else []
        for name in varying:
            value = getattr(row.recipe, name)
            if name == "seq_len":
                words.append(f"{value:,} tokens")
            elif name not in ("dp_shard", "cp", "tp", "pp"):
                words.append(_WORDS.get(name, {}).get(value, str(value)))
        named.append(", ".join(words) or row.layout)
    return named
