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
