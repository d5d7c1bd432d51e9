"""One task of the SLURM array that ``harness encode`` submits."""

from harness.launch.shards import run_task
from harness_flux.encode.verb import EncodeJob
from harness_flux.encode.writer import LatentWriter

if __name__ == "__main__":
    run_task("harness_flux.encode.task", EncodeJob, LatentWriter)
