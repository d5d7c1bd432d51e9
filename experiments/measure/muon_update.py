"""Measures an update of harness's Muon against torch.optim.Muon, on one process.

    python experiments/measure/muon_update.py --rounds 10
    python experiments/measure/muon_update.py cluster.device=cuda model=llama3_8b model.n_layers=2

All sides update the matrices of one model from the same gradients, and take turns in every round, in another
order each time. torch's iterates in bfloat16 only, so ours does too; on a CPU the last row is ours in
float32. With ``--all``, AdamW updates the other tensors too. Prints the median time of each side, of the
processor or of the GPU, and of the ratios of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from harness.compose.composer import compose_job
from harness.config.optimizer import OptimizerConfig
from harness.model.spec import TensorSpec, tensors
from harness.optimizer.build import build_optimizer

WARMUP = 2
SHAPE = ("experiment=cpu_baseline/shape", "cluster.device=cpu")


def parameters_of(specs: Mapping[str, TensorSpec]) -> dict[str, Tensor]:
    """Return parameters with gradients, the same at every call."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(0)
    made: dict[str, Tensor] = {}
    for name, spec in specs.items():
        made[name] = nn.Parameter(torch.randn(spec.shape, generator=generator) * 0.02)
        made[name].grad = torch.randn(spec.shape, generator=generator)
    return made


def ours(
    config: OptimizerConfig, specs: Mapping[str, TensorSpec], **fields: Any
) -> Callable[[], None]:
    """Return the step of our optimizer, with other fields of its configuration."""
    optimizer = build_optimizer(replace(config, **fields), parameters_of(specs).items(), specs)
    return lambda: optimizer.step()


def torchs(config: OptimizerConfig, specs: Mapping[str, TensorSpec]) -> Callable[[], None]:
    """Return the step of torch's optimizers, with the same settings."""
    parameters = parameters_of(specs)
    hidden = [parameters[name] for name, spec in specs.items() if spec.is_hidden_matrix]
    others = [parameters[name] for name, spec in specs.items() if not spec.is_hidden_matrix]
    muon = torch.optim.Muon(
        hidden,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        adjust_lr_fn=config.lr_scale,
    )
    optimizers: list[torch.optim.Optimizer] = [muon]
    if others:
        betas = (config.beta1, config.beta2)
        optimizers.append(torch.optim.AdamW(others, lr=config.lr, betas=betas, fused=True))

    def step() -> None:
        for optimizer in optimizers:
            optimizer.step()

    return step


def clock() -> float:
    """Seconds: of the wall when the GPU has finished, of the processor without one."""
    if not torch.cuda.is_available():
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", default=SHAPE, help="of a job")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="update the other tensors too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    job = compose_job(["optimizer=muon", *options.overrides])
    specs, device = tensors(job.model), job.cluster.device
    if not options.all:
        specs = {name: spec for name, spec in specs.items() if spec.is_hidden_matrix}
    torch.set_default_device(device)
    narrow: dict[str, Any] = {"newton_schulz_dtype": "bfloat16"}
    sides = {
        "torch.optim.Muon": torchs(job.optimizer, specs),
        "harness": ours(job.optimizer, specs, **narrow),
    }
    if device == "cpu":
        sides["harness, float32"] = ours(job.optimizer, specs, newton_schulz_dtype="float32")
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(WARMUP + options.rounds):
        names = list(sides) if number % 2 else list(reversed(sides))
        for name in names:
            start = clock()
            sides[name]()
            if number >= WARMUP:
                seconds[name].append(clock() - start)
    first = seconds["torch.optim.Muon"]
    values = sum(spec.size for spec in specs.values())
    print(
        f"{values / 1e6:.1f} million parameters, {options.rounds} rounds, torch {torch.__version__}\n"
    )
    print("| | ms of an update | lowest and highest | speed of torch's |")
    print("|---|---|---|---|")
    for name, taken in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(first, taken, strict=True))
        spread = f"{min(taken) * 1e3:.0f} to {max(taken) * 1e3:.0f}"
        print(f"| {name} | {statistics.median(taken) * 1e3:.0f} | {spread} | {ratio:.2f} |")


if __name__ == "__main__":
    main()
