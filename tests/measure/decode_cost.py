"""Measures what one token of a generation takes: on a CPU, or counted on a virtual GPU.

    python tests/measure/decode_cost.py model=llama3_debug                                        one rank, CPU
    torchrun --nproc-per-node 2 tests/measure/decode_cost.py model=llama3_debug parallelism.tp=2  gloo
    .venv-rehearsal/bin/python tests/measure/decode_cost.py model=llama3_8b precision=bf16 parallelism.tp=8
                                                                          one rank of eight, on a virtual H100

Overrides are those of `harness generate`. Weights are random, and zeros on a virtual GPU. A text is generated
twice after one that is not counted, with few and with more tokens; the difference is that of the tokens
between. Prints one line of JSON: processor time, and on a virtual GPU counts of a token and memory in GiB.
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
from harness.config.fields import with_value
from harness.tools.inference.generate import GenerateJob, Prompt
from harness.tools.rehearse.build import cuda_version, library
from harness.tools.rehearse.gpu import VirtualGpu, virtual_device
from harness.tools.rehearse.rank import CONTROLLER
from harness.tools.rehearse.server import environment
from harness.util.tables import GIB

FEW, MORE, PROMPT = 8, 40, 64


def main() -> None:
    if cuda_version() is not None and CONTROLLER not in os.environ:
        os.execve(sys.executable, [sys.executable, *sys.argv], environment(library()))
    on_gpu = CONTROLLER in os.environ
    device = "auto" if on_gpu else "cpu"
    typed = ["checkpoint=none", "tokenizer=bytes", f"cluster.device={device}", "generate.stop_at_end=false"]
    job = compose_job([*typed, *sys.argv[1:]], config_name="generate", schema=GenerateJob)
    job = with_value(job, "training.seq_len", PROMPT + MORE)
    with ExitStack() as stack:
        found = measure(job, stack, on_gpu=on_gpu)
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(found), flush=True)
        if on_gpu:
            os._exit(0)  # without the destructors of communicators


def measure(job: GenerateJob, stack: ExitStack, *, on_gpu: bool) -> dict[str, Any]:
    """What a token takes on this rank."""
    gpu = store = None
    if on_gpu:
        of = virtual_device(job)
        gpu = VirtualGpu(of)
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
    stack.enter_context(patch.object(InferenceModel, "_load", randomize))
    model = InferenceModel(job, device)
    model.load(None)  # type: ignore[arg-type]
    model.part.use_cache(job.training.seq_len)
    prompts = [Prompt("", [1] * (PROMPT - row % 3)) for row in range(job.generate.batch_size)]
    tokenizer = build_tokenizer(job.tokenizer)

    def generate(new: int) -> tuple[float, Any]:
        if gpu is not None:
            gpu.clear()
        began = time.process_time()
        made = generate_texts(
            model, prompts, with_value(job, "generate.max_new_tokens", new).generate, tokenizer
        )
        assert all(len(text.tokens) == new for text in made.texts)
        return time.process_time() - began, None if gpu is None else gpu.calls()

    generate(FEW)
    few, more = generate(FEW), generate(MORE)
    tokens = MORE - FEW
    found = {"cpu_ms": round((more[0] - few[0]) / tokens * 1e3, 2)}
    if gpu is not None:
        counts = Counter(counted(more[1]))
        counts.subtract(counted(few[1]))
        found |= {name: round(count / tokens, 2) for name, count in sorted(counts.items()) if count}
        found["allocated"] = round(torch.cuda.memory_stats()["allocated_bytes.all.peak"] / GIB, 2)
    return found


def randomize(model: Any, _found: None) -> None:
    """In place of loading weights."""
    import torch

    if model.device.type == "cpu":
        torch.manual_seed(0)
        for _, parameter in model.named_parameters():
            torch.nn.init.normal_(getattr(parameter, "_local_tensor", parameter), std=0.02)


def counted(calls: Any) -> dict[str, int]:
    """Calls by kind; collectives and waits each by itself."""
    return {
        "kernels": sum(calls.kernels.values()),
        "products": sum(count for count, _ in calls.products.values()),
        **{f"copies {how}": count for how, (count, _) in calls.copies.items()},
        **{f"{kind} of {group}": count for (kind, group), (count, _) in calls.collectives.items()},
        **{f"wait {' '.join(wait)}": count for wait, count in calls.waits.items()},
    }


if __name__ == "__main__":
    main()
