"""An optimizer: SGD with momentum, by torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from harness.config.fields import numerics
from harness.config.optimizer import Kind, OptimizerConfig
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


@dataclass(frozen=True)
class SGDOptions:
    """Fields of ``optimizer.options``."""

    momentum: float = numerics(0.9, least=0, below=1)
    """Decay of the running sum of gradients, per step."""
    nesterov: bool = numerics(False)
    """Take the gradient after the momentum's step."""


def build(
    config: OptimizerConfig,
    groups: list[dict[str, Any]],
    ranks: dist.ProcessGroup | None,
    options: SGDOptions,
) -> torch.optim.Optimizer:
    """Build torch's SGD; groups have their own learning rate and weight decay.

    Values are updated one by one, so shards need no exchange between ``ranks``.
    """
    import torch

    if config.state_dtype != "float32":
        rule = "torch's SGD updates in the format of its state"
        raise ConfigError(
            "optimizer.state_dtype", config.state_dtype, rule, "float32, precision=bf16 or fp32"
        )
    return torch.optim.SGD(
        groups, lr=config.lr, momentum=options.momentum, nesterov=options.nesterov
    )


# The plan counts a momentum buffer for each parameter.
SGD = Kind(
    f"{__name__}:build",
    ("momentum_buffer",),
    has_betas=False,
    has_eps=False,
    options=SGDOptions,
)
