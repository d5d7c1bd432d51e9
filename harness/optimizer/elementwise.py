"""Optimizers that update each value by itself, computed in float32: AdamW, Adam and Lion."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config.optimizer import BLOCK
from harness.optimizer.base import OwnOptimizer, local
from harness.optimizer.settings import in_blocks
from harness.precision.swap import plain


class RoundedAdamW(OwnOptimizer):
    """AdamW (groups of kind adam: Adam) in float32, with parameters and state rounded back to their dtypes.

    torch's AdamW keeps the state in the parameter's dtype, and rounds every intermediate value to it unless
    it is fused. Here one parameter at a time is in float32. Rounding is to nearest: stochastic rounding would
    use different random numbers on every layout.

    A parameter group has the keys of torch's AdamW: ``betas``, the decays of the running means of gradients
    and of squared gradients, and ``eps``, added to the root of the second moment.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        applied = self.applied
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                self._allocate(parameter)
            factors = _Factors.of(group, applied)
            corrections = self._bias_corrections(parameters, group, applied)
            for parameter, correction in zip(parameters, corrections, strict=True):
                self._update(parameter, factors, *correction)

    def _allocate(self, parameter: Tensor) -> None:
        state = self.state[parameter]
        if not state:
            # On the host, which reads the step to compute factors; reading it from a device would wait.
            state["step"] = torch.zeros((), dtype=torch.float32)
            codes = self.state_dtype == torch.uint8
            dtype = torch.float32 if codes and not in_blocks(parameter.shape) else self.state_dtype
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.zeros_like(parameter, dtype=dtype)
                if dtype == torch.uint8:
                    state[f"{name}_scale"] = _scales(parameter)

    def _bias_corrections(
        self, parameters: list[Tensor], group: dict[str, Any], applied: Tensor | None
    ) -> list[tuple[Any, Any]]:
        """Increment each parameter's step and return its bias corrections (the means start at 0).

        Returns:
            For each parameter the divisor of the second moment's root, and the corrected learning rate.
            Numbers; device tensors if ``applied`` is one.
        """
        beta1, beta2 = group["betas"]

        def at(step: Any) -> tuple[Any, Any]:
            return (1 - beta2**step) ** 0.5, group["lr"] / (1 - beta1**step)

        states = [self.state[parameter] for parameter in parameters]
        if applied is None or not states:
            for state in states:
                state["step"] += 1
            return [at(float(state["step"])) for state in states]
        for state in states:
            if state["step"].device != applied.device:
                # full() fills on the device; copying a host value there would make the host wait.
                state["step"] = torch.full((), float(state["step"]), device=applied.device)
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, [applied.float()] * len(steps))
        # A step of 0: no step was applied yet, and neither is this one. The clamp avoids a division by 0.
        divisors, rates = at(torch.stack(steps).double().clamp_(min=1))
        return list(zip(divisors.unbind(), (rates * applied).unbind(), strict=True))

    def _update(self, parameter: Tensor, factors: _Factors, divisor: Any, rate: Any) -> None:
        state = self.state[parameter]
        target = local(plain(parameter))
        value, mean, square = target.float(), _read(state, "exp_avg"), _read(state, "exp_avg_sq")
        gradient = local(parameter.grad).float()  # type: ignore[arg-type]
        if factors.penalty:
            gradient = gradient.add(value, alpha=factors.penalty)
        if factors.skipped is not None:
            gradient = gradient.masked_fill(factors.skipped, 0.0)
        value.mul_(factors.decay)
        mean.lerp_(gradient, factors.mean_weight)
        square.mul_(factors.square_decay).addcmul_(gradient, gradient, value=factors.square_weight)
        root = square.sqrt().div_(divisor).add_(factors.eps)
        if factors.skipped is None:
            value.addcdiv_(mean, root, value=-rate)
        else:
            value.addcdiv_(mean, root.div_(rate), value=-1)
        if target.dtype != torch.float32:  # else it was updated in place
            target.copy_(value)
        _write(state, "exp_avg", mean, factors.skipped)
        _write(state, "exp_avg_sq", square, factors.skipped)


def _scales(parameter: Tensor) -> Tensor:
    """Scales of a parameter's blocks, all zero, sharded as it is."""
    mine = local(parameter)
    zeros = torch.zeros(*mine.shape[:-1], mine.shape[-1] // BLOCK, device=mine.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
    stride = torch.empty(shape, device="meta").stride()
    where = parameter.device_mesh, parameter.placements
    return DTensor.from_local(zeros, *where, run_check=False, shape=shape, stride=stride).to(parameter.device)


@lru_cache
def _values(name: str, device: torch.device) -> Tensor:
    """Values of the 256 codes, in order, as torchao and bitsandbytes have them; squares have no sign."""
    from torchao.optim.quant_utils import create_dynamic_map

    return torch.tensor(create_dynamic_map(signed=name == "exp_avg"), device=device)


def _read(state: dict[str, Tensor], name: str) -> Tensor:
    kept = local(plain(state[name]))
    if kept.dtype != torch.uint8:
        return kept.float()
    blocks = _values(name, kept.device)[kept.int()].unflatten(-1, (-1, BLOCK))
    return (blocks * local(state[f"{name}_scale"]).unsqueeze(-1)).flatten(-2)


def _write(state: dict[str, Tensor], name: str, computed: Tensor, skipped: Tensor | None) -> None:
    """Round to the nearest code; a step that is skipped changes no code and no scale."""
    kept = local(plain(state[name]))
    if kept.dtype == torch.float32:
        return  # it was updated in place
    if kept.dtype != torch.uint8:
        kept.copy_(computed)
        return
    values, blocks = _values(name, kept.device), computed.unflatten(-1, (-1, BLOCK))
    scale = blocks.abs().amax(-1)
    relative = blocks / scale.unsqueeze(-1).clamp(min=torch.finfo(torch.float32).tiny)
    codes = torch.bucketize(relative, (values[1:] + values[:-1]) / 2, out_int32=True).flatten(-2)
    for target, new in ((kept, codes.to(torch.uint8)), (local(state[f"{name}_scale"]), scale)):
        target.copy_(new if skipped is None else torch.where(skipped, target, new))


class _Factors(NamedTuple):
    """Coefficients of one step's update of a parameter group: numbers or device tensors."""

    decay: Any
    """Factor of the parameter (1 - lr * weight_decay)."""
    penalty: float
    """Weight of the parameter in the gradient (Adam's weight decay; 0 for AdamW)."""
    mean_weight: Any
    """Weight of the gradient in the running mean (1 - beta1)."""
    square_decay: Any
    """Factor of the running mean of squares (beta2)."""
    square_weight: float
    """Weight of the squared gradient in it (1 - beta2)."""
    eps: float
    skipped: Tensor | None = None
    """Whether the step changes nothing, if only the device knows."""

    @classmethod
    def of(cls, group: dict[str, Any], applied: Tensor | None) -> _Factors:
        """Factors of a parameter group; where ``applied`` is 0, they change nothing."""
        beta1, beta2 = group["betas"]
        is_adam = group.get("kind") == "adam"
        decay = 0.0 if is_adam else group["lr"] * group["weight_decay"]
        penalty = group["weight_decay"] if is_adam else 0.0
        mean_weight, square_weight, eps = 1 - beta1, 1 - beta2, group["eps"]
        if applied is None:
            return cls(1 - decay, penalty, mean_weight, beta2, square_weight, eps)
        mean_weight, square_decay = (mean_weight * applied).float(), 1 - square_weight * applied
        return cls(1 - decay * applied, penalty, mean_weight, square_decay, square_weight, eps, applied == 0)


class Lion(OwnOptimizer):
    """Lion (arXiv:2302.06675, algorithm 2).

    The update is the sign of a mean of the gradient and its running mean. One parameter at a time is updated
    in float32; parameters and state are rounded to their dtypes.
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
