"""Jobs of the smallest model, and their runs in this process."""

from __future__ import annotations

import time
from pathlib import Path
from typing import NamedTuple

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.launch.begin import begin
from harness.run.folder import RunFolder
from harness.train.rank import run_rank

TINY = (
    "model=llama3_tiny",
    "data=synthetic",
    "tokenizer=bytes",
    "cluster.device=cpu",
    "metrics.console=none",
)


class Run(NamedTuple):
    """A run of one rank in this process."""

    code: int
    folder: RunFolder
    job: Job


def tiny(*overrides: str) -> Job:
    """Compose a job of the smallest model, on synthetic data and the CPU."""
    return compose_job([*TINY, *overrides])


def train(runs_dir: Path, *overrides: str, adopt: bool = False) -> Run:
    """Train one block of a ``tiny`` job as the command of a single rank does."""
    job = tiny("model.n_layers=1", *overrides, f"runs_dir={runs_dir}")
    folder = RunFolder(job.run_dir)
    begin(folder, job, list(overrides), adopt=adopt)
    try:
        return Run(run_rank(job, folder, started=time.monotonic()), folder, job)
    finally:
        folder.release()
