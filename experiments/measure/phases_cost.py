"""Measures what ``profiling.phases`` costs: the CPU time of steps with it and without it, in turn.

    python experiments/measure/phases_cost.py --parts
    python experiments/measure/phases_cost.py

The cost depends on the number of marks, not on the size of tensors. So ranks train blocks of short steps,
with phases and without, in changing order: the time of long steps varies by more than the cost. The figure
is the CPU time (user and system, all threads) of the fastest step of a block, mean of the ranks. Prints the
median difference with a 90 % interval of the median (bootstrap), the same for two blocks without phases,
which is the noise, and the share of a long step: of the same layout with wider blocks and longer sequences.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import mean, median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

WARMUP = 3
JOB = (
    *(
        "model=llama3_tiny",
        "model.n_layers=4",
        "data=synthetic",
        "tokenizer=bytes",
        "checkpoint=disabled",
    ),
    *(
        "training.global_batch_size=4",
        "training.seq_len=16",
        "parallelism.tp=2",
        "cluster.device=cpu",
    ),
    *("metrics.console=none", "metrics.warmup_steps=0"),
)
LONG = ("model.dim=256", "model.ffn_hidden_dim=768", "training.seq_len=256", "training.steps=10")
SAMPLES = 10000
CALLS, REPEATED = 200, 60


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--count", type=int, default=12, help="blocks with phases; twice as many without"
    )
    parser.add_argument("--steps", type=int, default=40, help="steps of a block")
    parser.add_argument(
        "--parts", action="store_true", help="what a mark and a marked collective take instead"
    )
    parser.add_argument("overrides", nargs="*", help="what is to be different from the job here")
    arguments = parser.parse_args()
    from harness.compose.composer import compose_job
    from harness.launch.pool import RankPool

    if arguments.parts:
        with RankPool(2) as pool:
            mark, collective = pool.run(2, parts)[0]
        print(
            f"a mark and its reading: {mark:.1f} us; marks of a collective and its wait: {collective:.0f} us"
        )
        return
    typed = [*JOB, f"training.steps={WARMUP + arguments.steps}", *arguments.overrides]
    more = {"with": ["profiling.phases=true"], "without": [], "long": LONG}
    jobs = {name: compose_job([*typed, *fields]) for name, fields in more.items()}
    texts = {name: job.to_json() for name, job in jobs.items()}
    with tempfile.TemporaryDirectory() as folder, RankPool(jobs["long"].world_size, 7200) as pool:
        of_ranks = pool.run(jobs["long"].world_size, measure, texts, folder, arguments.count)
        rows = [
            path.read_text().splitlines()[0]
            for path in Path(folder).glob("first/phases/rank*.jsonl")
        ]
    spans = mean(len(json.loads(row)["spans"]) for row in rows)
    long = mean(seconds for seconds, _ in of_ranks)
    # Of each triple, mean CPU seconds of a rank's step: with phases, without, without.
    steps = [
        [mean(each) for each in zip(*triple, strict=True)]
        for triple in zip(*(m for _, m in of_ranks), strict=True)
    ]
    step = 1e3 * median(off for _, off, _ in steps)
    print(
        f"{len(of_ranks)} ranks, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.0f}, {len(steps)} "
        f"times three blocks of {arguments.steps} steps; a step takes {step:.1f} ms of a core and "
        f"has {spans:.0f} spans"
    )
    show("with - without", [on - off for on, off, _ in steps], long)
    show("without - without", [again - off for _, off, again in steps], long)


def show(what: str, seconds: list[float], long: float) -> None:
    """Print the median, its interval, and the share of a long step."""
    generator = random.Random(0)
    medians = sorted(median(generator.choices(seconds, k=len(seconds))) for _ in range(SAMPLES))
    low, high = medians[SAMPLES // 20], medians[-SAMPLES // 20]
    share = " to ".join(f"{each / long:+.2%}" for each in (low, high))
    print(
        f"{what}: {1e3 * median(seconds):+.3f} ms (90 % interval {1e3 * low:+.3f} to {1e3 * high:+.3f}), "
        f"{median(seconds) / long:+.2%} ({share}) of a step of {1e3 * long:.0f} ms"
    )


def measure(jobs: dict[str, str], folder: str, count: int) -> tuple[float, list[list[float]]]:
    """Return this rank's CPU seconds of a long step, and of short steps: with phases, without, without."""
    import torch

    from harness.config.job import Job
    from harness.train.engine import Engine
    from harness.train.observers import phases
    from harness.train.setup import silence_known_noise

    silence_known_noise()
    of = {name: Job.from_json(text) for name, text in jobs.items()}
    long = block(Engine(of["long"], torch.device("cpu")), of["long"], Path(folder, "long"))
    engine = Engine(of["without"], torch.device("cpu"))
    block(engine, of["with"], Path(folder, "first"))
    phases.WITH_SPANS = 0  # only the first rows of a run have spans
    measured = []
    for number in range(count):
        found = {}
        for each in random.Random(number).sample(range(3), 3):
            job = of["without" if each else "with"]
            found[each] = block(engine, job, Path(folder, f"{number}-{each}"))
        measured.append([found[each] for each in range(3)])
    return long, measured


def block(engine: Any, job: Any, folder: Path) -> float:
    """Train a block of steps; return the CPU seconds of this rank's fastest step after the warm-up."""
    from harness.run.folder import RunFolder
    from harness.train.trainer import Trainer

    engine.set_schedule(0)
    trainer = Trainer(job, RunFolder(folder), engine, None, time.monotonic())
    stamps = []
    log = trainer._log

    def logged(step: Any, noted: Any) -> None:
        log(step, noted)
        stamps.append(time.process_time())

    trainer._log = logged  # type: ignore[method-assign]
    trainer.train()
    return min(later - earlier for earlier, later in pairwise(stamps[WARMUP - 1 :]))


def parts() -> tuple[float, float]:
    """Return the CPU microseconds of a mark with its reading, and those that marks add to a collective."""
    import torch
    import torch.distributed._functional_collectives as functional

    from harness.config.parallelism import ParallelismConfig
    from harness.parallelism.mesh import build_mesh
    from harness.train.observers.phase_marks import Marks
    from harness.train.observers.phase_times import Phases

    device = torch.device("cpu")
    phases, mesh = Phases(device), build_mesh(ParallelismConfig(tp=2, dp_shard=1), device)
    values = torch.ones(64)

    def marks() -> None:
        for _ in range(CALLS):
            with phases.inside("forward.blocks"):
                pass
        phases.end_step(1)
        for step in phases.take():
            assert step.on_core and step.seconds

    def collectives() -> None:
        for _ in range(CALLS):
            functional.wait_tensor(functional.all_reduce(values, "sum", mesh.group("tp")))

    def spent(act: Callable[[], None]) -> float:
        phases.restart()
        before = time.thread_time()
        act()
        return 1e6 * (time.thread_time() - before) / CALLS

    gc.disable()  # as the training loop does
    own, more = [], []
    for _ in range(REPEATED):
        own.append(spent(marks) / 2)
        plain = spent(collectives)
        hooks = Marks(phases, [], mesh, device)
        more.append(spent(collectives) - plain)
        hooks.remove()
    return median(own), median(more)


if __name__ == "__main__":
    main()
