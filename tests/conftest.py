"""Shared fixtures: one pool of ranks, and marks that skip tests with a reason."""

import gc
import os
import shutil
import signal
from collections import Counter
from pathlib import Path

import pytest
from tiers import THOROUGH
from uses import uses

# Before torch is imported: with many processes on few cores, more threads make tests slow.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from harness.config.cluster import count_gpus
from harness.launch.pool import RankPool
from harness.tools.rehearse import build
from harness.util.errors import UserError

# Session fixtures that are slow to make or use all cores; slowest first.
SHARED = ("slurm", "pool")
GROUPS_SHOWN = 40

# What is imported and collected stays. Collecting garbage meanwhile, and among it later, takes long.
gc.disable()

# A shell ignores interrupts for background jobs, and processes that tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _no_rehearsals():
    """Return why rehearsals cannot run here; empty if they can."""
    try:
        build.require_build()
    except UserError as error:
        return str(error)
    return ""


NO_REHEARSALS = _no_rehearsals()


@pytest.fixture(scope="session")
def pool():
    """Eight gloo ranks that stay up for the whole session."""
    with RankPool(8) as ranks:
        yield ranks


# First, because pytest-xdist reads the groups, and -m the marks, in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        item.add_marker(pytest.mark.xdist_group(_group(item)))
        item.user_properties.append(("group", _group(item)))
        for mark in uses(item):
            item.add_marker(mark)
        if item.get_closest_marker("gpu") and not count_gpus():
            item.add_marker(pytest.mark.skip(reason="needs a GPU, and there is none"))
        if item.get_closest_marker("thorough") and not THOROUGH:
            item.add_marker(pytest.mark.skip(reason="thorough: make thorough runs it"))
        if item.get_closest_marker("rehearsal") and NO_REHEARSALS:
            item.add_marker(pytest.mark.skip(reason=NO_REHEARSALS))
        # Where CI runs, a missing SLURM is a failure.
        if (
            item.get_closest_marker("slurm")
            and shutil.which("sbatch") is None
            and "CI" not in os.environ
        ):
            item.add_marker(pytest.mark.skip(reason="needs SLURM, which .ci/run installs"))
    items.sort(key=_turn)


def pytest_collection_finish():
    gc.freeze()
    gc.enable()


@pytest.fixture(autouse=True, scope="module")
def _fewer_objects_to_search():
    """Exempt what earlier files imported from collections of garbage, which every run makes."""
    gc.collect()
    gc.freeze()


def _group(item):
    """Return the group of a test; pytest-xdist runs the tests of one group in one process.

    Tests of the pool share eight ranks, tests of SLURM one scheduler, and tests of a file its fixtures.
    """
    shared = [name for name in SHARED if name in item.fixturenames]
    return shared[0] if shared else str(item.path.relative_to(Path(__file__).parent))


def _turn(item):
    """Order groups, slowest first. Within a group, tests marked ``last`` come last.

    Tests of a GPU begin with what finds trouble first: jobs, then kernels, that compute what a CPU computes.
    Those whose values do not matter (``gpu(values=False)``) run on virtual GPUs too.
    """
    group, gpu = _group(item), item.get_closest_marker("gpu")
    turn = SHARED.index(group) if group in SHARED else len(SHARED)
    of_gpu = (
        0
        if gpu is None
        else 3
        if "values" in gpu.kwargs
        else 1
        if item.path.stem == "test_gpu"
        else 2
    )
    return turn, item.get_closest_marker("last") is not None, of_gpu


@pytest.fixture
def alone(monkeypatch):
    """Hide GPUs, and remove a launcher's variables."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    """Keep tests offline: no hub, no W&B server."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("WANDB_MODE", "offline")


def pytest_terminal_summary(terminalreporter):
    """Print the duration of the slowest groups."""
    seconds = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[dict(report.user_properties)["group"]] += report.duration
    if len(seconds) > 1:
        terminalreporter.section("seconds of each group")
        for group, taken in seconds.most_common(GROUPS_SHOWN):
            terminalreporter.write_line(f"{taken:7.1f}  {group}")
