"""An exponential moving average of the weights (``optimizer.ema_decay``), part of the optimizer's state.

The average of a parameter is a state tensor of it, so it is sharded, saved, loaded and resharded like the
others: its name in a checkpoint is ``optimizer.state.<name>.ema``.
"""

from __future__ import annotations

from typing import Any

import torch

from harness.optimizer.base import local, parts_of
from harness.precision.swap import plain

EMA = "ema"


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Make every step of an optimizer also update the averages of the parameters that it updated.

    The average is the weights after the first step, then ``decay`` times itself plus (1 - ``decay``) times
    the weights, in float32. A step that the device drops (``found_inf``) does not change it.
    """

    @torch.no_grad()
    def update(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        averages, weights = [], []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, value = optimizer.state[parameter], plain(parameter.detach())
                if EMA not in state:
                    state[EMA] = value.to(torch.float32, copy=True)
                    continue
                averages.append(local(state[EMA]))
                weights.append(local(value))
        if not averages:
            return
        dropped = getattr(parts_of(optimizer)[0], "found_inf", None)
        if dropped is None and all(weight.dtype == torch.float32 for weight in weights):
            torch._foreach_lerp_(averages, weights, 1 - decay)
            return
        for average, weight in zip(averages, weights, strict=True):
            share = 1 - decay if dropped is None else ((1 - decay) * (1 - dropped)).to(average)
            average.lerp_(weight.float(), share)  # only one copy of bfloat16 weights in float32 at a time

    optimizer.register_step_post_hook(update)
