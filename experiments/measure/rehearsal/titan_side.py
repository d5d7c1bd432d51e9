"""torchtitan 0.3.0's step on virtual GPUs: rows of full.txt, for the table of docs/measurements.md.

    PYTHON experiments/measure/rehearsal/titan_side.py 8b_fsdp8_sel_op 8b_fsdp8_sel_op_c ...

PYTHON is of the rehearsal environment after ``pip install torchtitan==0.3.0``. Model, parallelisation, loss
and step are those of torchtitan's ``Trainer``, without CUDA graphs, which replay the same kernels. Shardings
are DTensors, because FSDP of torch 2.13 refuses its default (spmd_types). Its float8 is rowwise.

Prints a line of JSON for each job: what rank 0 called in its third step, which logs nothing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rehearse import jobs_of

from harness.compose.composer import compose_job
from harness.tools.rehearse.build import library
from harness.tools.rehearse.config import RehearseJob
from harness.tools.rehearse.gpu import virtual_device
from harness.tools.rehearse.server import environment

STEPS = 3
MODELS = {
    "llama3_8b": ("llama3", "8B"),
    "qwen3_30b_a3b": ("qwen3", "30B-A3B"),
    "deepseek_v2_lite_16b": ("deepseek_v3", "16B"),
}
RECOMPUTATION = {"selective_op": "SelectiveAC", "full": "FullAC"}


def main() -> None:
    if "LD_PRELOAD" not in os.environ:
        variables = environment(library()) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        for name in sys.argv[1:]:
            subprocess.run([sys.executable, __file__, name], env=variables, check=True)
        return
    row = {"job": sys.argv[1], **rehearse(sys.argv[1])}
    sys.stdout.write(f"{json.dumps(row)}\n")
    sys.stdout.flush()
    os._exit(0)  # without the destructors of communicators


def rehearse(name: str) -> dict[str, Any]:
    """Train three steps of rank 0; return what the last one called."""
    from harness.tools.rehearse.gpu import VirtualGpu

    job = compose_job(jobs_of("full")[name], config_name="rehearse", schema=RehearseJob).plain
    gpu = VirtualGpu(virtual_device(job))
    rows, length = job.training.local_batch_size, job.training.seq_len
    os.environ.update(
        RANK="0", WORLD_SIZE=str(job.world_size), LOCAL_RANK="0", LOCAL_WORLD_SIZE="8"
    )
    import importlib

    import torch
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.optimizer import default_adamw
    from torchtitan.components.quantization import Float8LinearConverter
    from torchtitan.distributed import activation_checkpoint
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
    from torchtitan.trainer import Trainer

    from harness.tools.rehearse.substitutes import LoneStore, substitutes
    from harness.train.setup import process_group

    float8 = Float8LinearConverter.Config(filter_fqns=["lm_head"], model_compile_enabled=True)
    model, flavor = MODELS[job.model.name]
    spec = importlib.import_module(f"torchtitan.models.{model}").model_registry(
        flavor, converters=None if job.precision.linear == "none" else [float8]
    )
    del spec.model.layers[job.model.n_layers :]
    positions = torch.arange(length).expand(rows, length).contiguous()

    def batches(**_: Any) -> Any:
        while True:
            yield (
                {"input": torch.zeros_like(positions), "positions": positions},
                torch.zeros_like(positions),
            )

    config = Trainer.Config(
        model_spec=spec,
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
        optimizer=default_adamw(lr=3e-4),
        tokenizer=SimpleNamespace(build=lambda **_: None),
        dataloader=SimpleNamespace(build=batches),
        activation_checkpoint=getattr(
            activation_checkpoint, RECOMPUTATION[job.activation_checkpoint.mode]
        ).Config(),
    )
    config.training.seq_len, config.training.local_batch_size, config.training.steps = (
        length,
        rows,
        100,
    )
    config.training.disable_cuda_graphs = True
    config.parallelism.expert_parallel_degree = job.parallelism.ep
    config.parallelism.tensor_parallel_degree = job.parallelism.tp
    config.parallelism.spmd_backend = "partial_dtensor"
    config.compile.enable = job.compile.enable
    asked = AllToAllTokenDispatcher._sync_token_count_exchange

    def evenly(self: Any, local: Any, received: Any, size: int) -> tuple[Any, list[int], list[int]]:
        counts, _, _ = asked(self, local, received, size)  # with the same waits; memory holds zeros
        share = [rows * length * self.top_k // size] * size
        return counts, share, share

    with (
        substitutes(job, gpu, 0.0),
        process_group(job, torch.device("cuda", 0), None if job.world_size == 1 else LoneStore()),
        patch.object(AllToAllTokenDispatcher, "_sync_token_count_exchange", evenly),
        patch.object(Trainer.Config, "to_dict", lambda _: {}),
    ):
        torch.autograd.set_multithreading_enabled(False)  # as torchtitan's init_distributed
        trainer = Trainer(config)
        data = trainer.batch_generator(trainer.dataloader)
        for _ in range(STEPS):
            gpu.clear()
            began = time.process_time()
            trainer.step += 1
            trainer.gc_handler.run(trainer.step)
            trainer.train_step(data)
            taken = time.process_time() - began
        calls, memory = gpu.calls(), torch.cuda.memory_stats()
    collectives = dict[str, int]()
    for (kind, _), (count, _) in (*calls.collectives.items(), *calls.sends.items()):
        collectives[kind] = collectives.get(kind, 0) + count
    return {
        "kernels": sum(calls.kernels.values()),
        "products": sum(count for count, _ in calls.products.values()),
        "product_flops": sum(flops for _, flops in calls.products.values()),
        "collectives": collectives,
        "copies": calls.copies,
        "waits": {f"{where} ({how})": count for (how, where), count in calls.waits.items()},
        "allocated": memory["allocated_bytes.all.peak"],
        "reserved": memory["reserved_bytes.all.peak"],
        "cpu_seconds": taken,
        "unknown": calls.unknown,
    }


if __name__ == "__main__":
    main()
