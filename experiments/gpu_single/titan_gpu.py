"""The torchtitan side of the measurement on one GPU: its own entry point, trainer and command line.

    python -m torch.distributed.run --standalone --nproc-per-node 1 titan_gpu.py \\
        --model '{"dim": 4096, "n_layers": 8, ...}' --precision bf16 --compile --output out.json

What runs is described in ``experiments/cpu_baseline/torchtitan_side.py``, whose model registration with
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

from torchtitan_side import (
    FLAVOR,
    MODEL_NAME,
    Shape,
    flags,
    refuse_other_hidden_size,
    register_model,
    run_torchtitan_on_cpu,
)

ACTIVATION_CHECKPOINTS = {
    "none": {"activation_checkpoint.mode": "none"},
    "selective_op": {
        "activation_checkpoint.mode": "selective",
        "activation_checkpoint.selective_ac_option": "op",
    },
    "full": {"activation_checkpoint.mode": "full"},
}
FLOAT8 = "quantize.linear.float8"
PRECISIONS: dict[str, dict[str, str]] = {
    "bf16": {},
    # Without a recipe it is scaled by tensors. The head stays in bfloat16 on both sides.
    "float8_tensorwise": {"model.converters": FLOAT8, f"{FLOAT8}.filter_fqns": "output"},
    "float8_rowwise": {
        "model.converters": FLOAT8,
        f"{FLOAT8}.filter_fqns": "output",
        f"{FLOAT8}.recipe_name": "rowwise",
    },
}


def parse_arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures torchtitan's training speed on one device.")
    parser.add_argument("--model", required=True, help="JSON: dim, n_layers, n_heads, ...")
    parser.add_argument("--seq-len", type=int, required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup-steps", type=int, default=5)
    parser.add_argument("--precision", choices=sorted(PRECISIONS), default="bf16")
    parser.add_argument("--activation-checkpoint", choices=list(ACTIVATION_CHECKPOINTS), default="none")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, required=True, help="JSON file that is written")
    return parser.parse_args(words)


def torchtitan_flags(arguments: argparse.Namespace, folder: str) -> list[str]:
    """torchtitan's command line for the measured job: its defaults, except the options set here."""
    settings = {
        "job.dump_folder": folder,
        "model.name": MODEL_NAME,
        "model.flavor": FLAVOR,
        "model.hf_assets_path": folder,
        "optimizer.name": "AdamW",
        "optimizer.implementation": "fused",
        "lr_scheduler.warmup_steps": 2,
        "training.local_batch_size": arguments.batch,
        "training.global_batch_size": arguments.batch,
        "training.seq_len": arguments.seq_len,
        "training.steps": arguments.steps,
        "training.mixed_precision_param": "bfloat16",
        "training.mixed_precision_reduce": "float32",
        # Logging waits for the device; it does so in the first step only.
        "metrics.log_freq": arguments.steps + 1,
        **ACTIVATION_CHECKPOINTS[arguments.activation_checkpoint],
        **PRECISIONS[arguments.precision],
    }
    emulate = arguments.device == "cpu" and arguments.precision != "bf16"
    return [
        *flags(settings),
        *(["--compile.enable"] if arguments.compile else []),
        *([f"--{FLOAT8}.emulate"] if emulate else []),
    ]


def measured_trainer(arguments: argparse.Namespace, shape: Shape, report: dict[str, Any]) -> type:
    """torchtitan's ``Trainer``, with the clock read around the steps that count."""
    import torch
    from torchtitan.train import Trainer

    class MeasuredTrainer(Trainer):
        def __init__(self, job_config: Any) -> None:
            super().__init__(job_config)
            (model,) = self.model_parts
            refuse_other_hidden_size(model, shape)
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
        found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
        assert found is not None
        return int(found[1]) / 2**20

    return MeasuredTrainer


def main() -> None:
    arguments = parse_arguments()
    shape = Shape(**json.loads(arguments.model))
    report: dict[str, Any] = {"torchtitan": importlib.metadata.version("torchtitan")}
    with tempfile.TemporaryDirectory() as folder:
        # torchtitan reads the command line while it is imported.
        sys.argv = [sys.argv[0], *torchtitan_flags(arguments, folder)]
        if arguments.device == "cpu":
            run_torchtitan_on_cpu()
        register_model(shape, seed=0)
        from torchtitan.train import main as train

        try:
            train(measured_trainer(arguments, shape, report))
        except Exception as error:
            memory = "OutOfMemory" in type(error).__name__ or "out of memory" in str(error)
            report["failed"] = "out_of_memory" if memory else type(error).__name__
            report["message"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
