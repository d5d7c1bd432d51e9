"""The optimizer of a rank, its schedule, and the average of the weights."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.sgd import sgd

from harness.config.optimizer import (
    DECAYS,
    EIGHT_BIT,
    KINDS,
    LR_SCALES,
    OptimizerConfig,
    ScheduleConfig,
)
from harness.config.registry import load_attribute
from harness.model.spec import TensorSpec
from harness.optimizer.base import CombinedOptimizer, local, parts_of
from harness.optimizer.elementwise import Lion, RoundedAdamW
from harness.optimizer.muon import Muon
from harness.optimizer.qk_clip import QKClip
from harness.optimizer.settings import TensorSettings, tensor_settings
from harness.precision.swap import plain

Groups = list[dict[str, Any]]


def build_optimizer(
    config: OptimizerConfig,
    named_parameters: Iterable[tuple[str, Tensor]],
    specs: Mapping[str, TensorSpec],
    ranks: dist.ProcessGroup | None = None,
    qk_clip: QKClip | None = None,
) -> torch.optim.Optimizer:
    """One optimizer for all parameters, with a parameter group for each ``tensor_settings``.

    Args:
        ranks: the ranks that hold shards of these parameters; None for one rank.
        qk_clip: what clips logits of attention after each step; the average has the clipped weights.
    """
    by_settings: dict[TensorSettings, list[Tensor]] = {}
    for name, parameter in named_parameters:
        by_settings.setdefault(tensor_settings(config, specs[name]), []).append(parameter)
    by_kind: dict[str, Groups] = {}
    for settings, parameters in by_settings.items():
        made: dict[str, Any] = {
            "params": parameters,
            "kind": settings.kind,
            "lr": config.lr * settings.lr_factor,
            "weight_decay": settings.weight_decay,
        }
        # An optimizer without these fields may have others of the same name, such as three betas.
        if KINDS[settings.kind].has_betas:
            made["betas"] = settings.betas
        if KINDS[settings.kind].has_eps:
            made["eps"] = settings.eps
        by_kind.setdefault(settings.kind, []).append(made)
    built: dict[str, torch.optim.Optimizer] = {}
    for kind, groups in by_kind.items():
        options = KINDS[kind].options
        # The options in the config are those of its own kind; groups may have others.
        given = config.options if kind == config.kind else {}
        typed = [] if options is None else [options(**given)]
        built[kind] = load_attribute(KINDS[kind].build)(config, groups, ranks, *typed)
    optimizer = next(iter(built.values())) if len(built) == 1 else CombinedOptimizer(built)
    if qk_clip is not None:
        optimizer.register_step_post_hook(qk_clip.after_step)
    if config.ema_decay:
        keep_average(optimizer, config.ema_decay)
    return optimizer


def adam(
    config: OptimizerConfig, groups: Groups, _: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """Build torch's Adam or AdamW, or ours for parameters or state in bfloat16."""
    state_dtype = _state_dtype(config)
    dtypes = {state_dtype}
    for group in groups:
        dtypes |= {parameter.dtype for parameter in group["params"]}
    if dtypes != {torch.float32}:
        return RoundedAdamW(groups, config.lr, state_dtype, eps=config.eps)
    implementation = "fused" if config.implementation == "auto" else config.implementation
    return LocalAdam(
        groups,
        lr=config.lr,
        eps=config.eps,
        decoupled_weight_decay=groups[0]["kind"] != "adam",
        fused=implementation == "fused",
        foreach=implementation == "foreach",
    )


class LocalAdam(torch.optim.Adam):
    """torch's Adam on local shards: a learning rate on the device would make DTensor gather them."""

    def _init_group(
        self, group: dict[str, Any], *lists: list[Tensor]
    ) -> bool:  # torch 2.13 to 2.15
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[misc]
        for tensors in lists:
            tensors[:] = map(local, tensors)
        return has_complex


def lion(
    config: OptimizerConfig, groups: Groups, _: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """Build Lion."""
    return Lion(groups, config.lr, _state_dtype(config))


def muon(
    config: OptimizerConfig, groups: Groups, ranks: dist.ProcessGroup | None
) -> torch.optim.Optimizer:
    """Build Muon."""
    return Muon(
        groups,
        config.lr,
        _state_dtype(config),
        momentum=config.momentum,
        dtype=getattr(torch, config.newton_schulz_dtype or "float32"),
        scale=LR_SCALES[config.lr_scale],
        group=ranks,
    )


def _state_dtype(config: OptimizerConfig) -> torch.dtype:
    return (
        torch.uint8
        if config.state_dtype == EIGHT_BIT
        else getattr(torch, config.state_dtype or "float32")
    )


def build_schedule(
    config: ScheduleConfig, optimizer: torch.optim.Optimizer, steps: int
) -> LambdaLR:
    """The schedule as torch's LambdaLR, stepped once after every optimizer step."""
    return LambdaLR(optimizer, lr_factor(config, steps))


def lr_factor(config: ScheduleConfig, steps: int) -> Callable[[int], float]:
    """Return a function from the step (from 0) to the learning rate as a fraction of its peak.

    Warm-up rises linearly and reaches the peak at its last step. The decay starts at the peak and
    reaches min_lr_factor one step after the last.
    """
    warmup = config.warmup_steps
    decay = steps - warmup if config.decay_ratio is None else round(config.decay_ratio * steps)
    shape = partial(DECAYS[config.decay_type], options=config.options)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        into_decay = step - (steps - decay)
        if decay == 0 or into_decay <= 0:
            return 1.0
        return config.min_lr_factor + (1 - config.min_lr_factor) * shape(
            min(1.0, into_decay / decay)
        )

    return factor


EMA = "ema"
# An average moves by a step of SGD with the gradient (average - weight). Of functions for many
# tensors, the device can drop only fused optimizers.
_SGD: dict[str, Any] = {
    "weight_decay": 1,
    "momentum": 0,
    "dampening": 0,
    "nesterov": False,
    "maximize": True,
}


def keep_average(optimizer: torch.optim.Optimizer, decay: float) -> None:
    """Make every step of an optimizer also update the averages of the parameters that it updated.

    The average of a parameter is a state tensor of it, so it is sharded, saved, loaded and
    resharded like the others: its name in a checkpoint is ``optimizer.state.<name>.ema``. It is the
    weights after the first step, then ``decay`` times itself plus (1 - ``decay``) times the
    weights, in float32. A step that the device drops (``found_inf``) does not change it.
    """

    @torch.no_grad()
    def update(_optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        averages = []
        weights = []
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = optimizer.state[parameter]
                value = plain(parameter.detach())
                if EMA not in state:
                    state[EMA] = value.to(torch.float32, copy=True)
                    continue
                averages.append(local(state[EMA]))
                weights.append(local(value))
        dropped = getattr(parts_of(optimizer)[0], "found_inf", None)
        calls = [(averages, weights)]
        if any(weight.dtype != torch.float32 for weight in weights):
            calls = [
                ([average], [weight]) for average, weight in zip(averages, weights, strict=True)
            ]
        for some, towards in calls:
            values = [weight.float() for weight in towards]  # only one copy in float32 at a time
            sgd(
                some,
                values,
                [None] * len(some),
                fused=True,
                found_inf=dropped,
                lr=1 - decay,
                **_SGD,
            )

    optimizer.register_step_post_hook(update)
