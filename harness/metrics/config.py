"""Configuration of the ``metrics`` and ``profiling`` groups."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import label
from harness.errors import ConfigError

CONSOLES = ("auto", "rich", "plain", "none")
WANDB_MODES = ("online", "offline", "disabled")


@dataclass(frozen=True)
class MetricsConfig:
    """Which metrics are written, how often, and where. Every field is a label: none changes the results."""

    log_interval: int = label(1, least=1)
    """Optimizer steps between two rows of metrics.jsonl (and of every view of it)."""

    warmup_steps: int = label(3, least=0)
    """First steps of this process that throughput excludes: they compile, allocate and connect."""

    console: str = label("auto", choices=CONSOLES)
    """auto: a progress bar on a terminal and plain lines elsewhere; rich, plain or none choose one."""

    wandb: bool = label(False)
    """Also log to Weights & Biases; offline when there is no API key."""

    wandb_project: str | None = label(None)
    """W&B project; null: WANDB_PROJECT, or else ``harness``."""

    wandb_entity: str | None = label(None)
    """W&B team or user; null: WANDB_ENTITY, or else the default of the account."""

    wandb_group: str | None = label(None)
    """W&B group of this run, e.g. the name of a sweep; null: WANDB_RUN_GROUP."""

    wandb_tags: list[str] = label(factory=list)
    """W&B tags of the run; an empty list: WANDB_TAGS."""

    wandb_mode: str | None = label(None, choices=WANDB_MODES)
    """online, offline or disabled; null: online with an API key, else offline. WANDB_MODE wins over it."""

    tensorboard: bool = label(False)
    """Also write TensorBoard event files into the ``tensorboard`` folder of the run."""


@dataclass(frozen=True)
class ProfilingConfig:
    """Traces of complete steps by torch's profiler, and snapshots of GPU memory."""

    enable: bool = label(False)
    """Write traces."""

    interval: int = label(100)
    """Steps from one trace to the next; the first trace ends this many steps after the process starts."""

    warmup: int = label(3, least=0)
    """Steps before each trace in which the profiler already runs but records nothing."""

    active: int = label(1, least=1)
    """Steps per trace."""

    with_stack: bool = label(False)
    """Record the Python stack of every operation; makes steps slow and traces large."""

    record_shapes: bool = label(True)
    """Record the input shapes of every operation."""

    ranks: list[int] = label(factory=lambda: [0])
    """Ranks that write traces."""

    memory_snapshot: bool = label(False)
    """Also write snapshots of GPU memory by source line: with each trace, and when memory runs out."""

    def validate(self, steps: int, world_size: int) -> None:
        """Check the fields of traces.

        Args:
            steps: steps of the run.
            world_size: ranks of the run.

        Raises:
            ConfigError: with this value no complete trace would be written.
        """
        if not self.enable:
            return
        traced = self.warmup + self.active
        if self.interval < traced:
            rule = f"must hold profiling.warmup + profiling.active = {traced} steps"
            raise ConfigError("profiling.interval", self.interval, rule, f"{traced} or more")
        if self.interval > steps:
            rule = f"a run of training.steps={steps} would write no trace"
            works = f"at most {steps}" if steps >= traced else f"training.steps={self.interval}"
            raise ConfigError("profiling.interval", self.interval, rule, works)
        unknown = [rank for rank in self.ranks if not 0 <= rank < world_size]
        if unknown or not self.ranks:
            rule = f"must be ranks of this job, which has {world_size}"
            raise ConfigError("profiling.ranks", self.ranks, rule, f"[0] to [{world_size - 1}]")

    def refuse_snapshots(self, why: str) -> None:
        """Reject memory snapshots without a GPU, for the reason ``why``.

        Raises:
            ConfigError: ``profiling.memory_snapshot`` is set.
        """
        if self.enable and self.memory_snapshot:
            rule = f"snapshots need a GPU, and {why}"
            raise ConfigError("profiling.memory_snapshot", True, rule, "false, or cluster.device=cuda")
