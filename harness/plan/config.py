"""What a plan is asked for, beside the job that it plans."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from harness.config import label
from harness.errors import ConfigError
from harness.job import Job
from harness.rehearse.config import put_on_virtual_gpus


@dataclass
class PlanJob(Job):
    """A job with what is to be told of it."""

    search: bool = label(False)
    """Rank every legal layout of the job's ranks, with microbatch, activation checkpointing and pipeline
    schedule, by predicted speed; fields typed on the command line stay as they are."""
    top: int = label(10)
    """With search: layouts that are shown and written into the sweep file."""
    sweep_file: str | None = label(None)
    """With search: the sweep that measures the best; null is sweeps/search/<name>.yaml,
    or <name>-search.yaml here where the former cannot be written."""
    verify: bool = label(False)
    """Build the job on a fake process group, in this process, and compare what it holds with the plan."""
    verify_step: bool = label(False)
    """With verify: run one step of every stage on fake tensors too."""
    rehearse: bool = label(False)
    """Rehearse the job on virtual GPUs too (``harness.rehearse``), and show what it takes beside the plan."""
    calibration: str | None = label(None)
    """Constants of the machine to plan for, a file that ``calibrate`` wrote; null: those of published
    runs."""
    calibrate: str | None = label(None)
    """A folder of measured runs: fit the constants to them, and write them to ``calibration``, or into that
    folder as calibration.json."""
    picture: str | None = label(None)
    """A PNG to draw: memory by stage, and the pipeline's timeline; with search, of the best layout."""

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> PlanJob:
        """As a job does; a search resolves every layout by itself, and only what they share is done here."""
        self._validate_plan()
        if self.search or self.calibrate is not None:
            return self
        if self.rehearse:
            gpus = put_on_virtual_gpus(self)
        super().resolve(launched_ranks=launched_ranks, gpus=gpus)
        return self

    @property
    def plain(self) -> Job:
        """The job alone, as every other verb has it."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})

    def _validate_plan(self) -> None:
        if self.top < 1:
            raise ConfigError("top", self.top, "must be at least 1")
        if self.search and self.verify:
            rule = "looks at one job, and search=true has many"
            raise ConfigError(
                "verify", True, rule, "verify=false, then verify=true for the layout you choose"
            )
        if self.rehearse and (self.search or self.verify):
            other = "search" if self.search else "verify"
            raise ConfigError("rehearse", True, f"goes not together with {other}=true", f"{other}=false")
        for name in ("search", "verify", "picture", "rehearse"):
            if self.calibrate is not None and getattr(self, name):
                rule = "fits constants to runs and looks at no job"
                raise ConfigError("calibrate", self.calibrate, rule, f"calibrate alone, then {name} without")
        if self.verify_step and not self.verify:
            raise ConfigError("verify_step", True, "is a part of verify", "verify=true verify_step=true")
        if self.sweep_file is not None and not self.search:
            raise ConfigError("sweep_file", self.sweep_file, "is what a search writes", "search=true")
        written = [("picture", ".png"), ("sweep_file", ".yaml")]
        for name, suffix in (*written, *([("calibration", ".json")] if self.calibrate is not None else [])):
            path = getattr(self, name)
            if path is None:
                continue
            if Path(path).suffix != suffix:
                raise ConfigError(name, path or "''", f"must end in {suffix}", f"plan{suffix}")
            if not Path(path).parent.is_dir():
                raise ConfigError(name, path, f"there is no folder {Path(path).parent}", f"plan{suffix}")
