"""Checks of a device before anything is timed on it; tests/test_gpu.py makes some of them too.

    python experiments/first_gpu/checks.py kernels     # Triton kernels and Muon's products against float64
    python experiments/first_gpu/checks.py losses      # losses of ten steps against a CPU's, in float32
    python experiments/first_gpu/checks.py captured    # CUDA graphs against steps that are not captured

Prints a row of JSON for each check: its largest error, the allowed one, and whether it passed. A virtual GPU
has no values: there nothing is judged. On a CPU the first two run too, the kernels as plain operations.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import Tensor

from harness.compose.composer import compose_job
from harness.config.model import RopeConfig
from harness.data.batch import Batch
from harness.model import combine
from harness.model.rope import _rotated, rope_table, signed_table, turn
from harness.optimizer.muon import orthogonalize
from harness.parallelism.materialize import draw
from harness.tools.parity.first_wrong import full_gradients
from harness.tools.rehearse.rank import CONTROLLER
from harness.train.graphed import build_engine
from harness.train.setup import process_group, set_up_process

SMALL = [
    "model=llama3_tiny",
    "model.head_dim=16",
    "data=synthetic",
    "tokenizer=bytes",
    "training.steps=10",
    "training.seq_len=64",
    "training.global_batch_size=4",
    "training.local_batch_size=2",
    "cluster.ranks_per_node=1",
]
TOLERANCES = {"fp32": (1e-5, 1e-3), "bf16": (1e-3, 5e-2)}
"""Of losses and of gradients, relative."""
STEPS = {
    "fp32": "precision=fp32",
    "bf16 chunks compiled": "precision=bf16 training.loss_chunks=4 compile=on",
    "bf16_full muon": "precision=bf16_full optimizer=muon",
    "bf16 average flex": "precision=bf16 optimizer.ema_decay=0.9 training.attention=flex",
    "bf16 experts": (
        "precision=bf16 model.moe.num_experts=8 model.moe.hidden_dim=64 model.moe.top_k=2"
    ),
}
"""Ways to run a step that are captured; the captured one is compared with the other."""
# Ten updates by Adam divide small gradients by their own size, which enlarges differences of rounding.
# A value of 8 bits that falls to its other neighbour moves a parameter by a part of an update.
LOSSES = {
    "adamw": ("", 1e-4),
    "adamw 8bit": ("optimizer.state_dtype=8bit", 1e-3),
    "muon": ("optimizer=muon", 1e-4),
    "experts": ("model.moe.num_experts=8 model.moe.hidden_dim=64 model.moe.top_k=2", 1e-3),
}
"""Jobs in float32, and the allowed error of their losses, relative."""
FORMATS = {torch.float32: 1e-5, torch.bfloat16: 2**-7}
"""Formats of the kernels, and the allowed error: absolute of values below 1, relative of others."""


@contextmanager
def drawn_on_the_cpu() -> Iterator[None]:
    """Draw initial values by the CPU's generator, whatever the device: others are different ones."""

    def draw_there(name: str, shape: Any, how: Any, seed: int, device: torch.device) -> Tensor:
        return draw(name, shape, how, seed, torch.device("cpu")).to(device)

    with patch("harness.parallelism.materialize.draw", draw_there):
        yield


def train_steps(
    device: str, *overrides: str, steps: int = 3
) -> tuple[list[float], list[dict[str, Tensor]]]:
    """Losses and whole gradients of steps of a small job, over the same random tokens each time."""
    job = compose_job([*SMALL, *overrides, f"cluster.device={device}"])
    set_up_process(job)
    losses, gradients = [], []
    with process_group(job, torch.device(device)):
        engine = build_engine(job, torch.device(device))
        for step in range(steps):
            generator = torch.Generator().manual_seed(step)
            tokens = torch.randint(0, 256, (4, 65), generator=generator)
            batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
            if steps > 3:
                engine.evaluate(batch)  # between captured steps, and before one is captured
            outcome = engine.gradients(batch)
            losses.append(outcome.loss)
            gradients.append({name: g.cpu() for name, g in full_gradients(engine).items()})
            engine.update(outcome.norm)
    return losses, gradients


def largest(errors: Iterable[float]) -> float:
    """The largest of some errors; not a number if one of them is none."""
    return float(torch.tensor(list(errors)).max())


def largest_error(found: Tensor, expected: Tensor) -> float:
    """The largest error of a tensor: absolute where values are below 1, relative elsewhere."""
    difference = (found.cpu().double() - expected.cpu().double()).abs()
    return float((difference / expected.cpu().double().abs().clamp(min=1)).max())


def largest_difference(found: list[float], expected: list[float]) -> float:
    """The largest relative difference of two lists of losses."""
    pairs = zip(found, expected, strict=True)
    return largest(abs(a - b) / max(abs(b), 1e-9) for a, b in pairs)


def kernels(device: str) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the largest error and the allowed error of each kernel and format."""
    torch.manual_seed(0)
    for dtype, allowed in FORMATS.items():
        yield f"rotation, {dtype}", largest(rotation_errors(device, dtype)), allowed
        yield f"sums of experts, {dtype}", largest(combine_errors(device, dtype)), allowed
    yield "Muon's iteration, float32", largest(muon_errors(device, torch.float32)), 1e-3
    yield "Muon's iteration, bfloat16", largest(muon_errors(device, torch.bfloat16)), 0.1


def rotation_errors(device: str, dtype: torch.dtype) -> Iterator[float]:
    """Of rotated queries and keys, over odd numbers of heads, widths and lengths."""
    rotate = turn if device == "cuda" else in_plain_operations
    sizes = itertools.product(((1, 1), (5, 3), (32, 8)), ((1, 2), (7, 6), (129, 80), (64, 128)))
    for heads, (length, width) in sizes:
        table = signed_table(rope_table(RopeConfig(), width, length))
        inputs = [torch.randn(2, length, each, width + 4).to(dtype)[..., 4:] for each in heads]
        for direction, interleaved in itertools.product((1, -1), (False, True)):
            q, k = (each.to(device) for each in inputs)
            found = rotate(q, k, table.to(device), direction, interleaved)
            for each, rotated in zip(inputs, found, strict=True):
                expected = _rotated(each.double(), table.double(), direction, interleaved)
                yield largest_error(rotated, expected)


def in_plain_operations(
    q: Tensor, k: Tensor, table: Tensor, direction: int, interleaved: bool
) -> tuple[Tensor, ...]:
    """What the kernel computes, on any device."""
    return tuple(_rotated(each, table, direction, interleaved) for each in (q, k))


def combine_errors(device: str, dtype: torch.dtype) -> Iterator[float]:
    """Of sums of experts' outputs and of both gradients, over odd sizes."""
    for tokens, choices, width in ((1, 1, 1), (3, 2, 7), (5, 6, 1500), (7, 8, 2049), (129, 3, 64)):
        rows = tokens * choices
        order = torch.randperm(rows)
        place = order.argsort()
        out = torch.randn(rows, width).to(dtype)
        gradient = torch.randn(tokens, width).to(dtype)
        weights = torch.rand(tokens, choices)
        inputs = [each.to(device) for each in (out, weights, order, place)]
        found_sum = combine.combine(*inputs)
        found_out, found_weights = combine._backward(gradient.to(device), *inputs)
        by_choice = out.double()[place].view(tokens, choices, width)
        each_gradient = gradient.double().unsqueeze(1)
        weighted = weights.double().unsqueeze(2)
        yield largest_error(found_sum, (weighted * by_choice).sum(1))
        yield largest_error(found_out, (weighted * each_gradient).flatten(0, 1)[order])
        yield largest_error(found_weights, (by_choice * each_gradient).sum(2)) / width**0.5


def muon_errors(device: str, dtype: torch.dtype) -> Iterator[float]:
    """Of orthogonalized matrices, relative, over odd sizes, wide and tall, one and several at once."""
    for batch, outputs, inputs in ((1, 1, 7), (1, 65, 129), (3, 127, 33), (2, 128, 257)):
        matrices = torch.randn(batch, outputs, inputs).to(dtype)
        expected = orthogonalize(matrices.double())
        found = orthogonalize(matrices.to(device, copy=True)).cpu().double()
        yield float((found - expected).norm() / expected.norm())


def losses(device: str) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the largest difference to a CPU and the allowed one of each job."""
    common = ("precision=fp32", "debug=deterministic")
    with drawn_on_the_cpu():
        for name, (overrides, allowed) in LOSSES.items():
            expected, _ = train_steps("cpu", *common, *overrides.split(), steps=10)
            found, _ = train_steps(device, *common, *overrides.split(), steps=10)
            yield f"ten steps, {name}", largest_difference(found, expected), allowed


def captured(device: str) -> Iterator[tuple[str, float, float]]:
    """Yield the name, the largest difference and the allowed one of each way to run a step.

    Of the gradients of the last step, where they are further from allowed than the losses.
    """
    for name, overrides in STEPS.items():
        allowed = TOLERANCES["fp32" if name == "fp32" else "bf16"]
        differences = captured_differences(device, overrides)
        yield f"captured, losses, {name}", differences[0], allowed[0]
        yield f"captured, gradients, {name}", differences[1], allowed[1]


def captured_differences(device: str, overrides: str) -> tuple[float, float]:
    """Of losses and gradients with CUDA graphs to those without, relative; the learning rate rises."""
    settings = [*overrides.split(), "schedule.warmup_steps=8", "debug=deterministic"]
    expected, gradients = train_steps(device, *settings, steps=7)
    found, with_graphs = train_steps(device, *settings, "compile.cuda_graphs=true", steps=7)
    of_gradients = [
        float((with_graphs[-1][name] - gradient).norm() / gradient.norm().clamp(min=1e-30))
        for name, gradient in gradients[-1].items()
    ]
    return largest_difference(found, expected), largest(of_gradients)


def main() -> None:
    """Print a row for each check of one kind."""
    kinds = {"kernels": kernels, "losses": losses, "captured": captured}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    is_virtual = CONTROLLER in os.environ
    for name, error, allowed in kinds[sys.argv[1]](device):
        shown = error if math.isfinite(error) else None  # JSON has no other numbers
        row: dict[str, Any] = {"point": name, "error": shown, "allowed": allowed}
        row["passed"] = None if is_virtual else error <= allowed
        print(json.dumps(row), flush=True)
    sys.stdout.flush()
    os._exit(0)  # without the destructors of communicators


if __name__ == "__main__":
    main()
