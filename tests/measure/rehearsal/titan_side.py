"""torchtitan 0.2.2's Llama 3.1 8B on 8 virtual H100, beside this project's: ``8b_fsdp8_sel_op`` of full.txt.

    .venv-rehearsal/bin/python tests/measure/rehearsal/titan_side.py FOLDER [compile] [float8]

With float8 linears are converted as in its published tables: scales of whole tensors, all-gathers in float8.

FOLDER holds torchtitan and what it needs (pip install --target). Model, parallelisation, recomputation, loss
and clipping are torchtitan's own; the step is its ``Trainer.train_step`` without metrics, which it logs every
tenth step. It prints a line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from typing import Any

from harness.compose.composer import compose_job
from harness.tools.rehearse.build import library
from harness.tools.rehearse.config import RehearseJob
from harness.tools.rehearse.gpu import virtual_device
from harness.tools.rehearse.server import environment

JOB = "model=llama3_8b parallelism=fsdp data=synthetic tokenizer=bytes cluster=slurm_h100 cluster.nodes=1"
ROWS, LENGTH, RANKS, STEPS = 2, 8192, 8, 3


def main() -> None:
    if "LD_PRELOAD" not in os.environ:
        folder = sys.argv[1]
        variables = environment(library()) | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
        variables["PYTHONPATH"] = os.pathsep.join([folder, variables["PYTHONPATH"]])
        sys.exit(subprocess.run([sys.executable, *sys.argv], env=variables).returncode)
    print(json.dumps(rehearse(frozenset(sys.argv[2:]))))


def rehearse(options: frozenset[str]) -> dict[str, Any]:
    """Three steps of rank 0; what the last one called."""
    from harness.tools.rehearse.gpu import VirtualGpu

    job = compose_job(JOB.split(), config_name="rehearse", schema=RehearseJob).plain
    gpu = VirtualGpu(virtual_device(job))
    os.environ.update(RANK="0", WORLD_SIZE=str(RANKS), LOCAL_RANK="0", LOCAL_WORLD_SIZE=str(RANKS))
    import torch
    from torchtitan.components.loss import IGNORE_INDEX, cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as dist_utils
    from torchtitan.models.llama3 import llama3_args
    from torchtitan.models.llama3.infra.parallelize import parallelize_llama
    from torchtitan.models.llama3.model.model import Transformer
    from torchtitan.protocols.model_converter import build_model_converters

    from harness.tools.rehearse.substitutes import LoneStore, substitutes
    from harness.train.setup import process_group

    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    config = JobConfig()
    config.training.seq_len, config.training.local_batch_size = LENGTH, ROWS
    config.activation_checkpoint.mode = "selective"
    config.activation_checkpoint.selective_ac_option = "op"
    config.compile.enable, config.compile.components = "compile" in options, ["model"]
    if "float8" in options:
        config.model.converters = ["quantize.linear.float8"]
        float8 = config.quantize.linear.float8
        float8.enable_fsdp_float8_all_gather = float8.precompute_float8_dynamic_scale_for_fsdp = True
        float8.filter_fqns = ["output"]
    with substitutes(job, gpu, 0.0), process_group(job, device, LoneStore()):
        dims = ParallelDims(1, RANKS, 1, 1, 1, 1, 1, RANKS)
        arguments = llama3_args["8B"]
        arguments.update_from_config(config)
        with torch.device("meta"):
            model = Transformer(arguments)
        converters = build_model_converters(config, dims)
        converters.convert(model)
        parallelize_llama(model, dims, config)
        model.to_empty(device=device)
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
        for _ in range(STEPS):
            gpu.clear()
            began = time.process_time()
            inputs, labels = torch.zeros(2, ROWS, LENGTH, dtype=torch.int64)
            optimizer.zero_grad()
            # The same copies from pageable memory, and the same sum that the host reads, as in train_step.
            counted = (labels != IGNORE_INDEX).sum().to(device)
            valid = dist_utils.dist_sum(counted, dims.get_mesh("batch"))
            inputs, labels = inputs.to(device), labels.to(device)
            pred = model(inputs)
            loss = cross_entropy_loss(pred, labels) / valid
            del pred
            loss.backward()
            dist_utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            converters.post_optimizer_hook([model])
            taken = time.process_time() - began
        calls, memory = gpu.calls(), torch.cuda.memory_stats()
    return {
        "options": sorted(options),
        "kernels": sum(calls.kernels.values()),
        "products": sum(count for count, _ in calls.products.values()),
        "product_flops": sum(flops for _, flops in calls.products.values()),
        "collectives": {kind: found for (kind, _), found in calls.collectives.items()},
        "waits": {f"{where} ({how})": count for (how, where), count in calls.waits.items()},
        "allocated": memory["allocated_bytes.all.peak"],
        "reserved": memory["reserved_bytes.all.peak"],
        "cpu_seconds": taken,
        "unknown": calls.unknown,
    }


if __name__ == "__main__":
    main()
