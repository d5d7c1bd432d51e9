"""Compares the memory that the plan foresees with what runs on this machine's CPU take, layout by layout.

    python experiments/memory/plan_check.py                  # all layouts, about ten minutes on two cores
    python experiments/memory/plan_check.py fsdp tp          # some of them

Every case is trained for two steps by harness.train, as a user would. Measured is memory_gib of its
result.json: the peak resident memory of the fullest rank. A CPU has no allocator that counts for itself, so a
rank's process counts too: Python, torch, what it loads. Of that ``process`` is measured as well, by the same
layout with a model of next to nothing, and shown beside what the plan takes it for (memory.CPU_PROCESS).

The C library is told to give memory back that is freed. By itself it does so only with pieces larger than any
that was freed before, up to 32 MiB (mallopt(3), M_MMAP_THRESHOLD); all others come from a heap that it keeps,
with holes that tensors of backward do not fit into. That takes 10 to 50 % more here, by the sizes of tensors
and not by the layout; it is to a CPU what memory.FRAGMENTATION is to a GPU.

Prints a Markdown table; the exit code is 1 if a case is further off than 10 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from harness.compose.composer import compose_job
from harness.tools.plan.memory import rank_memory
from harness.tools.plan.plan import RankMemory
from harness.util.tables import GIB

ROOT = Path(__file__).resolve().parents[2]
MOST = 0.10
MALLOC = {"MALLOC_MMAP_THRESHOLD_": "262144", "MALLOC_TRIM_THRESHOLD_": "262144"}
COMMON = [
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "checkpoint=disabled", "cluster.device=cpu"),
    *("metrics.console=none", "training.steps=2", "schedule.warmup_steps=1", "cluster.threads_per_rank=1"),
]
# Tensors outweigh the process, parameters and activations weigh about the same, and a step takes seconds.
MODEL = [
    *("model.dim=512", "model.n_heads=8", "model.n_kv_heads=4", "model.ffn_hidden_dim=1536"),
    *("model.n_layers=6", "model.vocab_size=8192", "training.seq_len=512", "model.max_seq_len=1024"),
]
NOTHING = [
    *("model.dim=32", "model.n_heads=8", "model.n_kv_heads=4", "model.ffn_hidden_dim=32"),
    *("model.n_layers=6", "model.vocab_size=256", "training.seq_len=32"),
]
EXPERTS = [
    *("model=qwen3_moe_debug", "model.moe.num_experts=8", "model.moe.top_k=2"),
    *("model.head_dim=64", "model.moe.hidden_dim=512", "model.moe.force_balance=true"),
]
CASES: dict[str, list[str]] = {
    "single": ["training.global_batch_size=4"],
    "single, full": ["training.global_batch_size=8", "activation_checkpoint=full"],
    "single, selective_op": ["training.global_batch_size=6", "activation_checkpoint=selective_op"],
    "single, loss_chunks": ["training.global_batch_size=4", "training.loss_chunks=8"],
    "single, compiled": ["training.global_batch_size=4", "compile=on"],
    "ddp": ["parallelism=ddp", "parallelism.dp_replicate=2", "training.global_batch_size=8"],
    "fsdp": ["parallelism=fsdp", "parallelism.dp_shard=4", "training.global_batch_size=16"],
    "fsdp, bf16": [
        *("parallelism=fsdp", "parallelism.dp_shard=2", "training.global_batch_size=8", "precision=bf16"),
    ],
    "hsdp": [
        *("parallelism=hsdp", "parallelism.dp_replicate=2", "parallelism.dp_shard=2"),
        "training.global_batch_size=16",
    ],
    "tp": ["parallelism=tp", "parallelism.tp=4", "training.global_batch_size=8"],
    "fsdp_tp": [
        *("parallelism=fsdp_tp", "parallelism.dp_shard=2", "parallelism.tp=2"),
        "training.global_batch_size=12",
    ],
    "cp": ["parallelism=cp", "parallelism.cp=2", "training.global_batch_size=8"],
    "pp, 1F1B": ["parallelism=pp", "parallelism.pp=4", "training.global_batch_size=16"],
    "fsdp_pp, Interleaved1F1B": [
        *("parallelism=fsdp_pp", "parallelism.dp_shard=2", "parallelism.pp=2"),
        *("parallelism.pp_schedule=Interleaved1F1B", "training.global_batch_size=16"),
    ],
    "fsdp_ep": [
        *EXPERTS,
        *(
            "parallelism=fsdp_ep",
            "parallelism.dp_shard=2",
            "parallelism.ep=2",
            "training.global_batch_size=8",
        ),
    ],
}


def overrides_of(name: str, size: list[str]) -> list[str]:
    """A case's overrides, with a model of a size. Groups come first, so that values win over them."""
    typed = [*COMMON, *CASES[name]]
    groups = [each for each in typed if "." not in each.split("=")[0]]
    model = [each for each in groups if each.startswith("model=")][-1:]
    others = [each for each in groups if not each.startswith("model=")]
    values = [each for each in typed if each not in groups]
    return [*model, *others, *size, *values]


def measure(typed: list[str]) -> float:
    """GiB of the fullest rank of a run."""
    environment = {**os.environ, **MALLOC, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness.train", *typed, f"runs_dir={folder}"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit code {done.returncode}\n{done.stderr}")
        [result] = Path(folder).rglob("result.json")
        return float(json.loads(result.read_text())["memory_gib"])


def fullest(typed: list[str]) -> RankMemory:
    """The plan's fullest rank."""
    return max(rank_memory(compose_job(typed)), key=lambda rank: rank.peak)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan-only", action="store_true", help="run nothing")
    parser.add_argument("--process", action="store_true", help="measure the process alone, too")
    parser.add_argument("cases", nargs="*", default=list(CASES), help=", ".join(CASES))
    arguments = parser.parse_args()
    print("| layout | planned GiB | measured GiB | error | of it process: planned | measured | kinds, MiB |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    for name in arguments.cases:
        typed = overrides_of(name, MODEL)
        rank = fullest(typed)
        kinds = ", ".join(f"{kind} {size / 2**20:.0f}" for kind, size in rank.kinds.items())
        planned, own = rank.peak / GIB, rank.kinds["runtime"] / GIB
        if arguments.plan_only:
            print(f"| {name} | {planned:.2f} | - | - | {own:.2f} | - | {kinds} |")
            continue
        measured = measure(typed)
        process = f"{measure(overrides_of(name, NOTHING)):.2f}" if arguments.process else "-"
        error = planned / measured - 1
        worst = max(worst, abs(error))
        row = f"| {name} | {planned:.2f} | {measured:.2f} | {error:+.1%} | {own:.2f} | {process} | {kinds} |"
        print(row, flush=True)
    if arguments.plan_only:
        return 0
    print(f"\nlargest error {worst:.1%}, at most {MOST:.0%}: {'yes' if worst <= MOST else 'no'}")
    return 0 if worst <= MOST else 1


if __name__ == "__main__":
    sys.exit(main())
