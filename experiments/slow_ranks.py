"""Counts which ranks are named slow on cores that are too few: true names, and false ones.

    python experiments/slow_ranks.py --load 4

Eight ranks train a small model with ``profiling.phases=true`` while other processes keep cores busy. For each
offset of the windows there are three runs: no rank is slow, for 200 steps; one computes 30 % longer, for 40;
one sleeps as long. Prints a row for each run; exits with 1 if another rank was named, or the slow one not
within 20 steps.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

WORLD, EXCESS, SOON = 8, 0.3, 20
JOB = (
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "training.seq_len=128"),
    *("training.global_batch_size=16", "parallelism.dp_shard=8", "checkpoint=disabled"),
    *("cluster.device=cpu", "metrics.console=none", "profiling.phases=true"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=200, help="steps of a run without a slow rank")
    parser.add_argument("--load", type=int, default=4, help="other processes that compute all the time")
    parser.add_argument(
        "--offsets", type=int, default=3, help="offsets of the windows, each with its own slow rank"
    )
    parser.add_argument("overrides", nargs="*", help="what is to be different from the job here")
    arguments = parser.parse_args()
    from harness.compose.composer import compose_job
    from harness.launch.pool import RankPool

    wrong = 0
    print(f"{WORLD} ranks, {os.cpu_count()} cores, {arguments.load} other processes")
    with busy(arguments.load), RankPool(WORLD, timeout_seconds=3600) as pool:
        for offset in range(arguments.offsets):
            slowed, own = (3 + 2 * offset) % WORLD, 0.0
            for how in ("none", "computes", "sleeps"):
                steps = arguments.steps if how == "none" else 2 * SOON
                # The first window begins after the warm-up.
                fields = (f"metrics.warmup_steps={1 + offset}", f"training.steps={steps}")
                job = compose_job([*JOB, *fields, *arguments.overrides])
                with tempfile.TemporaryDirectory() as folder:
                    began = time.perf_counter()
                    extra = (slowed, how, EXCESS * own)
                    found = pool.run(WORLD, train, job.to_json(), folder, extra)[0]
                    seconds = (time.perf_counter() - began) / steps
                    rows = read_rows(Path(folder))
                own = own or rows["computes"]
                expected = [] if how == "none" else [slowed]
                named = [each.rank for each in found]
                right = named == expected and all(each.step <= SOON for each in found)
                wrong += not right
                print(
                    f"{'right' if right else 'WRONG'}: offset {offset}, slow: "
                    f"{'none' if how == 'none' else f'rank {slowed} {how}'}; named: "
                    f"{'; '.join(map(str, found)) or 'none'}; a step {seconds:.3f} s, a rank computes "
                    f"{rows['computes']:.4f} s and waits {rows['queued']:.4f} s for a core; "
                    f"load average {os.getloadavg()[0]:.0f}",
                    flush=True,
                )
    return int(wrong > 0)


def train(job_json: str, folder: str, extra: tuple[int, str, float]) -> list[Any]:
    """Train on one rank; return the ranks that were named.

    Args:
        job_json: the job.
        folder: its run folder.
        extra: the slow rank, how it is slow, and for how many seconds of each step.
    """
    import torch
    import torch.distributed as dist

    from harness.config.job import Job
    from harness.run.folder import RunFolder
    from harness.train.engine import Engine
    from harness.train.observers.phases import PhaseLog
    from harness.train.trainer import Trainer

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    rank, how, seconds = extra
    if how != "none" and dist.get_rank() == rank:
        block = next(iter(engine.parts[0].blocks.values()))
        spend = compute if how == "computes" else time.sleep
        block.register_forward_pre_hook(lambda *_: spend(seconds))
    trainer = Trainer(job, RunFolder(Path(folder)), engine, None, time.monotonic())
    trainer.train()
    [phases] = [each for each in trainer.observers if isinstance(each, PhaseLog)]
    return phases.slow.found


def compute(seconds: float) -> None:
    """Compute for this long on a core."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def read_rows(folder: Path) -> dict[str, float]:
    """Return how long the median rank computes in a step, and how long it waits for a core meanwhile."""
    from harness.metrics.slow import own_seconds

    found = []
    for path in folder.glob("phases/rank*.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        queued = median(row["queued"] for row in rows)
        found.append((median(sum(own_seconds(row["phases"])) - row["queued"] for row in rows), queued))
    return {"computes": median(each[0] for each in found), "queued": median(each[1] for each in found)}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep that many processes busy."""
    spin = [sys.executable, "-c", "while True: sum(range(100000))"]
    running = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


if __name__ == "__main__":
    sys.exit(main())
