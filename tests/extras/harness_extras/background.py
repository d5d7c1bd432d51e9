"""A cluster: this machine, in a process that outlives the terminal."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from harness.compose.verb import guarded
from harness.config.cluster import ClusterKind
from harness.config.fields import label
from harness.config.job import Job
from harness.run.folder import RunFolder
from harness.util.errors import EXIT_OK


@dataclass(frozen=True)
class BackgroundOptions:
    """Fields of ``cluster.options``."""

    output: str = label("background.log", nonempty=True)
    """File in the run folder for what the run prints."""


def start(job: Job, folder: RunFolder, overrides: list[str]) -> int:
    """Describe the job in its run folder, start a process that runs it, and return."""
    folder.plan(job, overrides)
    options = BackgroundOptions(**job.cluster.options)
    with open(folder.path / options.output, "ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "harness_extras.background", str(folder.path), *overrides],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    sys.stdout.write(f"process {process.pid}\nrun folder {folder.path}\n")
    return EXIT_OK


def main(path: str, *overrides: str) -> int:
    """Run the job of a run folder in this process; return the exit code."""
    from harness.launch import local

    folder = RunFolder(Path(path))
    return local.start(folder.read_job(), folder, list(overrides))


BACKGROUND = ClusterKind("harness_extras.background:start", is_here=True, options=BackgroundOptions)

if __name__ == "__main__":
    sys.exit(guarded(lambda: main(*sys.argv[1:])))
