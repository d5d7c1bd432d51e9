"""Jobs that fail, are stopped or lose their controller, all at once on one node, and the verdict on each."""

import shutil
import signal

import pytest
from commands import ON_SLURM, SLOW, Commands, job_of, logs_of, read, restarts_of, step_of, until

from harness.util.errors import EXIT_MACHINE, EXIT_RESUMABLE

# Other tests take the other nodes down.
NODE = "cluster.exclude='node[2-4]'"
VERDICTS = {
    "segfault": ("unknown", 1, "RankDied", "rank 1 ended with 'Segmentation fault"),
    "lags": (
        "collective_timeout",
        0,
        "RuntimeError",
        "rank 1 did not reach the collective that rank 0",
    ),
}


@pytest.fixture(scope="module")
def commands(slurm, tmp_path_factory):
    """Submits jobs of two ranks whose rank 1 misbehaves."""
    slurm.wait_for_up()
    commands = Commands(slurm, tmp_path_factory.mktemp("verdicts"))
    pair = (
        "parallelism=fsdp",
        "parallelism.dp_shard=2",
        "checkpoint.interval=1",
        "training.steps=1000",
    )
    for name in VERDICTS:
        commands.job(name, *pair, NODE, "cluster.step_timeout_seconds=4", patch=name)
    return commands


def test_a_job_whose_controller_died_is_found_and_requeued_once(commands):
    """The controller is killed after sbatch has answered, before it has written the id."""
    sbatch = commands.home / "bin" / "sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text(
        f'#!/bin/bash\n{shutil.which("sbatch")} "$@" || exit\nkill -KILL $PPID\nsleep 60\n'
    )
    sbatch.chmod(0o755)
    path = f"{sbatch.parent}:{commands.slurm.environment['PATH']}"
    typed = (
        "name=orphan",
        "training.steps=100000",
        "cluster.max_requeues=1",
        *ON_SLURM[:-1],
        SLOW,
        NODE,
    )
    commands.train(*typed, code=-signal.SIGKILL, PATH=path)
    orphan = commands.only_run("orphan")
    said = commands.train(*typed)
    listed = commands.slurm.run(
        "squeue", "--noheader", "--format=%i", "--name", f"orphan.{orphan.name}"
    )
    [job] = listed.split()
    assert "already submitted (" in said and f") as job {job}, " in said
    until(lambda: step_of(orphan) > 0, "steps")
    assert job_of(orphan) == job
    commands.slurm.run("scancel", "--batch", "--signal=TERM", job)
    until(lambda: restarts_of(orphan) == 1, "it to be started again")
    began = step_of(orphan)
    until(lambda: step_of(orphan) > began, "more steps")
    commands.slurm.run("scancel", "--full", "--signal=TERM", job)
    until(lambda: read(orphan / "status.json").get("reason"), "it to end")
    status, row = read(orphan / "status.json"), read(orphan / "result.json")
    # srun gets the signal too, and ends the ranks before they have saved.
    assert (status["state"], row["exit_code"]) == ("interrupted", EXIT_RESUMABLE)
    assert status["reason"].startswith(
        "SLURM stopped the job, or its time limit was reached, and cluster.max_requeues=1"
    ), logs_of(orphan)
    assert read(orphan / "attempts" / "1" / "result.json")["saved"]


@pytest.mark.parametrize("pair", VERDICTS)
def test_the_first_cause_is_the_verdict_and_no_requeue_hides_it(commands, pair):
    run = commands.only_run(pair)
    kind, rank, name, message = VERDICTS[pair]

    def has_message():
        # Rank 0 writes the row first, and knows only that a peer is gone.
        return str(read(run / "result.json").get("error.message")).startswith(message)

    try:
        until(has_message, message)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read(run / 'result.json')}\n{logs_of(run)}") from None
    row = read(run / "result.json")
    assert (row["exit_code"], row["exit_reason"], restarts_of(run)) == (EXIT_MACHINE, "failed", 0)
    assert (row["error.kind"], row["error.rank"], row["error.type"]) == (kind, rank, name)
    error = read(run / "errors" / f"rank{rank}.json")
    assert ("Timed out waiting" in error["traceback"]) == (rank == 0)
