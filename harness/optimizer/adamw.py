"""AdamW whose running means or parameters are in bfloat16, computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.precision.swap import plain


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW that reads each parameter and its means into float32, updates them, and rounds them back.

    torch's AdamW keeps the means in the parameter's format, and rounds every intermediate value to it unless
    it is fused. Here one parameter at a time is in float32. Rounding is to the nearest: random rounding would
    draw other numbers in every layout.

    Args:
        groups: parameters, with a weight decay each.
        lr: learning rate.
        betas: decay of the running means of gradients and of squared gradients.
        eps: added to the root of the second.
        state_dtype: format of both.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        state_dtype: torch.dtype,
    ) -> None:
        self.state_dtype = state_dtype
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group)

    def _update(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # On the host: the step is read to compute factors, and on a device would be waited for.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)
        step, (beta1, beta2) = self._count(state), group["betas"]
        kept = [_local(plain(each)) for each in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        value, mean, square = (each.float() for each in kept)
        gradient = _local(parameter.grad).float()  # type: ignore[arg-type]
        value.mul_(1 - group["lr"] * group["weight_decay"])
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = square.sqrt().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
        value.addcdiv_(mean, root, value=-group["lr"] / (1 - beta1**step))
        for target, computed in zip(kept, (value, mean, square), strict=True):
            # What is float32 was updated in place.
            if target.dtype != torch.float32:
                target.copy_(computed)

    @staticmethod
    def _count(state: dict[str, Any]) -> float:
        """The number of this step, from 1."""
        state["step"] += 1
        return float(state["step"])


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
