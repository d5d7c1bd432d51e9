"""What the optimizer and the learning-rate schedule are told."""

from __future__ import annotations

import math
from dataclasses import dataclass

from harness.config import execution, numerics
from harness.errors import ConfigError

IMPLEMENTATIONS = ("auto", "fused", "foreach", "for-loop")
STATE_DTYPES = ("float32", "bfloat16")
# A mean m shrinks by (1 - beta) m a step, which is lost if it is less than half a step of bfloat16; that is
# at most 2**-8 m.
LARGEST_BFLOAT16_BETA = 0.99
DECAYS = ("linear", "sqrt", "cosine")


@dataclass
class OptimizerConfig:
    """AdamW (arXiv:1711.05101)."""

    lr: float = numerics(8e-4)
    """Peak learning rate, reached at the end of the warm-up."""
    beta1: float = numerics(0.9)
    """Decay of the running mean of gradients, per step."""
    beta2: float = numerics(0.95)
    """Decay of the running mean of squared gradients, per step."""
    eps: float = numerics(1e-8)
    """Added to the root of the second moment."""
    weight_decay: float = numerics(0.1)
    """Share of a parameter taken away per step, times the learning rate."""
    decay_vectors: bool = numerics(False)
    """Whether one-dimensional parameters (norm weights, biases) decay too."""
    decay_embeddings: bool = numerics(True)
    """Whether the embedding table decays."""
    state_dtype: str | None = numerics(None)
    """Format of the running means: float32 or bfloat16, computed in float32 all the same; null means that of
    the parameters, precision.master_dtype."""
    implementation: str = execution("auto")
    """auto (fused), fused, foreach or for-loop: how torch carries the update out. What torch does not have,
    bfloat16 state or parameters with an update in float32, is carried out by our own loop: auto. With foreach
    and for-loop, debug.non_finite=skip makes the host wait for the norm in every step."""
    in_backward: bool = execution(False)
    """Update every parameter as soon as backward has its gradient and free that, so that gradients never
    stand whole. Needs training.max_norm=0, one pass a step, no pipeline and debug.non_finite=stop."""

    def resolve(self, master_dtype: str) -> None:
        """Fills in what follows from the rest."""
        self.state_dtype = self.state_dtype or master_dtype

    def validate(self, master_dtype: str = "float32") -> None:
        """Raises ConfigError for values outside AdamW's domain, or that parameters of a format rule out."""
        if not 0 <= self.lr < math.inf:
            raise ConfigError("optimizer.lr", self.lr, "must be a number, and not negative")
        for name in ("beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ConfigError(f"optimizer.{name}", getattr(self, name), "must be in [0, 1)")
        if not 0 < self.eps < math.inf:
            raise ConfigError("optimizer.eps", self.eps, "must be a positive number")
        if not 0 <= self.weight_decay < math.inf:
            raise ConfigError(
                "optimizer.weight_decay", self.weight_decay, "must be a number, and not negative"
            )
        if self.implementation not in IMPLEMENTATIONS:
            raise ConfigError(
                "optimizer.implementation", self.implementation, "no such implementation", IMPLEMENTATIONS
            )
        if self.state_dtype not in (None, *STATE_DTYPES):
            raise ConfigError(
                "optimizer.state_dtype", self.state_dtype, "no such format", [*STATE_DTYPES, "null"]
            )
        if self.implementation != "auto" and "bfloat16" in (master_dtype, self.state_dtype):
            raise ConfigError(
                "optimizer.implementation",
                self.implementation,
                "torch's AdamW does not update bfloat16 parameters or state in float32",
                "auto, or optimizer.state_dtype=float32 and precision.master_dtype=float32",
            )
        if self.state_dtype == "bfloat16":
            self._validate_bfloat16_state()

    def _validate_bfloat16_state(self) -> None:
        for name in ("beta1", "beta2"):
            if getattr(self, name) > LARGEST_BFLOAT16_BETA:
                raise ConfigError(
                    f"optimizer.{name}",
                    getattr(self, name),
                    "a running mean in bfloat16 (eight bits) would round its own changes away",
                    f"at most {LARGEST_BFLOAT16_BETA}, or optimizer.state_dtype=float32",
                )


@dataclass
class ScheduleConfig:
    """Warm-up, a stable stretch, and a decay (WSD, arXiv:2404.06395); cosine is a decay without a stretch."""

    warmup_steps: int = numerics(200)
    """Steps of linear warm-up from 0 to optimizer.lr."""
    decay_ratio: float | None = numerics(None)
    """Share of training.steps that the decay takes, at the end; null means everything after the warm-up."""
    decay_type: str = numerics("linear")
    """Shape of the decay: linear, sqrt (1 - sqrt) or cosine."""
    min_lr_factor: float = numerics(0.0)
    """What the decay ends at, as a share of optimizer.lr."""

    def validate(self, steps: int) -> None:
        """Raises ConfigError for a shape that is not known or does not fit into the steps."""
        if self.warmup_steps < 0:
            raise ConfigError("schedule.warmup_steps", self.warmup_steps, "must not be negative")
        if self.decay_type not in DECAYS:
            raise ConfigError("schedule.decay_type", self.decay_type, "no such decay", DECAYS)
        if self.decay_ratio is not None and not 0 <= self.decay_ratio <= 1:
            raise ConfigError("schedule.decay_ratio", self.decay_ratio, "must be in [0, 1], or null")
        if not 0 <= self.min_lr_factor <= 1:
            raise ConfigError("schedule.min_lr_factor", self.min_lr_factor, "must be in [0, 1]")
        decay_steps = 0 if self.decay_ratio is None else round(self.decay_ratio * steps)
        if self.warmup_steps + decay_steps > steps:
            works = f"at most {steps - decay_steps}"
            if self.decay_ratio is None or self.decay_ratio < 1:
                # The decay's steps are rounded, by half a step at most.
                least = math.ceil((self.warmup_steps + 0.5) / (1 - (self.decay_ratio or 0)))
                works += f", or training.steps={least}"
            raise ConfigError(
                "schedule.warmup_steps",
                self.warmup_steps,
                f"warm-up and decay ({decay_steps} steps) must fit into training.steps={steps}",
                works,
            )
