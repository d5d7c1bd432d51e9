"""One scheduler for all tests that need one."""

import shutil
import tempfile
from pathlib import Path

import pytest
from scheduler import Scheduler, missing_programs


@pytest.fixture(scope="session")
def slurm():
    """A real SLURM of four virtual nodes."""
    missing = missing_programs()
    # Elsewhere these tests are skipped without SLURM; CI must have it.
    assert not missing, f"SLURM is not installed: {', '.join(missing)} missing; .ci/run installs it"
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    with Scheduler(folder) as scheduler:
        yield scheduler
    shutil.rmtree(folder, ignore_errors=True)
