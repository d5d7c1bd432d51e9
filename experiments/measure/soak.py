"""Trains thousands of steps with everything that watches or saves, and says whether memory stays flat.

    python experiments/measure/soak.py --steps 2000
    python experiments/measure/soak.py --steps 2000 checkpoint=sync parallelism=fsdp_tp

Reads the resident memory of every rank each second (Linux only). Prints its mean over each tenth of the
steps, and how much the last tenth has more than the third one: earlier ones fill caches. Other arguments are
overrides of the job. If the run fails, its exit code is the script's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = 10
SETTLED = 2
"""The first part of which memory counts, from 0."""
MIB = 2**20
JOB = [
    "model=mixtral_debug",
    "model.vocab_size=2048",
    "parallelism=fsdp",
    "parallelism.dp_shard=2",
    "cluster.device=cpu",
    "training.seq_len=64",
    "training.global_batch_size=4",
    "training.z_loss=1e-4",
    "model.moe.z_loss_coeff=1e-3",
    "metrics.console=none",
    "metrics.log_interval=10",
    "metrics.all_ranks=true",
    "metrics.tensors=norms",
    "metrics.activations=true",
    "metrics.tensors_interval=10",
    "optimizer.qk_clip=50",
    "optimizer.qk_clip_interval=10",
    "debug.spikes=rewind",
    "validation.interval=100",
    "validation.steps=2",
    "validation.sets={one: {kind: synthetic}, other: {kind: synthetic}}",
    "checkpoint.interval=50",
    "checkpoint.keep_latest_k=2",
    "checkpoint.keep_every=500",
    "checkpoint.on_save=sleep 0.1",
]


def resident_bytes(folder: str) -> dict[str, int]:
    """Memory of the ranks of a run, by the number of their process."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes().decode(errors="replace")
            if "harness.train.rank" not in command or folder not in command:
                continue
            pages = int((process / "statm").read_text().split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        found[process.name] = pages * os.sysconf("SC_PAGE_SIZE")
    return found


def last_step(folder: Path) -> int:
    """The step of the newest row of a run in ``folder``; 0 before the first."""
    for file in folder.rglob("metrics.jsonl"):
        lines = file.read_text().splitlines()
        complete = [line for line in lines if line.endswith("}")]
        if complete:
            return int(json.loads(complete[-1])["step"])
    return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    arguments, overrides = parser.parse_known_args()
    samples: dict[int, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "harness.train", *JOB]
        command += [f"runs_dir={folder}", f"training.steps={arguments.steps}", *overrides]
        run = subprocess.Popen(command, cwd=ROOT)
        while run.poll() is None:
            part = last_step(Path(folder)) * PARTS // (arguments.steps + 1)
            for rank, size in resident_bytes(folder).items():
                samples[part][rank].append(size)
            time.sleep(1)
        if run.returncode:
            sys.exit(run.returncode)
        [result] = Path(folder).rglob("result.json")
        row = json.loads(result.read_text())
    ranks = sorted(samples[SETTLED], key=int)
    means = {
        part: [statistics.mean(samples[part][rank]) / MIB for rank in ranks]
        for part in sorted(samples)
        if all(samples[part][rank] for rank in ranks)
    }
    print("| steps | " + " | ".join(f"rank {i}, MiB" for i in range(len(ranks))) + " |")
    print("|---|" + "---|" * len(ranks))
    for part, sizes in means.items():
        upto = (part + 1) * arguments.steps // PARTS
        print(f"| up to {upto} | " + " | ".join(f"{size:.1f}" for size in sizes) + " |")
    last = max(means)
    grown = [after - before for before, after in zip(means[SETTLED], means[last], strict=True)]
    print("grown: " + ", ".join(f"{each:+.1f} MiB" for each in grown))
    shown = ("exit_reason", "step", "loss", "spikes", "train_seconds", "goodput")
    print(json.dumps({name: row.get(name) for name in shown}))


if __name__ == "__main__":
    main()
