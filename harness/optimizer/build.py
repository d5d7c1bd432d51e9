"""AdamW and its learning-rate schedule for the model parts of a rank."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from harness.model.spec import is_expert
from harness.optimizer.adamw import RoundedAdamW
from harness.optimizer.config import OptimizerConfig, ScheduleConfig


def build_optimizer(
    config: OptimizerConfig, named_parameters: Iterable[tuple[str, Tensor]]
) -> torch.optim.Optimizer:
    """AdamW with one parameter group that decays and one that does not.

    Args:
        config: hyperparameters and implementation.
        named_parameters: parameters by their names in the full model.
    """
    decaying: list[Tensor] = []
    without_decay: list[Tensor] = []
    for name, parameter in named_parameters:
        (decaying if _decays(name, parameter, config) else without_decay).append(parameter)
    groups: list[dict[str, Any]] = [
        {"params": parameters, "weight_decay": decay}
        for parameters, decay in ((decaying, config.weight_decay), (without_decay, 0.0))
        if parameters
    ]
    betas = (config.beta1, config.beta2)
    state_dtype = getattr(torch, config.state_dtype or "float32")
    if any(p.dtype != torch.float32 for p in (*decaying, *without_decay)) or state_dtype != torch.float32:
        return RoundedAdamW(groups, config.lr, betas, config.eps, state_dtype)
    implementation = "fused" if config.implementation == "auto" else config.implementation
    return torch.optim.AdamW(
        groups,
        lr=config.lr,
        betas=betas,
        eps=config.eps,
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


def _decays(name: str, parameter: Tensor, config: OptimizerConfig) -> bool:
    # Biases of experts are stacked in one tensor, with a dimension more.
    if parameter.ndim - is_expert(name) < 2:
        return config.decay_vectors
    return config.decay_embeddings or not name.startswith("tok_embeddings")


def build_schedule(config: ScheduleConfig, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The schedule as torch's LambdaLR, stepped once after every optimizer step."""
    return LambdaLR(optimizer, lr_factor(config, steps))


def lr_factor(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return a function from the step (from 0) to the learning rate as a fraction of its peak.

    Warm-up rises linearly and reaches the peak at its last step. The decay starts at the peak and reaches
    min_lr_factor one step after the last.
    """
    warmup = config.warmup_steps
    decay = steps - warmup if config.decay_ratio is None else round(config.decay_ratio * steps)
    shape = {
        "linear": lambda x: 1 - x,
        "sqrt": lambda x: 1 - math.sqrt(x),
        "cosine": lambda x: 0.5 * (1 + math.cos(math.pi * x)),
    }[config.decay_type]

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        into_decay = step - (steps - decay)
        if decay == 0 or into_decay <= 0:
            return 1.0
        return config.min_lr_factor + (1 - config.min_lr_factor) * shape(min(1.0, into_decay / decay))

    return factor
