"""Points of an experiment's folder, with published, predicted, rehearsed and measured results."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.compose.composer import compose_job
from harness.compose.multirun import compose_points
from harness.compose.paths import conf_dir
from harness.config.cluster import ClusterConfig
from harness.config.fields import LABEL, leaves
from harness.config.job import Job
from harness.launch.rows import as_planned, job_of, load, of_sweep, read_kept, shortened
from harness.launch.sweep.registry import FILE as SWEEP
from harness.launch.sweep.registry import Registry, labels
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.plan.verb import plan
from harness.tools.report import published
from harness.tools.report.predict import METRICS, delta, machine_of, predicted
from harness.tools.report.published import Published, Recipe, recipe_of
from harness.util.encoding import read_object
from harness.util.errors import UserError
from harness.util.files import write_atomically
from harness.util.tables import GIB, NOT_MEASURED

Row = dict[str, Any]
REHEARSED = "rehearsed.json"
"""Rehearsals of a folder's jobs by id: ``memory_gib`` (reserved by torch's allocator), the ``rank`` with the
most, and ``torch``."""

# Fields that determine speed and memory. Runs that differ only in others (seed, steps, data, checkpoints) are
# measurements of one point.
_PARTS = ("model", "parallelism", "precision", "activation_checkpoint", "compile")
_FIELDS = (
    *("training.seq_len", "training.global_batch_size", "training.local_batch_size", "training.loss_chunks"),
    *("training.attention", "training.matmul_precision"),
    *("optimizer.implementation", "optimizer.state_dtype", "optimizer.in_backward"),
)


@dataclass(frozen=True)
class Experiment:
    """One experiment of the folder and its points."""

    name: str
    """Stem of its file: ``table1``."""
    title: str
    """Title from its file."""
    command: str
    """Command that runs it."""
    rows: list[Row]
    """Rows with ``published.*``, ``predicted.*``, ``measured.*`` and ``expected.*``."""
    recipes: list[Recipe]
    """Recipe of each row, by which published tables distinguish runs."""
    source: str
    """Source of the published numbers; empty if there are none."""

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
    """Return the tables of an experiment, with the measurements made so far.

    Args:
        folder: a folder of ``experiments/``.
        runs_dir: folder of the runs; None means the experiment's default, relative to the working folder.
        calibration: constants of the measured machine.
        rehearse: rehearse published jobs that have not been rehearsed yet.

    Raises:
        UserError: a point is not a valid job, a published row matches no point, or a rehearsal failed.
    """
    rows, kept = published.read(folder), read_kept(folder)
    tables = []
    for path in spaces_of(folder):
        option = f"experiment={option_of(folder)}/{path.stem}"
        jobs = _jobs_of(path, option)
        measured = [*_runs_of(jobs[0][0], runs_dir), *kept]
        own = [row for row in rows if row.table == path.stem]
        if rehearse:
            rows_of_jobs = [(job, overrides, published.find(job, own)) for job, overrides in jobs]
            rehearse_missing(
                folder, [(job.id, overrides, row.accelerator) for job, overrides, row in rows_of_jobs if row]
            )
        tables.append(_table(path, option, jobs, own, measured, calibration))
    return tables


def _jobs_of(path: Path, option: str) -> list[tuple[Job, list[str]]]:
    """Return the jobs of an experiment, with the overrides of each.

    Raises:
        UserError: a point is not a valid job.
    """
    points = compose_points([option])
    for point in points:
        if point.job is None:
            raise UserError(f"{path}: {shortened(' '.join(point.overrides))}: {point.reason}")
    return [(point.job, point.overrides) for point in points]


def _table(
    path: Path,
    option: str,
    jobs: Sequence[tuple[Job, list[str]]],
    own: list[Published],
    measured: list[Row],
    calibration: Calibration | None,
) -> Experiment:
    found = [published.find(job, own) for job, _ in jobs]
    if own and (len([row for row in found if row]) != len(own) or None in found):
        raise UserError(f"{path}: its points do not match the published rows of {path.stem} one to one")
    words = published.names([row for row in found if row]) if own else None
    words = words or [shortened(name) for name in labels([overrides for _, overrides in jobs])]
    rehearsed = read_rehearsed(path.parent)
    lines, recipes = [], []
    for (job, overrides), row, name in zip(jobs, found, words, strict=True):
        planned = {**as_planned(name, job, overrides), "state": NOT_MEASURED}
        matching = _measurements(job, measured) or [planned]
        for each in matching:
            line = _joined({**each, "point": name, "table": path.stem}, job, row, calibration)
            lines.append(_with_rehearsal(line, rehearsed.get(job.id)))
            recipes.append(recipe_of(job))
    title = path.read_text().splitlines()[1].removeprefix("# ")
    command = f"python -m harness.train -m {option}"
    return Experiment(path.stem, title, command, lines, recipes, own[0].source if own else "")


def _runs_of(job: Job, runs_dir: Path | None) -> list[Row]:
    """Return the rows of an experiment's runs."""
    folder = (runs_dir or Path(job.runs_dir)) / job.name
    if (folder / SWEEP).is_file():
        return of_sweep(Registry(folder))
    return load(folder) if any(folder.glob("*/job.json")) else []


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


def _joined(row: Row, job: Job, own: Published | None, calibration: Calibration | None) -> Row:
    """Add published, predicted and expected values, and their deltas, to a row."""
    machine = machine_of(row)
    if own is None:
        values = predicted(job, machine, calibration)
    else:
        cluster = ClusterConfig(accelerator=own.accelerator)
        values = predicted(job, cluster, Calibration(Constants(), software=own.software))
    row = {**row, **{f"predicted.{name}": value for name, value in values.items()}}
    if own is not None:
        row |= {
            "published.layout": own.layout,
            "published.tokens_per_second_per_rank": own.tokens_per_second_per_rank,
            "published.memory_gib": own.memory_gib,
            "published.accelerator": own.accelerator,
            "published.source": own.source,
        }
        if row["state"] == "completed":
            expected = predicted(job, machine, calibration)
            row |= {f"expected.{name}": value for name, value in expected.items()}
    against = "published" if own is not None else "measured"
    for name in METRICS:
        row[f"delta.{name}"] = delta(row[f"predicted.{name}"], row.get(f"{against}.{name}"))
        if own is not None:
            row[f"delta.measured.{name}"] = delta(row.get(f"measured.{name}"), row.get(f"published.{name}"))
            row[f"delta.expected.{name}"] = delta(row.get(f"expected.{name}"), row.get(f"measured.{name}"))
    return row


def _with_rehearsal(row: Row, found: Row | None) -> Row:
    """A row with the rehearsed memory, and its difference from the published one."""
    if found is None:
        return row
    memory = found["memory_gib"]
    difference = delta(memory, row.get("published.memory_gib"))
    return {**row, "rehearsed.memory_gib": memory, "delta.rehearsed.memory_gib": difference}


def read_rehearsed(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rehearsals of a folder by the job's id.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / REHEARSED
    return read_object(path) if path.is_file() else {}


def rehearse_missing(folder: Path, jobs: Sequence[tuple[str, list[str], str]]) -> None:
    """Rehearse the jobs that the file does not have, and add each when it is done.

    Args:
        folder: folder of the experiment.
        jobs: for each its id, its overrides, and the accelerator of its published row.

    Raises:
        UserError: this machine has a GPU, or has no build of torch for CUDA; a rehearsal failed.
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


def measured_rows(tables: Sequence[Experiment]) -> list[Row]:
    """Return the rows to keep: those of completed and failed runs."""
    return [row for table in tables for row in table.rows if row["state"] in ("completed", "failed")]
