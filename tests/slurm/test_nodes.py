"""A job that loses its nodes, to the administrator and to a crash, and one that leaves an unfit node."""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from commands import (
    ON_SLURM,
    Commands,
    facts_of,
    job_of,
    misbehaving,
    nodes_in,
    read,
    restarts_of,
    step_of,
    until,
    until_done,
)

STEPS = 200


@pytest.fixture(scope="session")
def run(slurm, tmp_path_factory):
    """A job of two nodes, after its first checkpoint."""
    slurm.wait_for_up()
    run = Commands(slurm, tmp_path_factory.mktemp("nodes")).job(
        "nodes",
        *(f"training.steps={STEPS}", "checkpoint.interval=10", "metrics.log_interval=2"),
        *("parallelism=fsdp", "parallelism.dp_shard=2", "cluster.ranks_per_node=1"),
        "cluster.exclude=node1",  # where another test's job is
        patch="slow",
    )
    assert "#SBATCH --nodes=2" in (run / "slurm" / "job.sh").read_text()
    until(lambda: any(run.glob("checkpoints/step-*/manifest.json")), "a checkpoint")
    return run


@pytest.fixture(scope="session")
def survivor(slurm, run):
    """Take the job's nodes away in the background of other tests, as this mostly waits."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(take_nodes_away, slurm, run)


def take_nodes_away(slurm, run):
    def until_requeued(times):
        until(lambda: facts_of(slurm, run)["Restarts"] == str(times), "the job to be requeued")

    def until_started(times):
        until(lambda: restarts_of(run) == times, "it to be started again")

    def last_node():
        return nodes_in(slurm, facts_of(slurm, run)["NodeList"])[-1]

    down = last_node()
    slurm.run("scontrol", "update", f"nodename={down}", "state=down", "reason=test")
    until_requeued(1)
    until_started(1)
    began = until(lambda: step_of(run), "steps")
    until(lambda: step_of(run) > began, "more steps")
    dead = last_node()
    assert dead != down
    slurm.kill_node(dead, job_of(run))
    until(lambda: read(run / "status.json").get("state") == "failed", "rank 0 to lose its peer")
    until_requeued(2)
    # Too few nodes are left for it to start again.
    until(lambda: facts_of(slurm, run)["JobState"] == "PENDING", "its processes to end")
    shown = Commands(slurm, run.parents[1]).run("runs", str(run))
    assert f"requeued by SLURM, after node: {dead} failed" in shown and shown.endswith(
        "\n1 pending\n"
    ), shown
    slurm.start_node(dead)
    slurm.run("scontrol", "update", f"nodename={down}", "state=resume")
    until_started(2)
    until_done(run)


def test_a_requeue_leaves_out_an_unfit_node(slurm, survivor, tmp_path):
    commands = Commands(slurm, tmp_path / "100%j")  # which is no pattern of SLURM's
    commands.home.mkdir()
    printed = commands.train(
        *("name=unfit", "parallelism=fsdp", "parallelism.dp_shard=2", "training.steps=2"),
        *("cluster.node_check=exclude", "cluster.time=null", "cluster.confirm_gpu_hours=1e5"),
        *("cluster.parsable=true", ON_SLURM[0], *ON_SLURM[2:-1], misbehaving("starved")),
    )
    run = commands.only_run("unfit")
    assert printed.endswith(f"\n{job_of(run)}\n")
    until_done(run)
    log = (run / "slurm" / f"{job_of(run)}_0_log.out").read_text()
    [node] = re.findall(r"requeueing without (node\d): \1: 0.0 GiB of", log)
    facts = facts_of(slurm, run)
    assert facts["ExcNodeList"] == node
    assert facts["TimeLimit"] in ("UNLIMITED", "365-00:00:00"), (
        "the second is what it is once it has started"
    )
    assert f"output of rank 0 {run}/logs/rank0.out" in log


@pytest.mark.last
def test_a_job_outlives_two_nodes(run, survivor):
    survivor.result()
    row = read(run / "result.json")
    assert row["step"] == STEPS and row["exit_code"] == 0
    assert row["start_step"] > 0, "it went on from a checkpoint"
    assert len(list((run / "attempts").iterdir())) == 2


@pytest.mark.last
def test_the_doctor_looks_at_a_node(slurm, survivor, tmp_path):
    survivor.result()  # the nodes that it took away are back
    node = [*ON_SLURM, "cluster.ranks_per_node=1", "cluster.setup=[echo loaded]"]
    said = Commands(slurm, tmp_path).run("doctor", *node)
    found = {line.split()[0]: line for line in said.splitlines()}
    assert re.search(r"node\d: \d+ cores", found["machine"]), said
