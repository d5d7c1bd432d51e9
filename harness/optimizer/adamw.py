"""AdamW whose running means or parameters are in bfloat16, computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.precision.swap import plain


class RoundedAdamW(torch.optim.Optimizer):
    """AdamW that reads each parameter and its means into float32, updates them, and rounds them back.

    torch's AdamW keeps the means in the parameter's format, and rounds every intermediate value to it unless
    it is fused. Here one parameter at a time is in float32. Rounding is to the nearest: random rounding would
    draw other numbers in every layout.

    Attributes:
        found_inf: where it is 1, a step leaves everything as it is, unseen by the host; torch's fused
            optimizers call it so. None: every step is carried out.

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
        self.found_inf: Tensor | None = None
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Updates every parameter that has a gradient."""
        going = None if self.found_inf is None else 1 - self.found_inf.double()
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in held:
                self._allocate(parameter)
            factors = _Factors.of(group, going)
            for parameter, correction in zip(held, self._corrections(held, group, going), strict=True):
                self._update(parameter, factors, *correction)

    def _allocate(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            # On the host: the step is read to compute factors, and on a device would be waited for.
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
            state["exp_avg_sq"] = torch.zeros_like(parameter, dtype=self.state_dtype)

    def _corrections(
        self, parameters: list[Tensor], group: dict[str, Any], going: Tensor | None
    ) -> list[tuple[Any, Any]]:
        """Counts each parameter's coming step, and gives what makes up for the means' start at 0 in it.

        Returns:
            By what the root of the second mean is divided, and the rate by which the first is multiplied:
            numbers, or on the device if only that knows whether the step counts.
        """
        beta1, beta2 = group["betas"]

        def at(step: Any) -> tuple[Any, Any]:
            return (1 - beta2**step) ** 0.5, group["lr"] / (1 - beta1**step)

        states = [self.state[parameter] for parameter in parameters]
        if going is None or not states:
            return [at(self._count(state)) for state in states]
        for state in states:
            if state["step"].device != going.device:
                # Filled in there; a number that is copied there makes the host wait.
                state["step"] = torch.full((), float(state["step"]), device=going.device)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [going.float()] * len(steps))
        # At 0 there has been no step that counts, and this one does not either.
        divisors, rates = at(torch.stack(steps).double().clamp_(min=1))
        return list(zip(divisors.unbind(), (rates * going).unbind(), strict=True))

    @staticmethod
    def _count(state: dict[str, Any]) -> float:
        state["step"] += 1
        return float(state["step"])

    def _update(self, parameter: Tensor, factors: _Factors, divisor: Any, rate: Any) -> None:
        state = self.state[parameter]
        kept = [_local(plain(each)) for each in (parameter, state["exp_avg"], state["exp_avg_sq"])]
        value, mean, square = (each.float() for each in kept)
        gradient = _local(parameter.grad).float()  # type: ignore[arg-type]
        if factors.dropped is not None:
            gradient = gradient.masked_fill(factors.dropped, 0.0)
        value.mul_(factors.decay)
        mean.lerp_(gradient, factors.renewed)
        square.mul_(factors.retained).addcmul_(gradient, gradient, value=factors.added)
        root = square.sqrt().div_(divisor).add_(factors.eps)
        if factors.dropped is None:
            value.addcdiv_(mean, root, value=-rate)
        else:
            value.addcdiv_(mean, root.div_(rate), value=-1)
        for target, computed in zip(kept, (value, mean, square), strict=True):
            # What is float32 was updated in place.
            if target.dtype != torch.float32:
                target.copy_(computed)


class _Factors(NamedTuple):
    """What a group's parameters and means are multiplied by in a step: numbers, or on the device."""

    decay: Any
    """Of a parameter."""
    renewed: Any
    """Share of the gradient in the running mean."""
    retained: Any
    """Share of the running mean of squares that is left."""
    added: float
    """Share of the squared gradient that comes to it."""
    eps: float
    dropped: Tensor | None = None
    """Whether the step leaves everything as it is, if only the device knows."""

    @classmethod
    def of(cls, group: dict[str, Any], going: Tensor | None) -> _Factors:
        """The factors; where ``going`` is 0, those that leave everything as it is."""
        beta1, beta2 = group["betas"]
        decay, renewed, added = group["lr"] * group["weight_decay"], 1 - beta1, 1 - beta2
        if going is None:
            return cls(1 - decay, renewed, beta2, added, group["eps"])
        renewed, retained = (renewed * going).float(), 1 - added * going
        return cls(1 - decay * going, renewed, retained, added, group["eps"], going == 0)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
