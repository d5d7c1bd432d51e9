"""What all tests share: one pool of ranks, and marks that skip with a reason."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

# Before torch is imported: threads of many processes waiting for each other on few cores make tests slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness.cluster.config import count_gpus
from harness.cluster.pool import RankPool

# A shell ignores interrupts for what it runs in the background, and what tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Eight gloo ranks that stay up for the whole session."""
    with RankPool(8) as ranks:
        yield ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("gpu") and not count_gpus():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none"))
        if item.get_closest_marker("thorough") and "THOROUGH" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="thorough: make thorough runs it"))
        # Where CI runs, a missing SLURM is a failure.
        if item.get_closest_marker("slurm") and shutil.which("sbatch") is None and "CI" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs SLURM, which .ci/run installs"))
    items.sort(key=lambda item: item.get_closest_marker("last") is not None)


@pytest.fixture(autouse=True)
def _no_leftovers_in_the_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of tests go to a temporary folder and never ask a hub."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")
