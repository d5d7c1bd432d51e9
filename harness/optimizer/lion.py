"""Lion (arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.optimizer.base import OwnOptimizer, local
from harness.precision.swap import plain


class Lion(OwnOptimizer):
    """Lion: the update is the sign of a mean of the gradient and its running mean.

    One parameter at a time is updated in float32; parameters and state are rounded to their dtypes.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        found = self.applied
        applied = 1.0 if found is None else found.float()
        for group in self.param_groups:
            weight, decay = (1 - beta for beta in group["betas"])
            rate = group["lr"] * applied
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
                targets = [local(plain(each)) for each in (parameter, state["exp_avg"])]
                value, mean = (each.float() for each in targets)
                gradient = local(parameter.grad).float()
                if found is not None:
                    gradient = gradient.masked_fill(found == 0, 0.0)
                update = mean.lerp(gradient, weight).sign_()
                value.mul_(1 - rate * group["weight_decay"]).sub_(update.mul_(rate))
                mean.lerp_(gradient, decay * applied)
                for target, computed in zip(targets, (value, mean), strict=True):
                    # float32 targets were updated in place.
                    if target.dtype != torch.float32:
                        target.copy_(computed)
