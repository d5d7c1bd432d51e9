"""Rehearsed memory of published jobs, kept beside the published rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from harness.compose.composer import compose_job
from harness.tools.plan.config import PlanJob
from harness.tools.plan.verb import plan
from harness.util.encoding import read_object
from harness.util.errors import UserError
from harness.util.files import write_atomically
from harness.util.tables import GIB

FILE = "rehearsed.json"
RESERVED = "memory_gib"


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the rehearsals of a folder by the job's id.

    Each has ``memory_gib`` (reserved by torch's allocator), ``rank`` (the one with the most) and ``torch``.

    Raises:
        UserError: the file cannot be read.
    """
    path = folder / FILE
    return read_object(path) if path.is_file() else {}


def rehearse_missing(folder: Path, jobs: Sequence[tuple[str, list[str], str]]) -> None:
    """Rehearse the jobs that the file does not have, and add each when it is done.

    Args:
        folder: folder of the experiment.
        jobs: for each its id, its overrides, and the accelerator of its published row.

    Raises:
        UserError: this machine has a GPU, or has no build of torch for CUDA; a rehearsal failed.
    """
    found = read(folder)
    for job_id, overrides, accelerator in jobs:
        if job_id in found:
            continue
        hardware = ["cluster=slurm_h100", f"cluster.accelerator={accelerator}", "checkpoint.enable=false"]
        typed = [*overrides, *hardware, "rehearse=true"]
        ranks = plan(compose_job(typed, config_name="plan", schema=PlanJob), typed).data["rehearsed"]
        for rank in ranks:
            if rank["failure"] is not None:
                what = f"{rank['failure']['kind']}: {rank['failure']['message']}"
                raise UserError(f"{' '.join(overrides)}: rank {rank['rank']} could not be rehearsed: {what}")
        most = max(ranks, key=lambda rank: rank["memory"]["reserved"])
        found[job_id] = {
            RESERVED: round(most["memory"]["reserved"] / GIB, 2),
            "rank": most["rank"],
            "torch": version("torch"),
        }
        write_atomically(folder / FILE, f"{json.dumps(found, indent=1, sort_keys=True)}\n".encode())
        sys.stderr.write(f"rehearsed {' '.join(overrides)}: {found[job_id][RESERVED]:.1f} GiB\n")
