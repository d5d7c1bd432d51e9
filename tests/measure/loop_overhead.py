"""Measures what the training loop costs beside the training: data, decisions, books, metrics.

    python tests/measure/loop_overhead.py --steps 60

The loop runs in this process with clocks around passes, gradient norm, clipping and optimizer. What is left
of a step's time is the loop's, data included. Without overrides every step is logged, and a step takes
about 100 ms on one slow core. Prints one line; with ``--output`` also writes it as JSON.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.launch.begin import begin

ROOT = Path(__file__).resolve().parents[2]
# A step of about 100 ms.
JOB = [
    *("model=llama3_tiny", "model.vocab_size=258", "model.dim=128", "model.ffn_hidden_dim=384"),
    *("training.seq_len=512", "training.global_batch_size=1", "tokenizer=bytes", "data=local_text"),
]
WARMUP = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help=f"steps; the first {WARMUP} do not count")
    parser.add_argument("--output", type=Path, help="where to write the figures as JSON")
    parser.add_argument("overrides", nargs="*", help="what is to be different from the job of 100 ms a step")
    arguments = parser.parse_args()
    if arguments.steps <= WARMUP:
        parser.error(f"--steps must be more than {WARMUP}: the first {WARMUP} are not counted")
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "text.txt").write_text("What the loop costs beside the training. " * 5000)
        data = [f"data.paths=[{folder}/*.txt]", f"data.cache_dir={folder}"]
        figures = measure([*JOB, *data, *arguments.overrides], arguments.steps)
    print(
        f"loop overhead: median {figures['median'] * figures['step_seconds'] * 1e3:.2f} ms, "
        f"{figures['median']:.2%} of a step of {figures['step_seconds'] * 1e3:.1f} ms "
        f"(p90 {figures['p90']:.2%}); gradient norm and clipping {figures['norm_median']:.2%}; "
        f"{platform.machine()}, {os.cpu_count()} cores, torch {figures['torch']}"
    )
    if arguments.output:
        arguments.output.write_text(json.dumps(figures, indent=2) + "\n")


def measure(overrides: list[str], steps: int) -> dict[str, Any]:
    """Shares of a step's time: the loop's, and that of norm and clipping, which are no part of it.

    Args:
        overrides: the job.
        steps: steps to run.
    """
    sys.path.insert(0, str(ROOT))
    import torch

    from harness.compose.composer import compose_job
    from harness.metrics.recorder import Recorder
    from harness.metrics.views import ShownRun
    from harness.run.folder import RunFolder
    from harness.train import engine as engine_module
    from harness.train.engine import Engine
    from harness.train.setup import process_group, set_up_process
    from harness.train.trainer import Trainer

    folder = Path(tempfile.mkdtemp())
    overrides = [*overrides, f"training.steps={steps}", f"runs_dir={folder}"]
    job = compose_job([*overrides, "metrics.console=none", "cluster.device=cpu", "checkpoint=disabled"])
    run_folder = RunFolder(job.run_dir)
    begin(run_folder, job, overrides)
    device = torch.device("cpu")
    work, norm = [0.0], [0.0]
    rows: list[tuple[float, float, float]] = []
    set_up_process(job)
    kept = {name: getattr(engine_module, name) for name in ("local_squares", "clip_gradients")}
    for name, function in kept.items():
        setattr(engine_module, name, clocked(function, norm))
    try:
        with process_group(job, device):
            engine = Engine(job, device)
            engine.executor.forward_backward = clocked(engine.executor.forward_backward, work)  # type: ignore[method-assign]
            for name in ("step", "zero_grad"):
                setattr(engine.optimizer, name, clocked(getattr(engine.optimizer, name), work))
            recorder = Recorder(ShownRun(job.metrics, run_folder.path, job.id, job.name, {}), steps)
            trainer = Trainer(job, run_folder, engine, recorder, time.monotonic())
            add = trainer.window.add

            def book(seconds: float, *figures: Any, **options: Any) -> None:
                rows.append((seconds, work[0], norm[0]))
                work[0] = norm[0] = 0.0
                add(seconds, *figures, **options)

            trainer.window.add = book  # type: ignore[method-assign]
            trainer.train()
            recorder.close({})
    finally:
        for name, function in kept.items():
            setattr(engine_module, name, function)
        shutil.rmtree(folder)
    counted = rows[WARMUP:]
    shares = sorted(1 - (inside + clipping) / seconds for seconds, inside, clipping in counted)
    return {
        "median": statistics.median(shares),
        "p90": shares[int(0.9 * (len(shares) - 1))],
        "max": shares[-1],
        "norm_median": statistics.median(clipping / seconds for seconds, _, clipping in counted),
        "step_seconds": statistics.median(seconds for seconds, _, _ in counted),
        "steps": len(counted),
        "torch": torch.__version__,
    }


def clocked(function: Any, total: list[float]) -> Any:
    """The function, with its seconds added to ``total[0]``."""

    @functools.wraps(function)  # and what the scheduler marked it with
    def call(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        value = function(*args, **kwargs)
        total[0] += time.perf_counter() - started
        return value

    return call


if __name__ == "__main__":
    main()
