"""Configuration of a run's scale: model size, tokens and hyperparameters from a few numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from harness.config.fields import numerics
from harness.config.optimizer import ScheduleConfig

COUNTED = ("non_embedding", "all", "active")
HYPERPARAMETERS = ("none", "step_law")


@dataclass(frozen=True)
class ScaleConfig:
    """Model size, tokens and hyperparameters from a few numbers, for scaling experiments.

    Resolving the job sets the model's shape, training.tokens and hyperparameters, and these fields to their
    defaults: the run is the same as one with its fields set by hand.
    """

    parameters: int | float | str | None = numerics(None, id_omits_default=True)
    """Resize the model to about this many parameters, like 300M, and keep its proportions: width of heads,
    query heads per key head, and the ratios of all other widths and of depth to width."""
    tokens_per_parameter: float | None = numerics(None, least=1e-3, most=1e9, id_omits_default=True)
    """Train this many tokens for each parameter (about 20: arXiv:2203.15556), in place of
    training.tokens. With flops: also choose the model's size, so that both are met."""
    flops: float | None = numerics(None, above=0, id_omits_default=True)
    """Train as many tokens as this compute allows: tokens x FLOPs per token, with full attention, as MFU
    counts it; about 6 x parameters x tokens."""
    counted: str = numerics("non_embedding", choices=COUNTED, id_omits_default=True)
    """Parameters that count: non_embedding (without the tables of vocabulary), all, or active (those of
    non_embedding that one token uses, for mixtures of experts)."""
    hyperparameters: str = numerics("none", choices=HYPERPARAMETERS, id_omits_default=True)
    """Rule that sets optimizer.lr and training.global_batch_size: step_law (arXiv:2503.04715), fitted with
    60M to 1B parameters; the batch is rounded to a power of two of sequences."""
    lr_exponent: float = numerics(0.0, least=-2, most=2, id_omits_default=True)
    """Multiply optimizer.lr by (parameters / parameters of the model before it is resized) to this power;
    -0.4 is Step Law's at equal tokens per parameter."""
    warmup_ratio: float | None = numerics(None, least=0, most=1, id_omits_default=True)
    """Set schedule.warmup_steps to this fraction of the steps."""

    def warmed_up(self, schedule: ScheduleConfig, steps: int) -> ScheduleConfig:
        """Return the schedule with the warm-up of a run of ``steps`` steps."""
        if self.warmup_ratio is None:
            return schedule
        return replace(schedule, warmup_steps=round(self.warmup_ratio * schedule.curve_steps(steps)))
