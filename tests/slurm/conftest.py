"""One scheduler for all tests that need one, and a job that runs beside them."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import Attempt, Commands, facts_of, job_of, nodes_in, read, restarts_of, until
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


def drag_a_job(commands: Commands) -> list[Attempt]:
    """Requeue the job when its second rank was found slow: first it does so itself, as before its time limit,
    then SLURM does."""
    run = commands.job(
        "dragged",
        *("training.steps=100000", "metrics.log_interval=100", "metrics.warmup_steps=0"),
        *("parallelism=fsdp", "parallelism.dp_shard=2", "cluster.ranks_per_node=1"),
        *("checkpoint.interval=10000", "profiling.phases=true", "cluster.exclude_slow=true"),
        patch="drags",
    )

    def nodes(field: str) -> set[str]:
        return set(nodes_in(commands.slurm, facts_of(commands.slurm, run)[field]))

    attempts = []
    ends = (("scancel", "--batch", "--signal=USR2"), ("scontrol", "requeue"), ("scancel",))
    for number, end in enumerate(ends):
        until(lambda number=number: restarts_of(run) == number, f"start {number + 1}")  # type: ignore[misc]
        [slow] = until(lambda: read(run / "slow_ranks.json").get("slow"), "a slow rank")
        status = commands.run("sweep", "status", str(run))
        attempts.append(Attempt(nodes("NodeList"), nodes("ExcNodeList"), slow["host"], status))
        commands.slurm.run(*end, job_of(run))
    return attempts
