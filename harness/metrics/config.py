"""The ``metrics`` group of a job: how often a run reports, and to whom."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import label
from harness.errors import ConfigError

CONSOLES = ("auto", "rich", "plain", "none")
WANDB_MODES = ("online", "offline", "disabled")


@dataclass
class MetricsConfig:
    """What is written down of a run. Every field is a label: none of them changes what is computed."""

    log_interval: int = label(1)
    """Optimizer steps between two rows of metrics.jsonl (and of every view of it)."""

    warmup_steps: int = label(3)
    """First steps of this process that count for no throughput: they compile, allocate and connect."""

    console: str = label("auto")
    """auto: a progress bar on a terminal and plain lines elsewhere; rich, plain or none choose one."""

    wandb: bool = label(False)
    """Also log to Weights & Biases; offline when there is no API key."""

    wandb_project: str | None = label(None)
    """W&B project; null takes WANDB_PROJECT, or else ``harness``."""

    wandb_entity: str | None = label(None)
    """W&B team or user; null takes WANDB_ENTITY, or else the default of the account."""

    wandb_group: str | None = label(None)
    """W&B group that this run belongs to, e.g. the name of a sweep; null takes WANDB_RUN_GROUP."""

    wandb_tags: list[str] = label(factory=list)
    """W&B tags of the run; an empty list takes WANDB_TAGS."""

    wandb_mode: str | None = label(None)
    """online, offline or disabled; null: online with an API key, else offline. WANDB_MODE wins over it."""

    tensorboard: bool = label(False)
    """Also write TensorBoard event files into the ``tensorboard`` folder of the run."""

    def validate(self) -> None:
        """Checks every field by itself.

        Raises:
            ConfigError: a field has a value that its rule forbids.
        """
        if self.log_interval < 1:
            raise ConfigError("metrics.log_interval", self.log_interval, "must be at least 1 step", "1, 10")
        if self.warmup_steps < 0:
            raise ConfigError("metrics.warmup_steps", self.warmup_steps, "must not be negative", "0, 3")
        if self.console not in CONSOLES:
            raise ConfigError("metrics.console", self.console, "is no kind of console", CONSOLES)
        if self.wandb_mode is not None and self.wandb_mode not in WANDB_MODES:
            modes = (*WANDB_MODES, "null")
            raise ConfigError("metrics.wandb_mode", self.wandb_mode, "is no mode of W&B", modes)


@dataclass
class ProfilingConfig:
    """Traces of whole steps by torch's profiler, and snapshots of a GPU's memory."""

    enable: bool = label(False)
    """Write traces."""

    interval: int = label(100)
    """Steps from one trace to the next, the first of which ends so many steps after this process's start."""

    warmup: int = label(3)
    """Steps before those of a trace in which the profiler already runs, and nothing is kept."""

    active: int = label(1)
    """Steps that a trace holds."""

    with_stack: bool = label(False)
    """Keep the lines of Python that every operation was called from; makes steps slow and traces large."""

    record_shapes: bool = label(True)
    """Keep the shapes of every operation's inputs."""

    ranks: list[int] = label(factory=lambda: [0])
    """Ranks that write."""

    memory_snapshot: bool = label(False)
    """Also write which line allocated what of the GPU's memory: with each trace, and when memory is out."""

    def validate(self, steps: int, world_size: int) -> None:
        """Checks what a trace needs.

        Args:
            steps: steps of the run.
            world_size: its ranks.

        Raises:
            ConfigError: a field has a value with which nothing, or nothing whole, would be written.
        """
        if not self.enable:
            return
        for name, least in (("warmup", 0), ("active", 1)):
            if getattr(self, name) < least:
                rule = f"must be at least {least}"
                raise ConfigError(f"profiling.{name}", getattr(self, name), rule, f"{least}, 3")
        traced = self.warmup + self.active
        if self.interval < traced:
            rule = f"must hold profiling.warmup + profiling.active = {traced} steps"
            raise ConfigError("profiling.interval", self.interval, rule, f"{traced} or more")
        if self.interval > steps:
            rule = f"a run of training.steps={steps} would come to no trace"
            works = f"at most {steps}" if steps >= traced else f"training.steps={self.interval}"
            raise ConfigError("profiling.interval", self.interval, rule, works)
        wrong = [rank for rank in self.ranks if not 0 <= rank < world_size]
        if wrong or not self.ranks:
            rule = f"must be ranks of this job, which has {world_size}"
            raise ConfigError("profiling.ranks", self.ranks, rule, f"[0] to [{world_size - 1}]")

    def refuse_snapshots(self, why: str) -> None:
        """Refuses snapshots where there is no GPU.

        Raises:
            ConfigError: naming profiling.memory_snapshot.
        """
        if self.enable and self.memory_snapshot:
            rule = f"snapshots are of a GPU's memory, and {why}"
            raise ConfigError("profiling.memory_snapshot", True, rule, "false, or cluster.device=cuda")
