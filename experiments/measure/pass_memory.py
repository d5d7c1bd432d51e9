"""Measures on a CPU what activation checkpointing and the chunked loss save of the memory of one pass.

    python experiments/measure/pass_memory.py                     # both tables
    python experiments/measure/pass_memory.py --tables loss       # the chunked loss at vocabulary 128,256
    python experiments/measure/pass_memory.py precision=bf16      # further overrides, for every case

Each case is a process of its own. It trains two steps, and the forward and backward pass of the third is
measured at torch's allocator: the profiler reports every allocation and every release, made by eager kernels,
compiled code or autograd alike, so that their running sum is exact and repeatable. A dispatch mode would not
see inside compiled code. The resident set of the process, in the last column, is what the system gives; it
holds all of torch besides, and pages that the C library keeps for later.

Prints Markdown tables; the exit code is 1 if memory does not fall as it should.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.compose.composer import compose_job
from harness.config.job import Job

MIB = 2**20
COMMON = [
    *(
        "model=llama3_tiny",
        "data=synthetic",
        "tokenizer=bytes",
        "checkpoint=disabled",
        "cluster.device=cpu",
    ),
    "metrics.console=none",
]
# Activations outweigh gradients here, as they do in jobs that need checkpointing.
BLOCKS = [
    *("model.dim=256", "model.ffn_hidden_dim=768", "model.n_layers=8"),
    *("training.seq_len=256", "training.global_batch_size=4"),
]
CHECKPOINTING = {
    "none": ["activation_checkpoint=none"],
    "selective_layer": ["activation_checkpoint=selective_layer"],
    "selective_op": ["activation_checkpoint=selective_op"],
    "full": ["activation_checkpoint=full"],
    "none, compiled": ["activation_checkpoint=none", "compile=on"],
    "memory_budget, compiled": ["activation_checkpoint=memory_budget", "compile=on"],
}
# What must take less than what.
FALLS = (
    ("selective_layer", "none"),
    ("selective_op", "none"),
    ("full", "selective_layer"),
    ("full", "selective_op"),
    ("memory_budget, compiled", "none, compiled"),
)
VOCABULARY = 128_256
HEAD = [
    *(f"model.vocab_size={VOCABULARY}", "model.n_layers=1"),
    *("training.seq_len=512", "training.global_batch_size=2"),
]
LOSSES = {"plain": ["training.loss_chunks=1"], "chunked, 8": ["training.loss_chunks=8"]}
LARGEST_SHARE = 0.25


def measured(function: Callable[[], Any]) -> tuple[int, int]:
    """Bytes that torch's CPU allocator holds at most during a call, and after it, above those before it."""
    from torch.profiler import ProfilerActivity, profile

    gc.collect()  # garbage of earlier calls that is freed meanwhile would count as less memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function()
    assert profiler.profiler is not None and profiler.profiler.kineto_results is not None
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak, held


def measure_pass(job: Job) -> dict[str, float]:
    """What the forward and backward pass of the third step of a job takes, MiB."""
    import torch

    from harness.data.tokenizer import build_tokenizer
    from harness.metrics.memory import peak_memory_gib
    from harness.train.graphed import build_engine
    from harness.train.objective import loader_of
    from harness.train.setup import process_group, set_up_process
    from harness.util.words import GIB

    device = torch.device("cpu")
    set_up_process(job)
    with process_group(job, device):
        engine = build_engine(job, device)
        loader = loader_of(job, build_tokenizer(job.tokenizer), engine.rows)
        for _ in range(2):
            engine.update(engine.gradients(loader.next()).grad_norm)
        batch = loader.next()
        peak, held = measured(lambda: engine.gradients(batch))
        gradients = sum(
            parameter.grad.nbytes for parameter in engine.parameters if parameter.grad is not None
        )
    return {
        "peak": peak / MIB,
        "held": held / MIB,
        "gradients": gradients / MIB,
        "resident": peak_memory_gib("cpu") * GIB / MIB,
    }


def measure_apart(overrides: list[str]) -> dict[str, float]:
    """The same in a process of its own."""
    command = [sys.executable, str(Path(__file__).resolve()), "--child", *overrides]
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryFile("w+") as said:
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True
        )
        if done.returncode:
            said.seek(0)
            raise SystemExit(f"{' '.join(overrides)}: exit code {done.returncode}\n{said.read()}")
    return json.loads(done.stdout.splitlines()[-1])


def table(title: str, rows: dict[str, dict[str, float]]) -> str:
    """Markdown, every row against the one that saves nothing."""
    lines = [
        f"| {title} | peak of a pass, MiB | share of the plain one | resident set of the process, MiB |",
        "|---|---|---|---|",
    ]
    for name, row in rows.items():
        share = row["peak"] / rows[plain_of(name, rows)]["peak"]
        lines.append(f"| {name} | {row['peak']:.1f} | {share:.3f} | {row['resident']:.0f} |")
    return "\n".join(lines)


def plain_of(name: str, rows: dict[str, dict[str, float]]) -> str:
    """The row that saves nothing, compiled for those that are."""
    compiled = name.endswith("compiled")
    return next(other for other in rows if other.endswith("compiled") == compiled)


def not_falling(rows: dict[str, dict[str, float]]) -> list[str]:
    """The relations that do not hold, in words."""
    return [
        f"{less} takes {rows[less]['peak']:.1f} MiB and {more} {rows[more]['peak']:.1f}"
        for less, more in FALLS
        if not rows[less]["peak"] < rows[more]["peak"]
    ]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tables", nargs="+", choices=("blocks", "loss"), default=["blocks", "loss"]
    )
    parser.add_argument(
        "--child", action="store_true", help="measure the one job of the overrides, here"
    )
    parser.add_argument("overrides", nargs="*", help="further overrides, for every case")
    arguments = parser.parse_intermixed_args()
    if arguments.child:
        print(json.dumps(measure_pass(compose_job(arguments.overrides))))
        return 0
    wrong: list[str] = []
    if "blocks" in arguments.tables:
        rows = {
            name: measure_apart([*COMMON, *BLOCKS, *own, *arguments.overrides])
            for name, own in CHECKPOINTING.items()
        }
        wrong += not_falling(rows)
        print(table("activation checkpointing", rows), end="\n\n")
    if "loss" in arguments.tables:
        rows = {
            name: measure_apart([*COMMON, *HEAD, *own, *arguments.overrides])
            for name, own in LOSSES.items()
        }
        plain, chunked = (row["peak"] for row in rows.values())
        share = chunked / plain
        print(table(f"loss at vocabulary {VOCABULARY:,}", rows), end="\n\n")
        print(
            f"chunked over plain: {share:.3f}, gradients of both tables included; at most {LARGEST_SHARE}: ",
            end="",
        )
        print("yes" if share <= LARGEST_SHARE else "no")
        wrong += [f"the chunked loss takes {share:.3f} of the plain one's memory"] * (
            share > LARGEST_SHARE
        )
    print("\n".join(wrong) or "memory falls as it should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
