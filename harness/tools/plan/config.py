"""Configuration of ``harness plan``."""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, TypeVar

from harness.compose.resolve import resolve, scale
from harness.config.fields import Switch, check_rules, label
from harness.config.job import Job
from harness.config.model import EXPERTS, ROUTED
from harness.config.parallelism import EXPERT_RANKS
from harness.util.errors import ConfigError
from harness.util.hardware import CUDA_DEVICES

DEFAULT = "H100 SXM"
"""Accelerator of rehearsed jobs that do not name one."""
GPUS = 8
"""GPUs per node of rehearsed jobs that do not say."""
REHEARSE = "harness.tools.rehearse.verb:rehearse_plan"
"""Where the function is that rehearses a plan's job: it gets the plan, and returns a ``Result``."""
SEARCH = Switch("search")
ANY_MESSAGES = Switch("parallelism.ep_capacity", "parallelism.ep_capacity=null", operator.not_)
OWN_CHOICE = Switch("debug.routing", "debug.routing=null", operator.not_)
ALONE = ("calibrate", "against", "rehearse", "search")
"""Fields that ask for something else than a plan; a job has one of them."""
AnyJob = TypeVar("AnyJob", bound=Job)


@dataclass(frozen=True)
class PlanJob(Job):
    """A job plus planner options."""

    fits_batch: ClassVar[bool] = True
    search: bool = label(False)
    """Rank every legal layout of the job's ranks, with microbatch, activation checkpointing and pipeline
    schedule, by predicted speed; fields typed on the command line stay as they are."""
    top: int = label(10, least=1)
    """With search: number of the fastest layouts to show; the simplest is shown too, and the fastest FSDP and
    HSDP layouts."""
    headroom: float = label(0.0, least=0, below=1, needs=SEARCH)
    """With search: fraction of the usable memory that a layout must leave free."""
    sweep_file: str | None = label(None, needs=SEARCH)
    """With search: file of the sweep that measures the shown layouts, in a folder called sweep; null:
    sweep/<name>-search.yaml in the current folder."""
    rehearse: bool = label(False)
    """Also rehearse the job on virtual GPUs (``harness rehearse``), and show its memory next to the
    plan."""
    calibration: str | None = label(None)
    """File with the constants of the machine, written by ``calibrate``; null: constants fitted to published
    runs."""
    calibrate: str | None = label(None)
    """Folder of measured runs: fit the constants to them, and write the constants to ``calibration``;
    null: to calibration.json in that folder. Of runs with experts also print
    ``expert_imbalance``."""
    expert_imbalance: float | None = label(
        None, least=1, needs=(EXPERTS, EXPERT_RANKS, ANY_MESSAGES, ROUTED, OWN_CHOICE)
    )
    """Rows of the rank with the fullest experts, as a multiple of the mean, for time and memory;
    ``calibrate`` reads it from a run's `moe.rank_load_max`. null: for time what a router near
    balance has, for memory even loads."""
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
        asked = [name for name in ALONE if getattr(self, name) not in (None, False)]
        if self.picture is not None and not {"search", "rehearse"}.issuperset(asked):
            asked.append("picture")
        if len(asked) > 1:
            rule = f"cannot be combined with {asked[1]}"
            raise ConfigError(asked[0], getattr(self, asked[0]), rule, "one of them")
        suffixes = {"picture": ".png", "sweep_file": ".yaml"}
        if self.calibrate is not None:
            suffixes["calibration"] = ".json"
        for name, suffix in suffixes.items():
            typed = getattr(self, name)
            if typed is None:
                continue
            path = Path(typed)
            rule = ""
            if path.suffix != suffix:
                rule = f"must end in {suffix}"
            elif name == "sweep_file" and path.parent.name != "sweep":
                rule = "must be in a folder called sweep, which --config-dir can add"
            elif name != "sweep_file" and not path.parent.is_dir():
                rule = f"there is no folder {path.parent}"
            if rule:
                works = "sweep/found.yaml" if name == "sweep_file" else f"plan{suffix}"
                raise ConfigError(name, typed or "''", rule, works)


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
