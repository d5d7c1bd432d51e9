"""Jobs that go on in their allocation without the nodes that crash, are taken away or freeze."""

from __future__ import annotations

import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from commands import (
    ENVIRONMENT,
    ON_SLURM,
    Commands,
    facts_of,
    job_of,
    nodes_in,
    until,
    until_done,
)
from goes_on import LOSING, PATCH, WITNESSED, check_witness
from scheduler import Scheduler


@pytest.fixture
def slurm():
    """A SLURM of its own, because its nodes are not given back."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
    with Scheduler(folder, kill_wait=5) as scheduler:
        yield scheduler
    shutil.rmtree(folder, ignore_errors=True)


def test_jobs_outlive_their_nodes(slurm, tmp_path):
    """One job loses three nodes in turn, the first in its first step, and this one comes back.

    Another job loses its first node.
    """
    (tmp_path / "patch").mkdir()
    shutil.copy(PATCH, tmp_path / "patch" / "sitecustomize.py")
    commands = Commands(slurm, tmp_path)

    def submit(name, *overrides):
        # Rank 0 holds each attempt at a step, in which the others wait for it.
        deaths = "TEST_DEATHS:'0@step1~ 0@step4~ 0@step6~'"
        env = f"{ENVIRONMENT},PYTHONPATH:'{tmp_path}/patch',WANDB_MODE:disabled,{deaths}"
        on = (*ON_SLURM[:-1], f"cluster.env={{{env}}}", "cluster.ranks_per_node=1")
        commands.train(f"name={name}", *on, "parallelism=fsdp", *WITNESSED, *LOSING, *overrides)
        return commands.only_run(name)

    def until_held(run, attempt):
        until((run / f"held-{attempt}").exists, f"attempt {attempt} of {run}")

    spare = ("cluster.spare_nodes=1", "cluster.min_nodes=1")
    run = submit("three", "parallelism.dp_shard=3", *spare)
    other = submit("first", "parallelism.dp_shard=2", "cluster.exclude='node1,node2'")
    until_held(run, 0)
    until_held(other, 0)
    slurm.kill_node("node3", job_of(run), job_of(other), number=signal.SIGSTOP)
    until_held(run, 1)
    until(lambda: facts_of(slurm, other)["Restarts"] == "1", "the other job to be requeued")
    slurm.run("scancel", job_of(other))
    slurm.thaw_node("node3")
    until(lambda: "node3" in slurm.run("sinfo", "--noheader", "--states=idle", "--Node"), "node3")
    slurm.run("scontrol", "update", "nodename=node2", "state=down", "reason=test")
    until_held(run, 2)
    assert nodes_in(slurm, facts_of(slurm, run)["NodeList"]) == ["node1", "node4"]
    slurm.kill_node("node4", job_of(run))
    until_done(run)

    assert facts_of(slurm, run)["Restarts"] == "0"
    log = (run / "slurm" / f"{job_of(run)}_0_log.out").read_text()
    assert [line.partition("; ")[2] for line in log.splitlines() if " lost: " in line] == [
        "going on from step 0 on 3 nodes: dp_shard 3",
        "going on from step 2 on 2 nodes: dp_shard 2",
        "going on from step 4 on 1 node: one rank",
    ], log
    check_witness(run)
    assert not list((run / "errors").iterdir())
