"""The torchtitan side of the measurement on one GPU: its own trainer and configuration.

    python -m torch.distributed.run --standalone --nproc-per-node 1 titan_gpu.py \\
        --model '{"dim": 4096, "n_layers": 8, ...}' --precision bf16 --compile --output out.json

What runs is described in ``experiments/cpu_baseline/torchtitan_side.py``, whose configuration with
random tokens is used here; nothing in torchtitan's installation is changed. Speed is tokens over the
wall-clock time of the steps after the warm-up: the device is waited for before the first of them and after
the last, and not in between. With ``--device cpu`` it runs where there is no GPU, to be tried. torchtitan
0.2.2, for a machine with torch 2.11, has a configuration of another form, and captures no CUDA graphs.
"""

from __future__ import annotations

import argparse
import dataclasses
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


def configuration_of_0_2(arguments: argparse.Namespace, shape: Shape, folder: str) -> Any:
    """The same for torchtitan 0.2.2."""
    import torch
    from torch.utils.data import IterableDataset
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.config import JobConfig
    from torchtitan.models.llama3 import TransformerModelArgs
    from torchtitan.protocols.train_spec import get_train_spec, register_train_spec

    class RandomTokens(IterableDataset):
        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                tokens = torch.randint(shape.vocab_size, (arguments.seq_len + 1,))
                yield {"input": tokens[:-1]}, tokens[1:]

    def random_loader(dp_world_size: int, dp_rank: int, **_: Any) -> Any:
        tokens = RandomTokens()
        return ParallelAwareDataloader(tokens, dp_rank, dp_world_size, batch_size=arguments.batch)

    sizes = dataclasses.asdict(shape)
    # The width is rounded up to a multiple of multiple_of, and so is multiple_of.
    width = {"multiple_of": sizes.pop("ffn_hidden_dim"), "ffn_dim_multiplier": 1e-3}
    measured = dataclasses.replace(
        get_train_spec("llama3"),
        model_args={"measured": TransformerModelArgs(**sizes, **width, rope_theta=500000)},
        build_tokenizer_fn=None,
        build_dataloader_fn=random_loader,
    )
    register_train_spec("measured", measured)
    config = JobConfig()
    config.job.dump_folder = folder
    config.model.name = config.model.flavor = "measured"
    if recipe := PRECISIONS[arguments.precision]:
        config.model.converters = ["quantize.linear.float8"]
        config.quantize.linear.float8.recipe_name = recipe
        config.quantize.linear.float8.filter_fqns = ["output"]
    config.training.local_batch_size = arguments.batch
    config.training.seq_len = arguments.seq_len
    config.training.steps = arguments.steps
    mode, _, option = arguments.activation_checkpoint.partition("_")
    config.activation_checkpoint.mode = mode
    config.activation_checkpoint.selective_ac_option = option
    config.compile.enable = arguments.compile
    config.metrics.log_freq = arguments.steps + 1
    return config


def measured_trainer(arguments: argparse.Namespace, report: dict[str, Any]) -> type:
    """torchtitan's ``Trainer``, with the clock read around the steps that count."""
    import torch
    from torchtitan.train import Trainer

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
    version = importlib.metadata.version("torchtitan")
    configure = configuration_of_0_2 if version.startswith("0.2.") else measured_configuration
    report: dict[str, Any] = {
        "torchtitan": version,
        "software": software(),
    }
    if arguments.device == "cpu":
        run_torchtitan_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = configure(arguments, shape, folder)
            run(measured_trainer(arguments, report), config)
        except Exception as error:
            memory = "OutOfMemory" in type(error).__name__ or "out of memory" in str(error)
            report["failed"] = "out_of_memory" if memory else type(error).__name__
            report["message"] = (str(error).strip() or type(error).__name__).splitlines()[0]
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
