"""Measures what the training loop costs beside the training: data, decisions, books, metrics.

    python experiments/measure/loop_overhead.py --steps 60

The loop runs in this process with clocks around passes, gradient norm, clipping and optimizer. What is left
of a step's time is the loop's, data included. Without overrides every step is logged, and a step takes
about 100 ms on one slow core.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.metrics.recorder import Recorder
from harness.metrics.views import ShownRun
from harness.run.folder import RunFolder
from harness.train import engine as engine_module
from harness.train.graphed import build_engine
from harness.train.setup import process_group, set_up_process
from harness.train.trainer import Trainer

JOB = [
    *("model=llama3_tiny", "model.vocab_size=258", "model.dim=128", "model.ffn_hidden_dim=384"),
    *("training.seq_len=512", "training.global_batch_size=1", "tokenizer=bytes", "data=local_text"),
    *("metrics.console=none", "cluster.device=cpu", "checkpoint=disabled"),
]
WARMUP = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=60, help=f"steps; the first {WARMUP} do not count"
    )
    parser.add_argument(
        "overrides", nargs="*", help="what is to be different from the job of 100 ms a step"
    )
    typed = parser.parse_args()
    if typed.steps <= WARMUP:
        parser.error(f"--steps must be more than {WARMUP}: the first {WARMUP} are not counted")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text("What the loop costs beside the training. " * 5000)
        data = [
            f"data.paths=[{folder}/*.txt]",
            f"data.cache_dir={folder}",
            f"runs_dir={folder}/runs",
        ]
        rows = measure([*JOB, f"training.steps={typed.steps}", *data, *typed.overrides])[WARMUP:]
    shares = sorted(1 - (inside + clipping) / seconds for seconds, inside, clipping in rows)
    median, ninth = statistics.median(shares), shares[int(0.9 * (len(shares) - 1))]
    step = 1e3 * statistics.median(seconds for seconds, _, _ in rows)
    norm = statistics.median(clipping / seconds for seconds, _, clipping in rows)
    print(
        f"loop overhead: median {median * step:.2f} ms, {median:.2%} of a step of {step:.1f} ms (p90 "
        f"{ninth:.2%}); gradient norm and clipping {norm:.2%}; {platform.machine()}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )


def measure(overrides: list[str]) -> list[tuple[float, float, float]]:
    """Of each step: seconds, those inside of the training, and those of gradient norm and clipping."""
    job, device = compose_job(overrides), torch.device("cpu")
    folder = RunFolder(job.run_dir)
    begin(folder, job, overrides)
    set_up_process(job)
    work, norm = [0.0], [0.0]
    rows: list[tuple[float, float, float]] = []

    def clock(owner: Any, name: str, total: list[float]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)  # and what the scheduler marked it with
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            value = function(*args, **kwargs)
            total[0] += time.perf_counter() - started
            return value

        setattr(owner, name, call)

    clock(engine_module, "local_squares", norm)
    clock(engine_module, "clip_gradients", norm)
    with process_group(job, device):
        engine = build_engine(job, device)
        clock(engine.executor, "forward_backward", work)
        clock(engine.optimizer, "step", work)
        clock(engine.optimizer, "zero_grad", work)
        recorder = Recorder(ShownRun(job.metrics, folder.path, job.id, job.name, {}), job.steps)
        trainer = Trainer(job, folder, engine, recorder, time.monotonic())
        add = trainer.window.add

        def book(seconds: float, *figures: Any, **options: Any) -> None:
            rows.append((seconds, work[0], norm[0]))
            work[0] = norm[0] = 0.0
            add(seconds, *figures, **options)

        trainer.window.add = book  # type: ignore[method-assign]
        trainer.train()
        recorder.close({})
    return rows


if __name__ == "__main__":
    main()
