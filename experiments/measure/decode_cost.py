"""Measures what one token of a generation takes: on a CPU or a GPU, or counted on a virtual GPU.

    python experiments/measure/decode_cost.py model=llama3_debug
    torchrun --nproc-per-node 2 experiments/measure/decode_cost.py model=llama3_debug parallelism.tp=2
    .venv-rehearsal/bin/python experiments/measure/decode_cost.py model=llama3_8b precision=bf16 \\
        parallelism.tp=8
    python experiments/measure/decode_cost.py model=llama32_1b precision=bf16 cluster.device=cuda

The second has two ranks, the third is one rank of eight, on a virtual H100, the last one is timed on a
GPU. Overrides are those of `harness generate`; weights are random, on a virtual GPU zeros. Texts of two
lengths are generated after one that does not count; the figures are those of the tokens between. Prints a
line of JSON, memory in GiB.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from harness.compose.composer import compose_job
from harness.config.cluster import count_gpus
from harness.config.fields import with_value
from harness.tools.inference.generate import GenerateJob, Prompt
from harness.tools.rehearse.build import cuda_version, library
from harness.tools.rehearse.gpu import VirtualGpu, virtual_device
from harness.tools.rehearse.rank import CONTROLLER
from harness.tools.rehearse.server import environment
from harness.util.words import GIB

FEW, MORE, PROMPT = 8, 40, 64


def main() -> None:
    if cuda_version() is not None and CONTROLLER not in os.environ and not count_gpus():
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(library()))
    device = "auto" if CONTROLLER in os.environ else "cpu"
    typed = [
        "checkpoint=none",
        "tokenizer=bytes",
        f"cluster.device={device}",
        "generate.stop_at_end=false",
    ]
    job = compose_job([*typed, *sys.argv[1:]], config_name="generate", schema=GenerateJob)
    with ExitStack() as stack:
        found = measure(with_value(job, "training.seq_len", PROMPT + MORE), stack)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        if device == "auto":
            os._exit(0)  # without the destructors of communicators


def measure(job: GenerateJob, stack: ExitStack) -> dict[str, Any]:
    """What a token takes on this rank."""
    gpu = store = None
    if CONTROLLER in os.environ:
        gpu = VirtualGpu(virtual_device(job))
        os.environ.update(RANK="0", WORLD_SIZE=str(job.world_size), LOCAL_RANK="0")
    import torch

    from harness.data.tokenizer import build_tokenizer
    from harness.tools.inference.decode import generate_texts
    from harness.tools.inference.model import InferenceModel
    from harness.train.setup import pick_device, process_group, set_up_process

    if gpu is not None:
        from harness.tools.rehearse.substitutes import LoneStore, substitutes

        store = LoneStore() if job.world_size > 1 else None
        stack.enter_context(substitutes(job, gpu, 0.0))
        alone = SimpleNamespace(gather=lambda value: [value], group=None)
        stack.enter_context(patch("harness.tools.inference.model.RankGroup", lambda _: alone))
    device = pick_device(job)
    set_up_process(job)
    stack.enter_context(process_group(job, device, store))
    stack.enter_context(patch.object(InferenceModel, "load", randomize))
    model = InferenceModel(job, device)
    model.load(None)  # type: ignore[arg-type]
    model.part.use_cache(job.training.seq_len)
    prompts = [Prompt("", [1] * (PROMPT - row % 3)) for row in range(job.generate.batch_size)]
    counts, seconds, on_the_wall = [], [], []
    for new in (MORE, FEW, MORE):
        if gpu is not None:
            gpu.clear()
        began = time.process_time()
        begun = time.perf_counter()
        config = with_value(job, "generate.max_new_tokens", new).generate
        made = generate_texts(model, prompts, config, build_tokenizer(job.tokenizer))
        assert all(len(text.tokens) == new for text in made.texts)
        seconds.append(time.process_time() - began)
        on_the_wall.append(time.perf_counter() - begun)
        counts.append(Counter() if gpu is None else counted(gpu.calls()))
    counts[2].subtract(counts[1])
    found: dict[str, Any] = {"point": f"decode, {job.model.name}"}
    found["sequences"] = len(prompts)
    found["weight_bytes"] = sum(each.nbytes for each in model.part.parameters())
    found["decode_ms"] = round((on_the_wall[2] - on_the_wall[1]) / (MORE - FEW) * 1e3, 3)
    found["cpu_ms"] = round((seconds[2] - seconds[1]) / (MORE - FEW) * 1e3, 2)
    found |= {
        name: round(count / (MORE - FEW), 2) for name, count in sorted(counts[2].items()) if count
    }
    if gpu is not None:
        found["allocated"] = round(torch.cuda.memory_stats()["allocated_bytes.all.peak"] / GIB, 2)
    return found


def randomize(model: Any, _found: None) -> None:
    """In place of loading weights."""
    import torch

    from harness.parallelism.tensor import to_plain

    torch.manual_seed(0)
    for _, parameter in model.named_parameters():
        torch.nn.init.normal_(getattr(parameter, "_local_tensor", parameter), std=0.02)
    for part in model.parts if model.is_plain else ():
        to_plain(part)


def counted(calls: Any) -> Counter[str]:
    """Calls by kind; copies, collectives and waits each by itself."""
    found = {"kernels": sum(calls.kernels.values())}
    found["products"] = sum(count for count, _ in calls.products.values())
    found |= {f"copies {how}": count for how, (count, _) in calls.copies.items()}
    found |= {kind: count for (kind, _), (count, _) in calls.collectives.items()}
    return Counter(found | {f"wait {' '.join(wait)}": count for wait, count in calls.waits.items()})


if __name__ == "__main__":
    main()
