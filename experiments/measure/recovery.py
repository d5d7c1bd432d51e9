"""Measures the seconds between a loss and the next step, by part (``cluster.on_node_loss=continue``).

    python experiments/measure/recovery.py                  a run here that loses three of four ranks, in turn
    python experiments/measure/recovery.py RUN_DIR          another run that has lost nodes
    python experiments/measure/recovery.py --nodes 64       what the plan says of large jobs, nothing measured

``noticed`` is from the death of a rank to the first that another process says about it. Of a large job the
seconds to load and of the next step are computed: its state is read once, at ``--gb-per-second`` a node.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.metrics.jsonl import read_metrics
from harness.model.accounting import account
from harness.run.folder import RunFolder
from harness.tools.plan.layouts import find_layouts
from harness.tools.plan.make import make_plan

RANKS = 4
PARTS = ("ended", "decided", "ranks", "loaded", "first_step")
OVERRIDES = [
    *(
        "experiment=quickstart",
        "parallelism=fsdp",
        f"parallelism.dp_shard={RANKS}",
        "training.steps=20",
    ),
    *("checkpoint.interval=2", "validation.interval=0", "metrics.log_interval=1"),
    *("cluster.on_node_loss=continue", "cluster.min_nodes=1"),
]
LARGE = [
    *("parallelism=fsdp", "cluster=slurm_h100", "precision=bf16", "compile=on"),
    *("training.seq_len=8192", "training.global_batch_size=1024", "training.local_batch_size=1"),
    *("activation_checkpoint=full", "cluster.on_node_loss=continue"),
]
# Of a parameter in a checkpoint: float32, as are both of AdamW's moments.
BYTES = 12


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", nargs="?", type=Path)
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--gb-per-second", type=float, default=1.0)
    arguments = parser.parse_args()
    if arguments.nodes is not None:
        for model in ("llama3_8b", "llama3_70b"):
            print_planned(model, arguments.nodes, arguments.gb_per_second)
    elif arguments.run_dir is not None:
        print_recoveries(arguments.run_dir, [])
    else:
        with tempfile.TemporaryDirectory() as folder:
            print_recoveries(*lose_ranks(Path(folder)))


def print_recoveries(run_dir: Path, killed: list[float]) -> None:
    """Print a line for each attempt after a loss.

    Args:
        killed: when ranks died, if known.
    """
    attempts = sorted(run_dir.glob("attempts/*"), key=lambda path: int(path.name))
    for number, path in enumerate([*attempts, run_dir]):
        row = read(path / "result.json")
        if "recovery_seconds" not in row:
            continue
        parts = {name: row[f"recovery.{name}"] for name in PARTS}
        if killed:
            lost = read(path / "layout.json")["moments"]["lost"]
            parts = {"noticed": lost - killed[number - 1], **parts}
        said = ", ".join(f"{name} {seconds:.2f}" for name, seconds in parts.items())
        print(f"{row['world_size']} ranks: {row['recovery_seconds']:.1f} s ({said})")


def lose_ranks(folder: Path) -> tuple[Path, list[float]]:
    """Kill the last rank of each attempt after it has done some steps; return the run folder and when."""
    command = [sys.executable, "-m", "harness", "train", *OVERRIDES, f"runs_dir={folder}"]
    killed = []
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as controller:
        for attempt in range(RANKS - 1):
            run_dir = wait_for_steps(folder, attempt)
            process = last_rank(controller.pid)
            killed.append(time.time())
            os.kill(process, signal.SIGKILL)
        assert controller.wait() == 0, "the run failed"
    return run_dir, killed


def wait_for_steps(folder: Path, attempt: int) -> Path:
    """Wait until an attempt has done three steps; return the run folder."""
    while True:
        time.sleep(0.02)
        for job in folder.glob("*/[0-9a-f]*/job.json"):
            run = job.parent
            started = RunFolder(run).started
            rows = run / "metrics.jsonl"
            begun = len(list(run.glob("attempts/*"))) == attempt and rows.exists()
            if begun and started is not None:
                steps = [row["step"] for row in read_metrics(rows) if row["time"] > started]
                if len(steps) >= 3:
                    return run


def last_rank(controller: int) -> int:
    """Process id of the last rank that a controller has started."""
    children = Path(f"/proc/{controller}/task/{controller}/children").read_text().split()
    return max(map(int, children), key=rank_of)


def rank_of(process: int) -> int:
    variables = Path(f"/proc/{process}/environ").read_text().split("\0")
    return next((int(each[5:]) for each in variables if each.startswith("RANK=")), -1)


def print_planned(model: str, nodes: int, gb_per_second: float) -> None:
    """Print what the plan says of a job that has lost one of its nodes."""
    fewer = f"cluster.min_nodes={nodes - 1}"
    job = compose_job([f"model={model}", f"cluster.nodes={nodes}", *LARGE, fewer])
    [layout] = find_layouts(job)
    assert layout.job is not None
    assert layout.share is not None
    state = BYTES * account(job.model, job.training.seq_len).parameters
    load = state / (gb_per_second * 1e9 * (nodes - 1))
    print(
        f"{model}, {nodes} nodes: state {state / 1e9:.0f} GB, loaded in {load:.1f} s; a step takes "
        f"{step_seconds(job):.1f} s, on {nodes - 1} nodes {step_seconds(layout.job):.1f} s"
    )


def step_seconds(job: Job) -> float:
    speed = make_plan(job).speed
    assert speed is not None
    return speed.step_seconds


def read(path: Path) -> dict[str, Any]:
    """Content of a JSON file."""
    return dict(json.loads(path.read_text()))


if __name__ == "__main__":
    main()
