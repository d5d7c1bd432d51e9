"""Optimizers that update each value by itself, computed in float32: AdamW, Adam and Lion."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.config.optimizer import BLOCK
from harness.optimizer.base import OwnOptimizer, local
from harness.optimizer.settings import in_blocks
from harness.precision.swap import plain

MEANS = "exp_avg", "exp_avg_sq"
_Stored = tuple[Tensor, ...]  # a tensor; of codes also their scales, values and bounds


_compiled = lru_cache(torch.compile)


def _update(rule: Callable[..., None], parameter: Tensor, *arguments: Any) -> None:
    """Call a rule of plain tensors with a parameter's local shard; on GPUs it is compiled to one kernel."""
    value = _rows(parameter)
    if value.numel():
        gradient = local(parameter.grad).reshape(value.shape)  # type: ignore[arg-type]
        if value.is_cuda:
            rule = _compiled(rule)
        rule(value, gradient, *arguments)


def _rows(tensor: Tensor) -> Tensor:
    """A local shard as [N, BLOCK], or else [N, 1]: one compiled function serves every number of rows."""
    shard = local(plain(tensor)).detach()
    return shard.view(-1, 1 if shard.numel() % BLOCK else BLOCK)


class RoundedAdamW(OwnOptimizer):
    """AdamW (groups of kind adam: Adam) in float32, with parameters and state rounded back to their dtypes.

    torch's AdamW keeps the state in the parameter's dtype, and rounds every intermediate value to
    it unless it is fused. Here one parameter at a time is in float32, on GPUs in registers.
    Rounding is to nearest: stochastic rounding would use different random numbers on every layout.

    A parameter group has the keys of torch's AdamW: ``betas``, the decays of the running means of
    gradients and of squared gradients, and ``eps``, added to the root of the second moment.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        applied = self.applied
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                state = self.state[parameter]
                if state:
                    continue
                # On the host, which reads the step to compute factors; reading it from a device
                # would wait.
                state["step"] = torch.zeros((), dtype=torch.float32)
                codes = self.state_dtype == torch.uint8
                without = codes and not in_blocks(parameter.shape)
                dtype = torch.float32 if without else self.state_dtype
                for name in MEANS:
                    state[name] = torch.zeros_like(parameter, dtype=dtype)
                    if dtype == torch.uint8:
                        state[f"{name}_scale"] = _scales(parameter)
            factors = _factors(group, applied)
            corrections = self._bias_corrections(parameters, group, applied)
            for parameter, correction in zip(parameters, corrections, strict=True):
                stored = [_stored(self.state[parameter], name) for name in MEANS]
                _update(_adamw, parameter, stored, factors, correction)

    def _bias_corrections(
        self, parameters: list[Tensor], group: dict[str, Any], applied: Tensor | None
    ) -> Sequence[Any]:
        """Increment each parameter's step and return its bias corrections (the means start at 0).

        Returns:
            For each parameter the divisor of the second moment's root, and the corrected learning
            rate. Numbers; a tensor of both if ``applied`` is one, of 16 bytes, as compiled kernels
            want to read.
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
        # A step of 0: no step was applied yet, and neither is this one. The clamp avoids a division
        # by 0.
        divisors, rates = at(torch.stack(steps).double().clamp_(min=1))
        return torch.stack((divisors, rates * applied), dim=1).unbind()


def _factors(group: dict[str, Any], applied: Tensor | None) -> tuple[Any, ...]:
    """Coefficients of a group's update, numbers or tensors; where ``applied`` is 0, they change nothing."""
    beta1, beta2 = group["betas"]
    is_adam = group.get("kind") == "adam"
    decay = 0.0 if is_adam else group["lr"] * group["weight_decay"]
    penalty = group["weight_decay"] if is_adam else 0.0
    mean_weight = 1 - beta1
    square_weight = 1 - beta2
    eps = group["eps"]
    if applied is None:
        return 1 - decay, penalty, mean_weight, beta2, square_weight, eps, None
    mean_weight = (mean_weight * applied).float()
    square_decay = 1 - square_weight * applied
    return 1 - decay * applied, penalty, mean_weight, square_decay, square_weight, eps, applied == 0


def _adamw(
    target: Tensor,
    gradient: Tensor,
    stored: list[_Stored],
    factors: tuple[Any, ...],
    correction: Any,
) -> None:
    decay, penalty, mean_weight, square_decay, square_weight, eps, skipped = factors
    divisor, rate = correction
    value, gradient, mean, square = target.float(), gradient.float(), *map(_read, stored)
    if penalty:
        gradient = gradient.add(value, alpha=penalty)
    if skipped is not None:
        gradient = gradient.masked_fill(skipped, 0.0)
    value.mul_(decay)
    mean.lerp_(gradient, mean_weight)
    square.mul_(square_decay).addcmul_(gradient, gradient, value=square_weight)
    root = square.sqrt().div_(divisor).add_(eps)
    if skipped is None:
        value.addcdiv_(mean, root, value=-rate)
    else:
        value.addcdiv_(mean, root.div_(rate), value=-1)
    for kept, computed in zip(((target,), *stored), (value, mean, square), strict=True):
        _write(kept, computed, skipped)


def _scales(parameter: Tensor) -> Tensor:
    """Scales of a parameter's blocks, all zero, sharded as it is."""
    mine = local(parameter)
    zeros = torch.zeros(*mine.shape[:-1], mine.shape[-1] // BLOCK, device=mine.device)
    if not isinstance(parameter, DTensor):
        return zeros
    shape = torch.Size((*parameter.shape[:-1], parameter.shape[-1] // BLOCK))
    stride = torch.empty(shape, device="meta").stride()
    where = parameter.device_mesh, parameter.placements
    return DTensor.from_local(zeros, *where, run_check=False, shape=shape, stride=stride).to(
        parameter.device
    )


@lru_cache
def _codes(name: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """The 256 values of torchao and bitsandbytes (squares have no sign), in order, and the bounds between."""
    from torchao.optim.quant_utils import create_dynamic_map

    values = torch.tensor(create_dynamic_map(signed=name == "exp_avg"), device=device)
    return values, (values[1:] + values[:-1]) / 2


def _stored(state: dict[str, Tensor], name: str) -> _Stored:
    mean = _rows(state[name])
    if mean.dtype != torch.uint8:
        return (mean,)
    return mean, local(state[f"{name}_scale"]).view(-1, 1), *_codes(name, mean.device)


def _read(stored: _Stored) -> Tensor:
    if len(stored) == 1:
        return stored[0].float()
    codes, scale, values, _ = stored
    return values[codes.int()] * scale


def _write(stored: _Stored, computed: Tensor, skipped: Tensor | None) -> None:
    """Round to the dtype, or to the nearest code; a step that is skipped changes no code and no scale."""
    if len(stored) == 1:
        if stored[0].dtype != torch.float32:  # else it was updated in place
            stored[0].copy_(computed)
        return
    codes, scale, _, bounds = stored
    largest = computed.abs().amax(-1, keepdim=True)
    relative = computed / largest.clamp(min=torch.finfo(torch.float32).tiny)
    nearest = torch.bucketize(relative, bounds, out_int32=True).to(torch.uint8)
    for target, new in ((codes, nearest), (scale, largest)):
        target.copy_(new if skipped is None else torch.where(skipped, target, new))


class Lion(OwnOptimizer):
    """Lion (arXiv:2302.06675, algorithm 2).

    The update is the sign of a mean of the gradient and its running mean. One parameter at a time
    is updated in float32; parameters and state are rounded to their dtypes.
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient."""
        applied = self.applied
        skipped = None if applied is None else applied == 0
        for group in self.param_groups:
            weight, decay = (1 - beta for beta in group["betas"])
            rate = group["lr"]
            if applied is not None:
                rate = rate * applied.float()
                decay = decay * applied.float()
            factors = weight, decay, 1 - rate * group["weight_decay"], rate, skipped
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["exp_avg"] = torch.zeros_like(parameter, dtype=self.state_dtype)
                _update(_lion, parameter, _rows(state["exp_avg"]), factors)


def _lion(target: Tensor, gradient: Tensor, stored: Tensor, factors: tuple[Any, ...]) -> None:
    weight, decay, shrunk, rate, skipped = factors
    value = target.float()
    gradient = gradient.float()
    mean = stored.float()
    if skipped is not None:
        gradient = gradient.masked_fill(skipped, 0.0)
    update = mean.lerp(gradient, weight).sign_()
    value.mul_(shrunk).sub_(update.mul_(rate))
    mean.lerp_(gradient, decay)
    _write((target,), value, skipped)
    _write((stored,), mean, skipped)
