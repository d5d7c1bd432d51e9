"""The torchtitan side of the measurement on one GPU: its own trainer and configuration.

    python -m torch.distributed.run --standalone --nproc-per-node 1 titan_gpu.py \\
        --model '{"dim": 4096, "n_layers": 8, ...}' --precision bf16 --compile --output out.json

What runs is described in ``experiments/cpu_baseline/torchtitan_side.py``, whose configuration with
random tokens is used here; nothing in torchtitan's installation is changed. Speed is tokens over the
wall-clock time of the steps after the warm-up: the device is waited for before the first of them and after
the last, and not in between. With ``--device cpu`` it runs where there is no GPU, to be tried.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cpu_baseline"))

from machine import software
from torchtitan_side import Shape, configuration, run, run_torchtitan_on_cpu

PRECISIONS = {"bf16": None, "float8_rowwise": "rowwise"}
"""Recipes of torchtitan's float8 converter; 0.3.0 has none that scales by tensors."""


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measures torchtitan's training speed on one device."
    )
    parser.add_argument("--model", required=True, help="JSON: dim, n_layers, n_heads, ...")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="bf16")
    parser.add_argument(
        "--activation-checkpoint", choices=("none", "selective_op", "full"), default="none"
    )
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON file that is written")
    return parser.parse_args(words)


def measured_configuration(arguments: argparse.Namespace, shape: Shape, folder: str) -> Any:
    """torchtitan's configuration of the measured job: its defaults, except the options set here."""
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC

    sizes = {"batch": arguments.batch, "seq_len": arguments.seq_len, "steps": arguments.steps}
    config = configuration(shape, folder, **sizes)
    if recipe := PRECISIONS[arguments.precision]:
        converter = Float8LinearConverter.Config(
            recipe_name=recipe,
            filter_fqns=["lm_head"],  # the head stays in bfloat16 on both sides
            emulate=arguments.device == "cpu",
            model_compile_enabled=arguments.compile,
        )
        config.model_spec.model = converter.build().convert(config.model_spec.model)
    recomputation = {"none": None, "selective_op": SelectiveAC.Config(), "full": FullAC.Config()}
    config.activation_checkpoint = recomputation[arguments.activation_checkpoint]
    config.compile.enable = arguments.compile
    # Its default on GPUs are CUDA graphs.
    config.training.disable_cuda_graphs = arguments.device == "cpu"
    # Logging waits for the device; it does so in the first step only.
    config.metrics.log_freq = arguments.steps + 1
    return config


def measured_trainer(arguments: argparse.Namespace, report: dict[str, Any]) -> type:
    """torchtitan's ``Trainer``, with the clock read around the steps that count."""
    import torch
    from torchtitan.trainer import Trainer

    class MeasuredTrainer(Trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            (model,) = self.model_parts
            report["parameters"] = sum(parameter.numel() for parameter in model.parameters())
            self.done = 0

        def train_step(self, data_iterator: Iterator[Any]) -> None:
            if self.done == arguments.warmup_steps:
                self.began = now()
            super().train_step(data_iterator)
            self.done += 1
            if self.done == arguments.steps:
                counted = arguments.steps - arguments.warmup_steps
                report["step_seconds"] = (now() - self.began) / counted
                tokens = arguments.batch * arguments.seq_len
                report["tokens_per_second"] = tokens / report["step_seconds"]
                report["memory_gib"] = peak_memory_gib()

    def now() -> float:
        if arguments.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak_memory_gib() -> float:
        if arguments.device == "cuda":
            return torch.cuda.max_memory_reserved() / 2**30
        found = re.search(
            r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
        )
        assert found is not None
        return int(found[1]) / 2**20

    return MeasuredTrainer


def main() -> None:
    arguments = parse_arguments()
    shape = Shape(**json.loads(arguments.model))
    report: dict[str, Any] = {
        "torchtitan": importlib.metadata.version("torchtitan"),
        "software": software(),
    }
    if arguments.device == "cpu":
        run_torchtitan_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        try:
            run(
                measured_trainer(arguments, report),
                measured_configuration(arguments, shape, folder),
            )
        except Exception as error:
            memory = "OutOfMemory" in type(error).__name__ or "out of memory" in str(error)
            report["failed"] = "out_of_memory" if memory else type(error).__name__
            report["message"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
