"""The torchtitan side of the comparison of training speed on a CPU.

torchtitan is installed for the measurement only and is no dependency of the project. What runs is
torchtitan's own ``Trainer``: its Llama 3 model, its parallelisation (``parallelize_llama``: sequence and loss
parallel under tensor parallelism, FSDP2 per block), its loss, clipping, optimizer and schedule builders, its
training step and its metrics processor, from a ``Trainer.Config`` as its registry of configurations has
them. Nothing in its installation is changed. The rest is:

* the measured model size, random tokens from a loader of torchtitan's kind, and its scaled dot product
  attention in the place of FlexAttention, which has no backward pass on CPUs;
* a subclass of ``Trainer`` that reads the clock around its methods;
* what torchtitan lacks to run without an accelerator (``run_torchtitan_on_cpu``): it assumes CUDA where it
  finds none, asks the device module for a name, memory statistics and an integer device index, and reduces
  gradients by an operation that only NCCL has. Its environment needs the package triton, which it imports.

It measures speed and says nothing of losses: on a mesh of CPUs every rank draws the initial values of its own
shard from the same seed, so the shards begin equal and the layouts begin from different weights.

Two modes. ``--launch`` starts torchrun with the layout's number of ranks; without it the script is a rank::

    python experiments/cpu_baseline/torchtitan_side.py --layout fsdp2 --launch --output fsdp2.json

``--python`` names the interpreter of the environment that has torchtitan. The launcher itself imports
nothing but the standard library. Its clock reading is passed to the ranks in HARNESS_BENCH_START.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import importlib.util
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

START_VARIABLE = "HARNESS_BENCH_START"
WARMUP_STEPS = 2


@dataclasses.dataclass(frozen=True)
class Shape:
    """The numbers of a Llama that decide how fast it is."""

    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    ffn_hidden_dim: int
    vocab_size: int


CPU_SHAPE = Shape(
    dim=512, n_layers=8, n_heads=8, n_kv_heads=4, ffn_hidden_dim=1536, vocab_size=8192
)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Degrees of parallelism, and the threads of each rank on a machine with two cores."""

    fsdp: int
    tp: int
    threads: int

    @property
    def ranks(self) -> int:
        return self.fsdp * self.tp


LAYOUTS = {
    "single": Layout(fsdp=1, tp=1, threads=2),
    "fsdp2": Layout(fsdp=2, tp=1, threads=1),
    "fsdp2_tp2": Layout(fsdp=2, tp=2, threads=1),
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Measures torchtitan's training speed on a CPU.")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), required=True)
    parser.add_argument("--output", type=Path, required=True, help="JSON file that rank 0 writes")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a global batch")
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--optimizer", choices=("fused", "foreach", "for-loop"), default="fused")
    parser.add_argument("--log-frequency", type=int, default=10, help="10 is torchtitan's default")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--compile", action="store_true", help="torchtitan's --compile.enable: blocks and loss"
    )
    parser.add_argument(
        "--launch", action="store_true", help="start torchrun, rather than be a rank"
    )
    parser.add_argument("--python", default=sys.executable, help="interpreter that --launch starts")
    parser.add_argument(
        "--threads", type=int, help="OMP_NUM_THREADS of a rank that --launch starts"
    )
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP_STEPS:
        parser.error(
            f"--steps must be more than {WARMUP_STEPS}: the first {WARMUP_STEPS} are not counted"
        )
    if arguments.batch % LAYOUTS[arguments.layout].fsdp:
        parser.error("--batch must be a multiple of the layout's FSDP degree")
    return arguments


def launch(arguments: argparse.Namespace) -> int:
    """Starts this script under torchrun and returns torchrun's exit status."""
    layout = LAYOUTS[arguments.layout]
    command = [
        *(arguments.python, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(layout.ranks), str(Path(__file__).resolve())),
        *("--layout", arguments.layout, "--output", str(arguments.output.resolve())),
        *("--steps", str(arguments.steps), "--batch", str(arguments.batch)),
        *("--seq-len", str(arguments.seq_len), "--optimizer", arguments.optimizer),
        *("--log-frequency", str(arguments.log_frequency), "--seed", str(arguments.seed)),
        *(["--compile"] if arguments.compile else []),
    ]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(arguments.threads or layout.threads),
        "CUDA_VISIBLE_DEVICES": "",
        START_VARIABLE: repr(time.monotonic()),
    }
    return subprocess.run(command, env=environment, check=False).returncode


def run_torchtitan_on_cpu() -> None:
    """Gives torchtitan a CPU where it looks for an accelerator; to be called before anything imports it.

    1. ``torchtitan.tools.utils`` takes "cuda" when torch reports no accelerator: it is imported while torch's
       two look-ups answer with the CPU.
    2. ``torch.cpu`` stands in as its device module, with what that lacks or answers in another form: an
       integer ``current_device`` (for a barrier's device index), a device name, a capacity, and empty memory
       statistics.
    3. It sums gradients over FSDP ranks by NCCL's premultiplied sum with factor one, which gloo has not: FSDP
       is told to use a plain sum, which computes the same and costs nothing more.
    """
    import torch

    class CpuDeviceModule:
        set_device = staticmethod(torch.cpu.set_device)
        synchronize = staticmethod(torch.cpu.synchronize)

        @staticmethod
        def current_device() -> int:
            return 0

        @staticmethod
        def get_device_name(device: Any = None) -> str:
            return platform.processor() or platform.machine()

        @staticmethod
        def get_device_properties(device: Any = None) -> Any:
            pages, page_bytes = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
            return argparse.Namespace(total_memory=pages * page_bytes)

        @staticmethod
        def memory_stats(device: Any = None) -> dict[str, int]:
            return {}

        @staticmethod
        def reset_peak_memory_stats(device: Any = None) -> None:
            pass

        @staticmethod
        def empty_cache() -> None:
            pass

    with (
        mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
        mock.patch("torch._utils._get_device_module", lambda _: CpuDeviceModule),
    ):
        import torchtitan.tools.utils

    if torchtitan.tools.utils.device_type != "cpu":
        raise SystemExit("torchtitan was imported before it was told to run on the CPU")

    from torch.distributed.fsdp import FSDPModule
    from torchtitan.distributed import fsdp

    disable_division = fsdp.disable_fsdp_gradient_division

    def disable_division_by_plain_sum(model: torch.nn.Module) -> None:
        disable_division(model)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_force_sum_reduction_for_comms(True)

    fsdp.disable_fsdp_gradient_division = disable_division_by_plain_sum


def configuration(
    shape: Shape, folder: str, *, batch: int, seq_len: int, steps: int, seed: int = 0
) -> Any:
    """torchtitan's ``Trainer.Config`` for a Llama of this shape and random tokens."""
    import torch
    from torch.utils.data import IterableDataset
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.dataloader import ParallelAwareDataloader
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.components.tokenizer import BaseTokenizer
    from torchtitan.config import DebugConfig, TrainingConfig
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.trainer import Trainer

    class RandomTokens(IterableDataset):
        """Endless sequences in the form of torchtitan's text dataset, without documents."""

        def __init__(self, dp_rank: int) -> None:
            self.generator = torch.Generator().manual_seed(seed * 1000 + dp_rank)

        def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
            while True:
                tokens = torch.randint(shape.vocab_size, (seq_len + 1,), generator=self.generator)
                yield {"input": tokens[:-1]}, tokens[1:]

    class RandomLoader(ParallelAwareDataloader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(ParallelAwareDataloader.Config):
            pass

        def __init__(
            self, config: Any, *, dp_world_size: int, dp_rank: int, local_batch_size: int, **_: Any
        ) -> None:
            super().__init__(
                RandomTokens(dp_rank), dp_rank, dp_world_size, batch_size=local_batch_size
            )

    class NoTokenizer(BaseTokenizer):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(BaseTokenizer.Config):
            pass

        def __init__(self, config: Any, **_: Any) -> None:
            super().__init__()

        def encode(self, *_: Any, **__: Any) -> list[int]:
            raise AssertionError("random tokens need no tokenizer")

        decode = get_vocab_size = encode

    spec = llama3.model_registry("debugmodel", attn_backend="flex")
    model = spec.model
    model.dim, model.vocab_size = shape.dim, shape.vocab_size
    model.tok_embeddings.num_embeddings, model.tok_embeddings.embedding_dim = (
        shape.vocab_size,
        shape.dim,
    )
    model.norm.normalized_shape = shape.dim
    model.lm_head.in_features, model.lm_head.out_features = shape.dim, shape.vocab_size
    rope = ComplexRoPE.Config(dim=shape.dim // shape.n_heads, max_seq_len=seq_len, theta=500000)
    # The function that builds the layers of torchtitan's own sizes (0.3.0).
    model.layers = llama3._build_llama3_layers(
        n_layers=shape.n_layers,
        dim=shape.dim,
        n_heads=shape.n_heads,
        n_kv_heads=shape.n_kv_heads,
        hidden_dim=shape.ffn_hidden_dim,
        rope=rope,
        attn_backend="flex",
    )
    for layer in model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=folder,
        dump_folder=folder,
        loss=CrossEntropyLoss.Config(global_vocab_size=shape.vocab_size),
        tokenizer=NoTokenizer.Config(),
        dataloader=RandomLoader.Config(),
        optimizer=default_adamw(),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=WARMUP_STEPS),
        training=TrainingConfig(local_batch_size=batch, seq_len=seq_len, steps=steps),
        checkpoint=CheckpointManager.Config(enable=False),
        debug=DebugConfig(seed=seed, enable_structured_logging=False),
        activation_checkpoint=None,
    )


@dataclasses.dataclass
class Clock:
    """Readings of one rank: seconds per step and per part of it, and when the first step's update ended."""

    step: list[float] = dataclasses.field(default_factory=list)
    forward_backward: list[float] = dataclasses.field(default_factory=list)
    optimizer: list[float] = dataclasses.field(default_factory=list)
    first_update_ended: float = 0.0

    def timed(self, into: list[float], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        result = call(*args, **kwargs)
        into.append(time.perf_counter() - began)
        return result


def timed_trainer(clock: Clock, facts: dict[str, Any]) -> type:
    """torchtitan's ``Trainer``, with the clock read around its step, forward and backward, and optimizer."""
    import torch
    from torchtitan.trainer import Trainer

    class TimedTrainer(Trainer):
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            (model,) = self.model_parts
            (optimizer,) = self.optimizers
            facts.update(
                parameters=sum(parameter.numel() for parameter in model.parameters()),
                parameter_dtypes=sorted({str(parameter.dtype) for parameter in model.parameters()}),
                optimizer=f"{type(optimizer).__name__} fused={optimizer.defaults['fused']} "
                f"foreach={optimizer.defaults['foreach']}",
                backend=torch.distributed.get_backend(),
                threads=torch.get_num_threads(),
            )
            update = self.optimizers.step

            def step(*args: Any, **kwargs: Any) -> None:
                clock.timed(clock.optimizer, update, *args, **kwargs)
                clock.first_update_ended = clock.first_update_ended or time.monotonic()

            self.optimizers.step = step

        def forward_backward_step(self, **kwargs: Any) -> torch.Tensor:
            return clock.timed(clock.forward_backward, super().forward_backward_step, **kwargs)

        def train_step(self, data_iterator: Iterator[Any]) -> None:
            clock.timed(clock.step, super().train_step, data_iterator)

    return TimedTrainer


def run(trainer: type, config: Any) -> None:
    """Do what torchtitan.train.main does with a configuration."""
    import torch
    from torchtitan.tools.logging import init_logger

    init_logger()
    training = trainer(config)
    try:
        training.train()
    finally:
        training.close()
    torch.distributed.destroy_process_group()


def versions() -> dict[str, str]:
    import torch

    return {
        "torchtitan": importlib.metadata.version("torchtitan"),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def train(arguments: argparse.Namespace) -> None:
    """Is one rank: trains with torchtitan, and on rank 0 writes what the clock said."""
    if importlib.util.find_spec("torchtitan") is None:
        raise SystemExit(f"{sys.executable} has no torchtitan; name one that has it with --python")
    clock, facts = Clock(), dict[str, Any]()
    layout = LAYOUTS[arguments.layout]
    run_torchtitan_on_cpu()
    with tempfile.TemporaryDirectory() as folder:
        config = configuration(
            CPU_SHAPE,
            folder,
            batch=arguments.batch // layout.fsdp,
            seq_len=arguments.seq_len,
            steps=arguments.steps,
            seed=arguments.seed,
        )
        config.training.disable_cuda_graphs = True
        config.training.mixed_precision_param = "float32"
        config.parallelism.data_parallel_shard_degree = layout.fsdp
        config.parallelism.tensor_parallel_degree = layout.tp
        config.optimizer.implementation = arguments.optimizer
        config.metrics.log_freq = arguments.log_frequency
        config.compile.enable = arguments.compile
        run(timed_trainer(clock, facts), config)

    if int(os.environ.get("RANK", "0")) != 0:
        return
    started = os.environ.get(START_VARIABLE)
    median = {
        name: statistics.median(getattr(clock, name)[WARMUP_STEPS:])
        for name in ("step", "forward_backward", "optimizer")
    }
    report = {
        "side": "torchtitan",
        "layout": arguments.layout,
        "tokens_per_second": arguments.batch * arguments.seq_len / median["step"],
        "step_seconds": clock.step,
        "process_start_to_first_step_seconds": (
            clock.first_update_ended - float(started) if started else None
        ),
        "forward_backward_seconds": median["forward_backward"],
        "optimizer_seconds": median["optimizer"],
        "ranks": layout.ranks,
        "batch": arguments.batch,
        "seq_len": arguments.seq_len,
        "compiled": arguments.compile,
        **facts,
        "versions": versions(),
    }
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")


def main() -> int:
    arguments = parse_arguments()
    if arguments.launch:
        return launch(arguments)
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
