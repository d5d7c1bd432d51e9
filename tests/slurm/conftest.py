"""One scheduler for all tests that need one."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Commands
from dragged import Attempt, drag_a_job
from scheduler import Scheduler, missing_programs


@pytest.fixture(scope="session")
def slurm() -> Iterator[Scheduler]:
    """A real SLURM of four virtual nodes."""
    missing = missing_programs()
    # Elsewhere these tests are skipped without SLURM; CI must have it.
    assert not missing, f"SLURM is not installed: {', '.join(missing)} missing; .ci/run installs it"
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    with Scheduler(folder) as scheduler:
        yield scheduler
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def dragged(slurm: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Future[list[Attempt]]]:
    """Run a job with a slow rank in the background of the other tests: it mostly waits."""
    slurm.wait_for_up()
    commands = Commands(slurm, tmp_path_factory.mktemp("dragged"))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(drag_a_job, commands)
