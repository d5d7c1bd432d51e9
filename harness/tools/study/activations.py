"""Train a model for a few steps and measure its activations after each."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.model.decoder import Decoder
from harness.model.kernels import Kernel
from harness.train.engine import Engine
from harness.train.objective import loader_of
from harness.train.setup import pick_device, process_group, set_up_process

QUERIES = 64
"""Number of positions at the end of a sequence whose attention scores are measured."""


Values = dict[tuple[str, str], list[Tensor]]
"""Activations of the modules of a decoder, by name and kind, one tensor for each pass."""


@dataclass(frozen=True)
class Activation:
    """Size of one module's activations after some steps of training, on the first batch.

    Attributes:
        module: its name; ``.scores`` after an attention's name means its scores.
        kind: what it is, for all blocks: ``attention``, ``feed-forward``, ...
        width: width of the residual stream.
        change: root mean square of the difference from step 0.
    """

    module: str
    kind: str
    width: int
    step: int
    rms: float
    change: float


def measure(job: Job) -> list[Activation]:
    """Train the job in this process and measure its activations before the first and after every step.

    Every step has the same batch, whose activations are measured. So updates add up, and their
    effect shows after a few steps (the default of coord_check in github.com/microsoft/mup).
    """
    device = pick_device(job)
    set_up_process(job)
    with process_group(job, device):
        engine = Engine(job, device)
        batch = loader_of(job, build_tokenizer(job.tokenizer), engine.rows).next()
        found: list[Activation] = []
        initial: Values = {}
        for step in range(job.steps + 1):
            part = engine.parts[0]
            assert isinstance(part, Decoder)
            with recorded(part) as values:
                engine.evaluate(batch)
            initial = initial or values
            for (name, kind), now in values.items():
                change = [a - b for a, b in zip(now, initial[name, kind], strict=True)]
                found.append(Activation(name, kind, job.model.dim, step, _rms(now), _rms(change)))
            if step < job.steps:
                engine.update(engine.gradients(batch).norm)
    return found


@contextmanager
def recorded(decoder: Decoder) -> Iterator[Values]:
    """Record the activations of every pass of a decoder inside of the context."""
    assert decoder.tok_embeddings is not None and decoder.output is not None, "no pipeline"
    values: Values = {}
    hooks = []

    def after(module: nn.Module, name: str, kind: str) -> None:
        def hook(module: Any, inputs: Any, output: Any) -> None:
            if isinstance(module, Kernel):
                output = _scores(module, inputs)
            elif kind == "router logits":
                output = module.logits(inputs[0])
            output = output[0] if isinstance(output, tuple) else output
            values.setdefault((name, kind), []).append(output.detach().float())

        hooks.append(module.register_forward_hook(hook))

    after(decoder.tok_embeddings, "tok_embeddings", "embeddings")
    for layer in map(int, decoder.layers):
        block = decoder.blocks[layer]
        name = f"layers.{layer}"
        if block.attention is None:
            after(block.mixer, f"{name}.delta", "Gated DeltaNet")
        else:
            after(block.attention.inner, f"{name}.attention.scores", "attention scores")
            after(block.attention, f"{name}.attention", "attention")
        if block.moe is None:
            assert block.feed_forward is not None
            after(block.feed_forward, f"{name}.feed_forward", "feed-forward")
        else:
            after(block.moe.router, f"{name}.moe.router", "router logits")
            after(block.moe, f"{name}.moe", "experts")
        after(block, name, "residual stream")
    after(decoder.output, "output", "logits")
    try:
        yield values
    finally:
        for hook in hooks:
            hook.remove()


def _scores(kernel: Kernel, inputs: tuple[Tensor, ...]) -> Tensor:
    q_BQHD = inputs[0][:, -QUERIES:].float()
    k_BTKD = inputs[1].float()
    k_BTHD = k_BTKD.repeat_interleave(q_BQHD.shape[2] // k_BTKD.shape[2], dim=2)
    return torch.einsum("bqhd,bthd->bhqt", q_BQHD, k_BTHD) * kernel.spec.scale


def _rms(values: list[Tensor]) -> float:
    total = sum(float(value.double().square().sum()) for value in values)
    return (total / sum(value.numel() for value in values)) ** 0.5
