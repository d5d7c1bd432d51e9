"""Optimizers as other packages write them: they count in parameter groups, or keep undeclared tensors."""

from unittest.mock import patch

import torch
from resumable_runs import train

from harness.config.optimizer import KINDS, Kind


class Counting(torch.optim.Optimizer):
    """Momentum with a rate that grows, as Prodigy's, and counters in three forms."""

    def __init__(self, groups, lr):
        defaults = {"lr": lr, "betas": (0.9, 0.99, 0.999), "estimate": 0.5, "scale": torch.ones(())}
        super().__init__(groups, defaults)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, _, _ = group["betas"]
            group["step"] = group.get("step", 0) + 1
            group["estimate"] *= 1.1
            group["scale"].mul_(0.9)
            rate = group["lr"] * group["estimate"] * float(group["scale"]) / group["step"]
            for parameter in group["params"]:
                state = self.state[parameter]
                state["seen"] = state.get("seen", 0) + 1
                state.setdefault("mean", torch.zeros_like(parameter)).lerp_(
                    parameter.grad, 1 - first
                )
                parameter.add_(state["mean"], alpha=-rate / state["seen"])


class Hoarding(torch.optim.SGD):
    """SGD that keeps the last gradient, which its Kind does not name."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                assert "last" not in self.state[parameter], "a second update"
                self.state[parameter]["last"] = parameter.grad.clone()


class Listing(torch.optim.SGD):
    """SGD that keeps a list in its groups."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            assert "history" not in group, "a second update"
            group["history"] = [1.0]


def counting(config, groups, _):
    return Counting(groups, config.lr)


def hoarding(config, groups, _):
    return Hoarding(groups, config.lr, momentum=0.9)


def listing(config, groups, _):
    return Listing(groups, config.lr, momentum=0.9)


OUTSIDE = {
    "counting": Kind("outside_optimizers:counting", ("mean",), has_betas=False, has_eps=False),
    "hoarding": Kind(
        "outside_optimizers:hoarding", ("momentum_buffer",), has_betas=False, has_eps=False
    ),
    "listing": Kind(
        "outside_optimizers:listing", ("momentum_buffer",), has_betas=False, has_eps=False
    ),
}


def installed():
    """Add the optimizers to ``optimizer.kind``, as the entry points of a package do."""
    return patch.dict(KINDS._builtins, OUTSIDE)


def train_outside(job_json, run_dir, stop_after=None):
    """Train on this rank with the optimizers of this file."""
    with installed():
        return train(job_json, run_dir, stop_after)
