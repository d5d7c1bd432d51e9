"""Options of a rehearsal."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from harness.compose.resolve import resolve
from harness.config.fields import label, part
from harness.config.job import Job
from harness.tools.plan.config import OWN_CHOICE, put_on_virtual_gpus
from harness.util.errors import ConfigError


@dataclass(frozen=True)
class RehearseConfig:
    """Which ranks are rehearsed, and how."""

    ranks: list[int] | None = label(None)
    """Ranks to rehearse, each in a process of its own; null: the first ranks of the first, the middle and the
    last pipeline rank."""
    steps: int = label(3, least=2)
    """Steps of each rank; the last one is counted. The first one compiles and makes the optimizer's
    state."""
    skew: float = label(0.0, least=-1, below=1, needs=OWN_CHOICE)
    """Expert parallel: share of rows that the first rank of a group gets beyond even routing, -1: none at
    all. The others share the rest."""
    timeout_seconds: int = label(1800, least=1)
    """Time limit for one rank."""
    real_gpu: bool = label(False)
    """Rehearse on a machine with a GPU. The GPU is not used."""

    def validate(self, world_size: int) -> None:
        """Raise ConfigError for values that cannot be rehearsed."""
        for rank in self.ranks or ():
            if not 0 <= rank < world_size:
                rule = f"the job has {world_size} ranks"
                raise ConfigError(
                    "rehearse.ranks", self.ranks, rule, f"ranks from 0 to {world_size - 1}"
                )
        if self.ranks is not None and not self.ranks:
            raise ConfigError("rehearse.ranks", "[]", "must name a rank", "null, or [0]")


@dataclass(frozen=True)
class RehearseJob(Job):
    """A job with options of its rehearsal."""

    varies: ClassVar[bool] = True

    rehearse: RehearseConfig = part(RehearseConfig)
    """Options of the rehearsal."""

    def resolve(self, *, launched_ranks: int | None = None, gpus: int | None = None) -> RehearseJob:
        """Resolve the job as on a machine that has the virtual GPUs."""
        job, gpus = put_on_virtual_gpus(self)
        job = resolve(job, launched_ranks=launched_ranks, gpus=gpus)
        job.rehearse.validate(job.world_size)
        return job


def ranks_to_rehearse(job: Job, config: RehearseConfig) -> list[int]:
    """Return ``rehearse.ranks``, or the first rank of the first, the middle and the last pipeline rank."""
    if config.ranks is not None:
        return list(config.ranks)
    pp = job.parallelism.pp
    in_stage = job.world_size // pp
    return [place * in_stage for place in sorted({0, pp // 2, pp - 1})]
