"""A job whose ranks torchrun started: they compose the same job, and rank 0 makes the run folder."""

from __future__ import annotations

import os
import sys

from harness.errors import EXIT_OK
from harness.job import Job
from harness.run_folder import RunFolder


def run_launched_rank(job: Job, folder: RunFolder, overrides: list[str]) -> int:
    """Runs this rank; rank 0 begins the folder while the others come up to the first rendezvous."""
    rank = int(os.environ["RANK"])
    if rank == 0:
        folder.begin(job, overrides)
    from harness.rank import run_rank

    code = run_rank(job, folder)
    if code != EXIT_OK:
        error = folder.first_error()
        if error is not None and error["rank"] == rank:
            shown = error["message"] if error["kind"] == "user" else error["traceback"]
            sys.stderr.write(f"error: rank {rank}: {shown}\n")
        sys.stderr.flush()
        if job.world_size > 1:
            # As in harness.rank: peers may be gone in the middle of a collective.
            os._exit(code)
    return code
