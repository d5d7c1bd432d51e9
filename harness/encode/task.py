"""A task of a SLURM array of ``harness.encode``."""

from __future__ import annotations

from harness.encode.config import EncodeJob
from harness.encode.rank import writer_of
from harness.shards.task import run_task

if __name__ == "__main__":
    run_task("harness.encode.task", EncodeJob, writer_of)
