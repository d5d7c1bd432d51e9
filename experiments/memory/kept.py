"""Compare CPU ranks that keep freed memory with ranks that return it (harness/train/process.py).

    python experiments/memory/kept.py --rounds 3 parallelism=single compile=on

Both kinds train the shape of cpu_baseline, in turn. A rank returns freed memory when the user has set
malloc's tunables; here the tunable has its default value, so that nothing else differs. Page faults and
kernel time are counted for whole commands; the difference per step leaves out what both need to start.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GIVEN_BACK = {"GLIBC_TUNABLES": "glibc.malloc.tcache_count=7"}
"""glibc's own default (malloc/malloc.c, TCACHE_FILL_COUNT)."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help="steps of a run; the first two have no speed")
    parser.add_argument("overrides", nargs="*", help="the layout, and what else is to be different")
    arguments = parser.parse_args()
    pairs: list[tuple[dict[str, float], dict[str, float]]] = []
    for number in range(arguments.rounds):
        runs = {}
        for keeps in (True, False) if number % 2 == 0 else (False, True):
            runs[keeps] = run(arguments.overrides, arguments.steps, keeps=keeps)
            sys.stderr.write(f"{json.dumps({'round': number, 'keeps': keeps, **runs[keeps]})}\n")
        pairs.append((runs[True], runs[False]))
    print(table(pairs, arguments.steps))


def run(overrides: list[str], steps: int, *, keeps: bool) -> dict[str, float]:
    """One run of ``harness.train``."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "harness.train", "experiment=cpu_baseline/shape", "cluster.device=cpu"),
            *(f"training.steps={steps}", f"runs_dir={folder}", "metrics.console=none", *overrides),
        ]
        environment = {**os.environ, **({} if keeps else GIVEN_BACK)}
        subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
        [result] = Path(folder).glob("cpu_baseline/*/result.json")
        row = json.loads(result.read_text())
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "tokens_per_second": row["window.tokens_per_second_median"],
        "memory_gib": row["memory_gib"],
        "faults": after.ru_minflt - before.ru_minflt,
        "kernel_seconds": after.ru_stime - before.ru_stime,
    }


def table(pairs: list[tuple[dict[str, float], dict[str, float]]], steps: int) -> str:
    """Medians over the rounds, and the median and range of the rounds' ratios, kept over given back."""
    lines = ["| figure | kept | given back | kept over given back (range) |", "|---|---|---|---|"]
    for figure in ("tokens_per_second", "memory_gib"):
        ratios = [kept[figure] / back[figure] for kept, back in pairs]
        kept, back = (statistics.median(pair[side][figure] for pair in pairs) for side in (0, 1))
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        lines.append(f"| {figure} | {kept:.4g} | {back:.4g} | {spread} |")
    faults, seconds = (
        statistics.median((back[figure] - kept[figure]) / steps for kept, back in pairs)
        for figure in ("faults", "kernel_seconds")
    )
    return "\n".join(
        [*lines, "", f"given back, a step has {faults:,.0f} page faults and {seconds:.2f} s more"]
    )


if __name__ == "__main__":
    main()
