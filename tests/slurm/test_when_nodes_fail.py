"""A job that loses one node to the administrator and another to a crash, and one that leaves slow nodes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from commands import ON_SLURM, SLOW, Attempt, Commands, job_of, read, step_of, until, until_done
from scheduler import Scheduler

STEPS = 200


@pytest.fixture(scope="session")
def run(slurm: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A job of two nodes, after its first checkpoint."""
    slurm.wait_for_up()
    commands = Commands(slurm, tmp_path_factory.mktemp("nodes"))
    commands.train(
        *("name=nodes", f"training.steps={STEPS}", "checkpoint.interval=10", "metrics.log_interval=2"),
        *("parallelism=fsdp", "parallelism.dp_shard=2", *ON_SLURM[:-1], SLOW, "cluster.ranks_per_node=1"),
        "cluster.exclude=node1",  # where another test's job is
    )
    run = commands.only_run("nodes")
    until(lambda: any(run.glob("checkpoints/step-*/manifest.json")), "a checkpoint")
    return run


@pytest.fixture(scope="session")
def survivor(slurm: Scheduler, run: Path) -> Iterator[Future[None]]:
    """Take the job's nodes away in the background of other tests, as this mostly waits."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(take_nodes_away, slurm, run)


def take_nodes_away(slurm: Scheduler, run: Path) -> None:
    job = job_of(run)

    def say(what: str) -> str:
        said = slurm.run("scontrol", "show", "job", "--oneliner", job).split()
        return dict(part.split("=", 1) for part in said if "=" in part).get(what, "")

    def last_node() -> str:
        return slurm.run("scontrol", "show", "hostnames", say("NodeList")).split()[-1]

    down = last_node()
    slurm.run("scontrol", "update", f"nodename={down}", "state=down", "reason=test")
    until(lambda: say("Restarts") == "1", "the job to be requeued")
    until(lambda: read(run / "slurm" / "job.json").get("restarts") == 1, "its second start")
    began = until(lambda: step_of(run), "steps")
    until(lambda: step_of(run) > began, "more steps")
    dead = last_node()
    assert dead != down
    slurm.kill_node(dead)
    until(lambda: say("Restarts") == "2", "the job to be requeued")
    slurm.start_node(dead)
    slurm.run("scontrol", "update", f"nodename={down}", "state=resume")
    until_done(run)


def test_the_job_takes_two_nodes(slurm: Scheduler, run: Path, survivor: Future[None]) -> None:
    assert read(run / "job.json")["parallelism"]["dp_shard"] == 2
    assert "#SBATCH --nodes=2" in (run / "slurm" / "job.sh").read_text()


@pytest.mark.last
def test_a_job_outlives_a_node_that_is_taken_down_and_one_that_dies(
    run: Path, survivor: Future[None]
) -> None:
    survivor.result()
    row = read(run / "result.json")
    assert row["step"] == STEPS and row["exit_code"] == 0
    assert row["start_step"] > 0, "it went on from a checkpoint"
    assert len(list((run / "attempts").iterdir())) == 2


def test_a_requeued_job_leaves_the_node_of_its_slow_rank(dragged: Future[list[Attempt]]) -> None:
    first, second, third = dragged.result()
    assert first.excluded == set()
    assert second.excluded == {first.slow}
    assert third.excluded == {first.slow, second.slow}
    assert all(len(each.nodes) == 2 and not each.nodes & each.excluded for each in (first, second, third))
    assert all(f"slow: rank 1 ({each.slow}, " in each.status for each in (first, second, third))
