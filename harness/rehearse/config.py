"""What a rehearsal is asked for, beside the job that it rehearses."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from harness.config import label, part
from harness.errors import ConfigError
from harness.job import Job
from harness.rehearse.device import DEFAULT, GPUS, VIRTUAL


@dataclass
class RehearseConfig:
    """Which ranks are rehearsed, how long, and with which values."""

    ranks: list[int] | None = label(None)
    """Ranks to rehearse, each in a process of its own; null: the first ranks of the first, the middle and the
    last pipeline rank."""
    steps: int = label(3)
    """Steps of each; the last one is counted. The first ones compile, and make the optimizer's state."""
    skew: float = label(0.0)
    """With expert parallel: how many more rows the first rank of a group gets than with even routing, as a
    share of them; the others get as many fewer."""
    timeout_seconds: int = label(1800)
    """Longest time for one rank."""
    real_gpu: bool = label(False)
    """Rehearse although this machine has a GPU, which is then not used."""

    def validate(self, world_size: int) -> None:
        """Raises ConfigError for what cannot be rehearsed."""
        for rank in self.ranks or ():
            if not 0 <= rank < world_size:
                rule = f"the job has {world_size} ranks"
                raise ConfigError("rehearse.ranks", self.ranks, rule, f"ranks from 0 to {world_size - 1}")
        if self.ranks is not None and not self.ranks:
            raise ConfigError("rehearse.ranks", "[]", "must name a rank", "null, or [0]")
        if self.steps < 2:
            raise ConfigError(
                "rehearse.steps", self.steps, "the first step is unlike the others", "at least 2"
            )
        if not 0 <= self.skew < 1:
            raise ConfigError("rehearse.skew", self.skew, "must be at least 0 and below 1", "0.25")
        if self.timeout_seconds < 1:
            raise ConfigError("rehearse.timeout_seconds", self.timeout_seconds, "must be at least 1")


@dataclass
class RehearseJob(Job):
    """A job with how it is to be rehearsed."""

    rehearse: RehearseConfig = part(RehearseConfig)
    """How it is rehearsed."""

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> RehearseJob:
        """As a job does, on a machine that has the GPUs that are rehearsed on."""
        gpus = put_on_virtual_gpus(self)
        super().resolve(launched_ranks=launched_ranks, gpus=gpus)
        self.rehearse.validate(self.world_size)
        return self

    @property
    def plain(self) -> Job:
        """The job alone, as every other verb has it."""
        return Job(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Job)})


def put_on_virtual_gpus(job: Job) -> int:
    """Says of a job that is not resolved yet that its nodes have GPUs; returns how many a local job finds.

    Raises:
        ConfigError: it is for a CPU, or for GPUs that there are no virtual ones of.
    """
    if job.cluster.device == "cpu":
        raise ConfigError("cluster.device", "cpu", "a rehearsal is of a job on GPUs", ["cuda", "auto"])
    job.cluster.device = "cuda"
    job.cluster.accelerator = job.cluster.accelerator or DEFAULT
    if job.cluster.accelerator not in VIRTUAL:
        raise ConfigError("cluster.accelerator", job.cluster.accelerator, "there is no virtual one", VIRTUAL)
    return job.cluster.ranks or GPUS


def ranks_to_rehearse(job: Job, config: RehearseConfig) -> list[int]:
    """The ranks asked for, or those that differ: of pipeline ranks the first, the middle and the last."""
    if config.ranks is not None:
        return list(config.ranks)
    pp, in_stage = job.parallelism.pp, job.world_size // job.parallelism.pp
    return [place * in_stage for place in sorted({0, pp // 2, pp - 1})]
