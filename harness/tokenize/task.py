"""A task of a SLURM array of ``harness.tokenize``."""

from __future__ import annotations

from harness.shards.task import run_task
from harness.tokenize.__main__ import writer_of
from harness.tokenize.config import TokenizeJob

if __name__ == "__main__":
    run_task("harness.tokenize.task", TokenizeJob, writer_of)
