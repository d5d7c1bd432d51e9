"""An engine with captured steps computes what the plain one does. Graphs need a GPU: test_gpu.py has them."""

from typing import Any

import pytest
import torch
from jobs import random_batch, tiny

from harness.train import graphed
from harness.train.engine import Engine
from harness.train.graphed import GraphedEngine

CPU = torch.device("cpu")
SMALL = (
    "training.steps=10",
    "training.seq_len=32",
    "training.global_batch_size=4",
    "schedule.warmup_steps=8",
)


class StandIn:
    """Calls a function with all values in tensors that stay where they are, as a graph needs them."""

    graph: Any = None

    def __init__(self, function, pool, stream):
        self.function = function
        self.inputs = []

    def __call__(self, *values):
        if not self.inputs:
            self.inputs = [
                None if value is None else torch.as_tensor(value).clone() for value in values
            ]
        for static, value in zip(self.inputs, values, strict=True):
            if static is not None:
                static.copy_(torch.as_tensor(value))
        return self.function(*self.inputs)


def losses_of(engine):
    losses = []
    for step in range(4):
        batch = random_batch(4, 32, step)
        outcome = engine.gradients(batch)
        engine.update(outcome.norm)
        losses += [outcome.loss, outcome.grad_norm, engine.evaluate(batch)[0].loss]
    return losses


def losses_of_both():
    """Losses and norms of both engines, and whether gradients are left without a graph and with one."""
    job = tiny(*SMALL)
    plain = losses_of(Engine(job, CPU))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphed, "Graphed", StandIn)
        patch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        patch.setattr(torch.cuda, "Stream", lambda device: None)
        engine = GraphedEngine(job, CPU)
    captured = losses_of(engine)
    assert all(group["capturable"] for group in engine.optimizer.param_groups)
    assert all(isinstance(group["lr"], float) for group in engine.optimizer.param_groups)
    freed = [parameter.grad is None for parameter in engine.parameters]
    engine.graphed_passes.graph = object()
    losses_of(engine)
    return plain, captured, freed, [parameter.grad is None for parameter in engine.parameters]


def test_captured_steps_compute_what_others_compute(pool):
    """Numbers that become tensors, such as rates, are rounded to float32."""
    [(plain, captured, freed, kept)] = pool.run(1, losses_of_both)
    assert captured == pytest.approx(plain, rel=1e-5)
    assert all(freed)
    assert not any(kept)
