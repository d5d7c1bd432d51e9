"""Configuration of ``harness plan``."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TypeVar

from harness.compose.resolve import resolve, scale
from harness.config.fields import Switch, check_rules, label
from harness.config.job import Job
from harness.util.errors import ConfigError
from harness.util.hardware import CUDA_DEVICES

DEFAULT = "H100 SXM"
"""Accelerator of rehearsed jobs that do not name one."""
GPUS = 8
"""GPUs per node of rehearsed jobs that do not say."""
REHEARSE = "harness.tools.rehearse.verb:rehearse_plan"
"""Where the function is that rehearses a plan's job: it gets the plan, and returns a ``Result``."""
SEARCH = Switch("search")
AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True)
class PlanJob(Job):
    """A job plus planner options."""

    search: bool = label(False)
    """Rank every legal layout of the job's ranks, with microbatch, activation checkpointing and pipeline
    schedule, by predicted speed; fields typed on the command line stay as they are."""
    top: int = label(10, least=1)
    """With search: number of the fastest layouts to show; the simplest is shown too, and the fastest FSDP and
    HSDP layouts."""
    headroom: float = label(0.0, least=0, below=1, needs=SEARCH)
    """With search: fraction of the usable memory that a layout must leave free."""
    sweep_file: str | None = label(None, needs=SEARCH)
    """With search: file of the sweep that measures the shown layouts; null: sweeps/search/<name>.yaml,
    or sweep/<name>-search.yaml in the current folder if the former cannot be written."""
    rehearse: bool = label(False)
    """Also rehearse the job on virtual GPUs (``harness rehearse``), and show its memory next to the
    plan."""
    calibration: str | None = label(None)
    """File with the constants of the machine, written by ``calibrate``; null: constants fitted to published
    runs."""
    calibrate: str | None = label(None)
    """Folder of measured runs: fit the constants to them, and write the constants to ``calibration``; null:
    to calibration.json in that folder."""
    against: str | None = label(None, verbatim=True)
    """Overrides, separated by spaces, of a second job to compare with line by line: this job with
    them."""
    picture: str | None = label(None)
    """PNG file to draw: memory by stage, and the pipeline's timeline; with search, of the best
    layout."""

    @property
    def varies(self) -> bool:  # type: ignore[override]
        """Whether the layouts of a search are planned in place of the job's."""
        return self.search

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> PlanJob:
        """Resolve the job; with search or calibrate only check the options."""
        check_rules(self)
        self._validate_plan()
        if self.search or self.calibrate is not None:
            self.cluster.validate()
            return scale(self)
        job = self
        if self.rehearse:
            job, gpus = put_on_virtual_gpus(self)
        return resolve(job, launched_ranks=launched_ranks, gpus=gpus)

    def _validate_plan(self) -> None:
        if self.rehearse and self.search:
            raise ConfigError(
                "rehearse", True, "cannot be combined with search=true", "search=false"
            )
        asked = [
            name for name in ("search", "rehearse", "calibrate", "picture") if getattr(self, name)
        ]
        if self.calibrate is not None and (
            others := [name for name in asked if name != "calibrate"]
        ):
            works = f"calibrate alone, then {others[0]} without"
            raise ConfigError(
                "calibrate", self.calibrate, "fits constants to runs and plans no job", works
            )
        if self.against is not None and asked:
            rule = f"compares the plans of two jobs, and {asked[0]} works on one"
            raise ConfigError("against", self.against or "''", rule, f"against without {asked[0]}")
        written = [("picture", ".png"), ("sweep_file", ".yaml")]
        for name, suffix in (
            *written,
            *([("calibration", ".json")] if self.calibrate is not None else []),
        ):
            path = getattr(self, name)
            if path is None:
                continue
            if Path(path).suffix != suffix:
                raise ConfigError(name, path or "''", f"must end in {suffix}", f"plan{suffix}")
            if not Path(path).parent.is_dir():
                raise ConfigError(
                    name, path, f"there is no folder {Path(path).parent}", f"plan{suffix}"
                )


PLANNER_FIELDS = {field.name for field in fields(PlanJob)} - {field.name for field in fields(Job)}
"""Fields that a training job does not have."""


def put_on_virtual_gpus(job: AnyJob) -> tuple[AnyJob, int]:
    """Return an unresolved job with virtual GPUs as its device, and how many of them a local job finds.

    Raises:
        ConfigError: the job is for a CPU, or there is no virtual GPU of its kind.
    """
    if job.cluster.device == "cpu":
        raise ConfigError(
            "cluster.device", "cpu", "rehearsals are for jobs on GPUs", ["cuda", "auto"]
        )
    kind = job.cluster.accelerator or DEFAULT
    if kind not in CUDA_DEVICES:
        raise ConfigError(
            "cluster.accelerator", kind, "there is no virtual GPU of this kind", CUDA_DEVICES
        )
    cluster = replace(job.cluster, device="cuda", accelerator=kind)
    return replace(job, cluster=cluster), cluster.ranks or GPUS
