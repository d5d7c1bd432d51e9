"""A task of a SLURM array of ``harness tokenize``."""

from __future__ import annotations

from harness.launch.shard_task import run_task
from harness.tools.tokenize.config import TokenizeJob
from harness.tools.tokenize.verb import writer_of

if __name__ == "__main__":
    run_task("harness.tools.tokenize.task", TokenizeJob, writer_of)
