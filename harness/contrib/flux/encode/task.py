"""One task of the SLURM array that ``harness encode`` submits."""

from harness.contrib.flux.encode.verb import EncodeJob
from harness.contrib.flux.encode.writer import LatentWriter
from harness.launch.shards import run_task

if __name__ == "__main__":
    run_task("harness.contrib.flux.encode.task", EncodeJob, LatentWriter)
