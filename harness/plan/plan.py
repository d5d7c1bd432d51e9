"""What a plan says of a job; no torch. ``make_plan`` is the way from the one to the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from harness.cluster.hardware import Accelerator
from harness.job import Job
from harness.model.accounting import Accounting

KINDS = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "logits",
    "gathered",
    "communication",
    "runtime",
)
"""Kinds of memory, in the order in which they are shown."""

PARTS = ("compute", "dp", "tp", "cp", "ep", "pp", "bubble", "optimizer")
"""Parts of a step's time, in the order in which they are shown: computing; waiting for collectives of an
axis as far as nothing hides them (``dp`` is FSDP's and the replicas'); for other stages; the update."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks that hold the same pipeline stages, when it is at its peak."""

    pp_rank: int
    stages: tuple[int, ...]
    """Indices of the stages that these ranks hold."""
    kinds: dict[str, float]
    """Bytes of each of ``KINDS``."""

    @property
    def peak(self) -> float:
        """Bytes in all."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Traffic:
    """What one kind of collective moves in a step, for the busiest rank."""

    axis: str
    """``dp``, ``tp``, ``cp``, ``ep`` or ``pp``."""
    collective: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``send``."""
    ranks: int
    """Ranks that take part in one."""
    count: int
    """How many of them there are."""
    bytes: float
    """Bytes that the rank sends in all of them together."""
    link: str
    """``NVLink`` within a node, ``network`` between nodes, ``host`` between processes of a CPU."""
    seconds: float | None
    """Time they take together; None on unknown hardware."""
    exposed_seconds: float | None
    """Time of that which nothing hides."""


@dataclass(frozen=True)
class Action:
    """One thing that a pipeline rank does, and when."""

    stage: int
    kind: str
    """``F`` forward, ``B`` backward, ``I`` backward for inputs, ``W`` backward for weights."""
    microbatch: int
    start: float = 0.0
    """Seconds since the step began."""
    end: float = 0.0


@dataclass(frozen=True)
class Speed:
    """A step's time, of the slowest rank."""

    step_seconds: float
    parts: dict[str, float]
    """Seconds of each of ``PARTS``; they add up to ``step_seconds``."""
    tokens_per_second_per_rank: float
    mfu: float | None
    """Model FLOPs utilization with attention counted whole; None without a known peak."""
    timeline: list[list[Action]] = field(default_factory=list)
    """What each pipeline rank does, in order, with times; empty without a pipeline."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known of a job before it runs."""

    job: Job
    accounting: Accounting
    parameters_per_rank: list[float]
    """Parameters that the ranks of each pipeline rank hold, sharded as they are."""
    memory: list[RankMemory]
    """One for each pipeline rank."""
    memory_limit: float | None
    """Bytes that a device has for a run; None where the hardware is unknown."""
    traffic: list[Traffic]
    speed: Speed | None
    """None on unknown hardware."""
    accelerator: Accelerator | None
    notes: list[str] = field(default_factory=list)
    """What the figures leave out."""

    @property
    def peak(self) -> float:
        """Bytes of the fullest rank."""
        return max(rank.peak for rank in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the fullest rank has room; None where the hardware is unknown."""
        return None if self.memory_limit is None else self.peak <= self.memory_limit

    @property
    def gpu_hours(self) -> float | None:
        """Device-hours of all of the job's steps."""
        if self.speed is None:
            return None
        return self.speed.step_seconds * self.job.training.steps * self.job.world_size / 3600
