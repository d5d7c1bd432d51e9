"""The plan of a job, without torch; ``make_plan`` makes it."""

from dataclasses import dataclass, field
from typing import NamedTuple

from harness.config.job import Job
from harness.model.accounting import Accounting
from harness.util.hardware import Accelerator

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
"""Kinds of memory, in display order."""

PARTS = ("compute", "dp", "tp", "cp", "ep", "pp", "bubble", "optimizer")
"""Parts of a step's time, in display order: computing; exposed time of the collectives of each axis (``dp``:
those of FSDP and replicas); waiting for other stages; the update."""


@dataclass(frozen=True)
class RankMemory:
    """Memory of the ranks of one pipeline rank, at its peak."""

    pp_rank: int
    stages: tuple[int, ...]
    """Indices of their stages."""
    kinds: dict[str, float]
    """Bytes of each of ``KINDS``, as the allocator reserves them."""
    allocated: float = 0.0
    """Peak bytes of tensors that exist at once (``torch.cuda.max_memory_allocated``)."""

    @property
    def peak(self) -> float:
        """Total bytes reserved (``torch.cuda.max_memory_reserved``)."""
        return sum(self.kinds.values())


@dataclass(frozen=True)
class Traffic:
    """Traffic of one kind of collective in a step, on the busiest rank."""

    axis: str
    """``dp``, ``tp``, ``cp``, ``ep`` or ``pp``; ``optimizer`` for Muon's pieces of matrices."""
    collective: str
    """``all_gather``, ``reduce_scatter``, ``all_reduce``, ``all_to_all`` or ``send``."""
    ranks: int
    """Ranks in its group."""
    count: int
    """Number of these collectives in a step."""
    bytes: float
    """Bytes that the rank sends in all of them."""
    link: str
    """``NVLink`` within a node; ``network`` between nodes."""
    seconds: float
    """Total time."""
    exposed_seconds: float
    """Part of it that is not overlapped with compute."""


class Action(NamedTuple):
    """One pass of a pipeline rank, with its times."""

    stage: int
    kind: str
    """``F`` forward, ``B`` backward, ``I`` backward for inputs, ``W`` backward for weights."""
    microbatch: int
    start: float = 0.0
    """Seconds since the step began."""
    end: float = 0.0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Speed:
    """A step's time, of the slowest rank."""

    step_seconds: float
    parts: dict[str, float]
    """Seconds of each of ``PARTS``; they add up to ``step_seconds``."""
    tokens_per_second_per_rank: float
    mfu: float | None
    """Model FLOPs utilization, counting full attention; None without a known peak."""
    timeline: list[list[Action]] = field(default_factory=list)
    """Passes of each pipeline rank, in order, with times; empty without a pipeline."""


@dataclass(frozen=True)
class PlannedPhase:
    """Steps of one batch size and sequence length."""

    first_step: int
    steps: int
    batch_size: int
    seq_len: int
    step_seconds: float | None
    """None on unknown hardware."""


@dataclass(frozen=True)
class Plan:
    """Predictions about a job before it runs."""

    job: Job
    accounting: Accounting
    parameters_per_rank: list[float]
    """Parameters per rank, after sharding, for each pipeline rank."""
    memory: list[RankMemory]
    """One for each pipeline rank."""
    memory_limit: float | None
    """Bytes that a device has for a run; None on unknown hardware."""
    traffic: list[Traffic]
    """Empty on unknown hardware."""
    speed: Speed | None
    """None on unknown hardware."""
    accelerator: Accelerator | None
    notes: list[str] = field(default_factory=list)
    """What the predictions leave out."""
    phases: list[PlannedPhase] = field(default_factory=list)
    """All steps of the job, if it schedules their sizes; speed, traffic and memory are those of
    full size."""
    is_calibrated: bool = False
    """Whether the constants were fitted to other runs than published ones."""

    @property
    def peak(self) -> float:
        """Peak bytes of the rank with the most."""
        return max(rank.peak for rank in self.memory)

    @property
    def allocated(self) -> float:
        """Peak bytes of tensors of the rank with the most."""
        return max(rank.allocated for rank in self.memory)

    @property
    def fits(self) -> bool | None:
        """Whether the peak is within the limit; None on unknown hardware."""
        return None if self.memory_limit is None else self.peak <= self.memory_limit

    @property
    def gpu_hours(self) -> float | None:
        """Device-hours of all steps of the job; None on unknown hardware."""
        if self.speed is None:
            return None
        total = self.speed.step_seconds * self.job.steps
        if self.phases:
            total = sum(phase.steps * (phase.step_seconds or 0.0) for phase in self.phases)
        return total * self.job.world_size / 3600

    @property
    def dollars(self) -> float | None:
        """Price of ``gpu_hours``; None without ``cluster.dollars_per_gpu_hour``, and on CPUs."""
        price = self.job.cluster.dollars_per_gpu_hour
        if price is None or self.accelerator is None or self.gpu_hours is None:
            return None
        return price * self.gpu_hours


@dataclass(frozen=True)
class Resolution:
    """Error of the planned speed of one layout relative to another of the same table."""

    off: float
    """The largest error in four of five pairs, as a fraction."""
    pairs: int
    tables: int
