"""Rows with published, predicted, rehearsed and measured results: of runs, and of an experiment's folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.compose.composer import compose_job, compose_points
from harness.compose.paths import conf_dir
from harness.config.cluster import ClusterConfig
from harness.config.fields import LABEL, leaves
from harness.config.job import Job
from harness.config.registry import MissingPackageError
from harness.launch.rows import as_planned, job_of, load, of_sweep, read_kept, shortened
from harness.launch.sweep.folder import FILE as SWEEP
from harness.launch.sweep.folder import SweepFolder, labels
from harness.run.folder import run_folders
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.verb import plan
from harness.tools.report import published
from harness.tools.report.published import Published, Recipe, recipe_of
from harness.util.encoding import read_object
from harness.util.errors import UserError
from harness.util.files import write_atomically
from harness.util.tables import GIB, NOT_MEASURED

Row = dict[str, Any]
CALIBRATION = "calibration.json"
METRICS = ("tokens_per_second_per_rank", "memory_gib", "mfu")
REHEARSED = "rehearsed.json"
"""Rehearsals of a folder's jobs by id: ``memory_gib`` (reserved by torch's allocator), the ``rank`` with the
most, and ``torch``."""

# Fields that determine speed and memory. Runs that differ only in others (seed, steps, data, checkpoints) are
# measurements of one point.
_PARTS = ("model", "parallelism", "precision", "activation_checkpoint", "compile")
_FIELDS = (
    *("training.seq_len", "training.global_batch_size", "training.local_batch_size", "training.loss_chunks"),
    *("training.attention", "training.matmul_precision"),
    *("optimizer.implementation", "optimizer.state_dtype"),
)


def delta(value: float | None, reference: float | None) -> float | None:
    """Return ``value / reference - 1``; None if either is unknown or the reference is 0."""
    return None if value is None or not reference else value / reference - 1


def predicted(job: Job, cluster: ClusterConfig | None = None, calibration: Calibration | None = None) -> Row:
    """Return a plan's ``METRICS``, ``step_seconds`` and ``fits``; None where the plan has no value.

    Args:
        cluster: has the accelerator of the nodes; None means the job's.
    """
    from harness.tools.plan.make import make_plan

    plan = make_plan(job if cluster is None else job.on_accelerator_of(cluster), calibration)
    of_speed = ("tokens_per_second_per_rank", "mfu", "step_seconds")
    return {
        **{name: None if plan.speed is None else getattr(plan.speed, name) for name in of_speed},
        "memory_gib": plan.peak / GIB,
        "fits": plan.fits,
    }


def machine_of(row: Row) -> ClusterConfig | None:
    """Return a cluster with the accelerator that a row was measured on; None if it is unknown."""
    job = job_of(row)
    cluster = ClusterConfig() if job is None else job.cluster
    return cluster.with_device(row.get("device") or "")


def calibration_of(folder: Path, path: Path | None = None) -> Calibration | None:
    """Return the constants for predicting a folder's measurements: from ``path``, or from the folder."""
    beside = folder / CALIBRATION
    path = path or (beside if beside.is_file() else None)
    return None if path is None else Calibration.read(str(path))


def with_predictions(rows: Sequence[Row], calibration: Calibration | None = None) -> list[Row]:
    """Add ``predicted.*`` for the machine that each row was measured on, and ``delta.*``.

    A delta is predicted over measured, minus 1. The machine of a row without measurement is its job's.
    """
    made = []
    for row in rows:
        job = job_of(row)
        try:
            values = {} if job is None else predicted(job, machine_of(row), calibration)
        except MissingPackageError as error:
            sys.stderr.write(f"WARNING {row.get('run_dir')}: no prediction: {error}\n")
            values = {}
        row = row | {f"predicted.{name}": value for name, value in values.items()}
        deltas = {name: delta(values[name], row.get(f"measured.{name}")) for name in METRICS if values}
        made.append(row | {f"delta.{name}": value for name, value in deltas.items()})
    return made


@dataclass(frozen=True)
class Experiment:
    """One experiment of a folder and its points.

    Attributes:
        name: stem of its file: ``table1``.
        rows: rows with ``published.*``, ``predicted.*``, ``measured.*`` and ``expected.*``.
        recipes: recipe of each row, by which published tables distinguish runs.
        source: source of the published numbers; empty if there are none.
    """

    name: str
    title: str
    command: str
    rows: list[Row]
    recipes: list[Recipe]
    source: str

    @property
    def once(self) -> list[tuple[Recipe, Row]]:
        """Each recipe with its last row, even if several machines have measured it."""
        return list(dict(zip(self.recipes, self.rows, strict=True)).items())


def option_of(folder: Path) -> str | None:
    """Return the folder as a value of ``experiment=``; None if it is not inside ``experiments/``."""
    top = (Path(conf_dir()) / "experiment").resolve()
    path = folder.resolve()
    return str(path.relative_to(top)) if top in path.parents else None


def spaces_of(folder: Path) -> list[Path]:
    """Return the files of a folder that are experiments: those with a name. Others are included by them."""
    return [path for path in sorted(folder.glob("*.yaml")) if _content(path).get("name")]


def names_of(folder: Path) -> list[str]:
    """Return the names of a folder's experiments, which are the folders of their sweeps."""
    return [_content(path)["name"] for path in spaces_of(folder)]


def _content(path: Path) -> dict[str, Any]:
    from omegaconf import OmegaConf

    content = OmegaConf.to_container(OmegaConf.load(path))
    return {str(key): value for key, value in content.items()} if isinstance(content, dict) else {}


def is_experiment(folder: Path) -> bool:
    """Whether a folder is inside ``experiments/`` and has a sweep."""
    return folder.is_dir() and option_of(folder) is not None and bool(spaces_of(folder))


def tables_of(
    folder: Path,
    runs_dir: Path | None = None,
    calibration: Calibration | None = None,
    *,
    rehearse: bool = False,
) -> list[Experiment]:
    """Return the tables of a folder of ``experiments/``, with the measurements made so far.

    Args:
        runs_dir: folder of the runs; None means the experiment's default, relative to the working folder.
        rehearse: rehearse published jobs that have not been rehearsed yet.
    """
    rows, kept = published.read(folder), read_kept(folder)
    return [
        _table(path, [row for row in rows if row.table == path.stem], kept, runs_dir, calibration, rehearse)
        for path in spaces_of(folder)
    ]


def _table(
    path: Path,
    own: list[Published],
    kept: list[Row],
    runs_dir: Path | None,
    calibration: Calibration | None,
    rehearse: bool,
) -> Experiment:
    option = f"experiment={option_of(path.parent)}/{path.stem}"
    points = compose_points([option])
    for point in points:
        if point.job is None:
            raise UserError(f"{path}: {shortened(' '.join(point.overrides))}: {point.reason}")
    found = [published.find(point.job, own) for point in points]
    reproduced = [row for row in found if row]
    if own and not len(reproduced) == len(own) == len(found):
        raise UserError(f"{path}: its points do not match the published rows of {path.stem} one to one")
    if rehearse:
        published_points = [(point, row) for point, row in zip(points, found, strict=True) if row]
        rehearse_missing(
            path.parent, [(point.job.id, point.overrides, row.accelerator) for point, row in published_points]
        )
    words = (
        published.names(reproduced) if own else list(map(shortened, labels([p.overrides for p in points])))
    )
    measured, rehearsed = [*_runs_of(points[0].job, runs_dir), *kept], read_rehearsed(path.parent)
    lines, recipes = [], []
    for point, row, name in zip(points, found, words, strict=True):
        planned = {**as_planned(name, point.job, point.overrides), "state": NOT_MEASURED}
        for each in _measurements(point.job, measured) or [planned]:
            line = {**each, "point": name, "table": path.stem}
            lines.append(_joined(line, point.job, row, rehearsed.get(point.job.id, {}), calibration))
            recipes.append(recipe_of(point.job))
    title = path.read_text().splitlines()[1].removeprefix("# ")
    command = f"harness train -m {option}"
    return Experiment(path.stem, title, command, lines, recipes, own[0].source if own else "")


def _runs_of(job: Job, runs_dir: Path | None) -> list[Row]:
    folder = (runs_dir or Path(job.runs_dir)) / job.name
    if (folder / SWEEP).is_file():
        return of_sweep(SweepFolder(folder))
    return load(folder) if run_folders(folder, levels=1) else []


def _measurements(job: Job, rows: Sequence[Row]) -> list[Row]:
    """Return a job's measurements: one completed row per device, or else one failed row."""
    wanted = workload(job)
    found: dict[str, Row] = {}
    for row in rows:
        own = job_of(row)
        if own is None or workload(own) != wanted or row["state"] in ("planned", "pending"):
            continue
        device = row.get("device") or ""
        if device not in found or (found[device]["state"] != "completed" and row["state"] == "completed"):
            found[device] = row
    completed = [row for row in found.values() if row["state"] == "completed"]
    return completed or list(found.values())[:1]


def workload(job: Job) -> tuple[tuple[str, Any], ...]:
    """Return the fields that determine a job's speed and memory, apart from the machine."""
    return tuple(
        (name, str(value))
        for name, role, value in leaves(job)
        if role != LABEL and (name.partition(".")[0] in _PARTS or name in _FIELDS)
    )


def _joined(
    row: Row, job: Job, own: Published | None, rehearsed: Row, calibration: Calibration | None
) -> Row:
    """Add published, predicted, rehearsed and expected values, and their deltas, to a row."""

    def add(kind: str, values: Row) -> None:
        row.update({f"{kind}.{name}": value for name, value in values.items()})

    machine = machine_of(row)
    if own is None:
        add("predicted", predicted(job, machine, calibration))
        add("delta", {name: delta(row[f"predicted.{name}"], row.get(f"measured.{name}")) for name in METRICS})
        return row
    of_table = ClusterConfig(accelerator=own.accelerator)
    add("predicted", predicted(job, of_table, Calibration(Constants(), software=own.software)))
    shown = ("layout", "tokens_per_second_per_rank", "memory_gib", "accelerator", "source")
    add("published", {name: getattr(own, name) for name in shown})
    add("rehearsed", {name: value for name, value in rehearsed.items() if name == "memory_gib"})
    if row["state"] == "completed":
        add("expected", predicted(job, machine, calibration))
    for name in METRICS:
        kinds = ("predicted", "published", "measured", "expected", "rehearsed")
        made, known, measured, expected, rehearsal = (row.get(f"{kind}.{name}") for kind in kinds)
        row[f"delta.{name}"] = delta(made, known)
        row[f"delta.measured.{name}"] = delta(measured, known)
        row[f"delta.expected.{name}"] = delta(expected, measured)
        row[f"delta.rehearsed.{name}"] = delta(rehearsal, known)
    return row


def read_rehearsed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rehearsals of a folder by the job's id."""
    path = folder / REHEARSED
    return read_object(path) if path.is_file() else {}


def rehearse_missing(folder: Path, jobs: Sequence[tuple[str, list[str], str]]) -> None:
    """Rehearse the jobs that the folder's file does not have, and add each when it is done.

    Args:
        jobs: for each its id, its overrides, and the accelerator of its published row.
    """
    found = read_rehearsed(folder)
    for job_id, overrides, accelerator in jobs:
        if job_id in found:
            continue
        hardware = ["cluster=slurm_h100", f"cluster.accelerator={accelerator}", "checkpoint.enable=false"]
        typed = [*overrides, *hardware, "rehearse=true"]
        ranks = plan(compose_job(typed, config_name="plan", schema=PlanJob), typed).data["rehearsed"]
        for rank in ranks:
            if rank["failure"] is not None:
                what = f"{rank['failure']['kind']}: {rank['failure']['message']}"
                raise UserError(f"{' '.join(overrides)}: rank {rank['rank']} could not be rehearsed: {what}")
        most = max(ranks, key=lambda rank: rank["memory"]["reserved"])
        found[job_id] = {
            "memory_gib": round(most["memory"]["reserved"] / GIB, 2),
            "rank": most["rank"],
            "torch": version("torch"),
        }
        write_atomically(folder / REHEARSED, f"{json.dumps(found, indent=1, sort_keys=True)}\n".encode())
        sys.stderr.write(f"rehearsed {' '.join(overrides)}: {found[job_id]['memory_gib']:.1f} GiB\n")
