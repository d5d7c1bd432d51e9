"""Measures what plans and searches cost: CPU seconds of whole processes of ``harness plan``.

    python experiments/measure/plan_speed.py                  all commands, three rounds
    python experiments/measure/plan_speed.py 405b --rounds 1  one of them

A command runs once before it counts, so that orders of schedules are cached
(``harness/tools/plan/order.py``). The median of the rounds and their range are printed, and a digest of a
search's result: its best layouts and why the others lose. Two versions with equal digests find the same.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
_H100 = ("cluster=slurm_h100", "precision=bf16")
_SEARCH = (*_H100, "search=true", "compile=on")
_8K, _4K = "training.seq_len=8192", "training.seq_len=4096"
COMMANDS = {
    "plan": ("model=llama3_8b", "parallelism=fsdp_tp", *_H100),
    "8b": ("model=llama3_8b", *_SEARCH, "cluster.nodes=8", _8K, "training.global_batch_size=256"),
    "70b": (
        "model=llama3_70b",
        *_SEARCH,
        "cluster.nodes=16",
        _8K,
        "training.global_batch_size=128",
    ),
    "405b": (
        "model=llama3_405b",
        *_SEARCH,
        "cluster.nodes=64",
        _8K,
        "training.global_batch_size=256",
    ),
    "v3": (
        "model=deepseek_v3_671b",
        *_SEARCH,
        "cluster.nodes=256",
        _4K,
        "training.global_batch_size=8192",
    ),
}
"""Overrides by name: a plan, and searches of 64, 128, 512 and 2,048 ranks."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help=f"of {', '.join(COMMANDS)}; all if there is none")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(COMMANDS):
        parser.error(f"{min(unknown)} is none of {', '.join(COMMANDS)}")
    for name in arguments.names or COMMANDS:
        cold, made = run(COMMANDS[name])
        times = sorted(run(COMMANDS[name])[0] for _ in range(arguments.rounds))
        what = ""
        if "best" in made:
            what = f", {made['points']:,} ways, {made['planned']} planned, result {digest(made)}"
        print(
            f"{name:5} {statistics.median(times):6.2f} CPU seconds ({times[0]:.2f} to {times[-1]:.2f}; "
            f"the first time {cold:.2f}){what}",
            flush=True,
        )


def run(overrides: tuple[str, ...]) -> tuple[float, dict[str, Any]]:
    """Run a command; return its CPU seconds and what it prints."""
    before = _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:
        file = [f"sweep_file={folder}/sweep/found.yaml"] if "search=true" in overrides else []
        done = subprocess.run(
            [sys.executable, "-m", "harness", "plan", *overrides, *file, "--json"],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            check=True,
        )
    return _cpu_seconds() - before, json.loads(done.stdout)


def _cpu_seconds() -> float:
    """User and system seconds of all processes that this one has started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def digest(found: dict[str, Any]) -> str:
    """Digest of a search's result, eight hex digits."""
    best = [
        [each["overrides"], f"{each['plan']['speed']['step_seconds']:.9g}"]
        for each in found["best"]
    ]
    counts = [found[name] for name in ("points", "layouts", "lost")]
    return hashlib.sha256(json.dumps([best, counts]).encode()).hexdigest()[:8]


if __name__ == "__main__":
    main()
