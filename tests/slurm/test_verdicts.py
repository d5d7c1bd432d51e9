"""Jobs that fail, are stopped or lose their files, all at once on one node, and the verdict on each."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
from commands import (
    ON_SLURM,
    SLOW,
    Commands,
    job_of,
    logs_of,
    misbehaving,
    read,
    restarts_of,
    step_of,
    until,
)
from scheduler import Scheduler
from tiers import THOROUGH, rest_is_thorough

from harness.util.errors import EXIT_MACHINE, EXIT_RESUMABLE, EXIT_USER

# Other tests take the other nodes down.
NODE = "cluster.exclude='node[2-4]'"
PAIR = ("parallelism=fsdp", "parallelism.dp_shard=2", "checkpoint.interval=1", "training.steps=1000")


@pytest.fixture(scope="module")
def commands(slurm: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    slurm.wait_for_up()
    return Commands(slurm, tmp_path_factory.mktemp("verdicts"))


@pytest.fixture(scope="module")
def pairs(commands: Commands) -> None:
    """Submit jobs of two ranks whose rank 1 misbehaves."""
    for name in VERDICTS if THOROUGH else list(VERDICTS)[:2]:
        typed = (f"name={name}", *PAIR, *ON_SLURM[:-1], misbehaving(name), NODE)
        commands.train(*typed, "cluster.step_timeout_seconds=4")


@pytest.fixture(scope="module")
def orphan(commands: Commands, pairs: None) -> Path:
    """Submit a job and kill its controller after sbatch has answered, before it has written the id."""
    shim = commands.home / "bin"
    shim.mkdir()
    (shim / "sbatch").write_text(
        f'#!/bin/bash\n{shutil.which("sbatch")} "$@" || exit\nkill -KILL $PPID\nsleep 60\n'
    )
    (shim / "sbatch").chmod(0o755)
    path = f"{shim}:{commands.slurm.environment['PATH']}"
    commands.train(*ORPHAN, code=-signal.SIGKILL, PATH=path)
    return commands.only_run("orphan")


ORPHAN = (
    *("name=orphan", "training.steps=100000", "cluster.max_requeues=1"),
    *(*ON_SLURM[:-1], SLOW, NODE),
)


def test_a_job_whose_controller_died_is_found_and_runs(commands: Commands, orphan: Path) -> None:
    said = commands.train(*ORPHAN)
    listed = commands.slurm.run("squeue", "--noheader", "--format=%i", "--name", f"orphan.{orphan.name}")
    [ident] = listed.split()
    assert "already submitted (" in said and f") as job {ident}, " in said
    until(lambda: step_of(orphan) > 0, "steps")


def test_the_batch_shell_passes_signals_on_until_there_are_no_requeues_left(
    commands: Commands, orphan: Path
) -> None:
    until(lambda: step_of(orphan) > 0, "steps")
    job = job_of(orphan)
    commands.slurm.run("scancel", "--batch", "--signal=USR2", job)
    until(lambda: restarts_of(orphan) == 1, "it to be started again")
    began = step_of(orphan)
    until(lambda: step_of(orphan) > began, "more steps")
    commands.slurm.run("scancel", "--full", "--signal=USR2", job)
    until(lambda: read(orphan / "status.json").get("reason"), "it to end")
    status, row = read(orphan / "status.json"), read(orphan / "result.json")
    assert (status["state"], row["exit_code"], row["saved"]) == ("interrupted", EXIT_RESUMABLE, True)
    assert status["reason"].startswith("SLURM stopped the job, and cluster.max_requeues=1"), logs_of(orphan)
    assert read(orphan / "attempts" / "1" / "result.json")["saved"]


VERDICTS = {
    "segfault": ("unknown", 1, "RankDied", "rank 1 ended with 'Segmentation fault"),
    "lags": ("collective_timeout", 0, "RuntimeError", "rank 1 did not reach the collective that rank 0"),
    "killed": ("unknown", 1, "RankDied", "rank 1 ended with 'Killed'"),
    "hangs": ("collective_timeout", 0, "RuntimeError", "rank 1 did not reach the collective that rank 0"),
}


@pytest.mark.parametrize("pair", rest_is_thorough(list(VERDICTS), *list(VERDICTS)[:2]))
def test_the_first_cause_is_the_verdict_and_no_requeue_hides_it(
    commands: Commands, orphan: Path, pairs: None, pair: str
) -> None:
    run = commands.only_run(pair)
    kind, rank, name, message = VERDICTS[pair]

    def has_message() -> bool:
        # Rank 0 writes the row first, and knows only that a peer is gone.
        return str(read(run / "result.json").get("error.message")).startswith(message)

    until(lambda: read(run / "result.json"), "a row")
    try:
        until(has_message, message, 90)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{read(run / 'result.json')}\n{logs_of(run)}") from None
    row = read(run / "result.json")
    assert (row["exit_code"], row["exit_reason"], restarts_of(run)) == (EXIT_MACHINE, "failed", 0)
    assert (row["error.kind"], row["error.rank"], row["error.type"]) == (kind, rank, name)
    error = read(run / "errors" / f"rank{rank}.json")
    assert ("Timed out waiting" in error["traceback"]) == (rank == 0)


def test_a_job_that_loses_its_files_while_it_waits(commands: Commands, orphan: Path) -> None:
    typed = ("name=robbed", *ON_SLURM, NODE, "cluster.sbatch={hold: true}")
    commands.train(*typed)
    run = commands.only_run("robbed")
    job = job_of(run)
    away = run.with_name("away")
    run.rename(away)
    said = commands.train(*typed, code=EXIT_USER)
    assert f"SLURM job {job} (PENDING) belongs to this run" in said and said.count("\n") == 1
    assert not run.exists()
    away.rename(run)
    shutil.rmtree(run / "code")
    commands.slurm.run("scontrol", "release", job)
    until(lambda: read(run / "status.json").get("state") == "failed", "it to end")
    row = read(run / "result.json")
    assert (row["exit_code"], row["error.type"]) == (EXIT_MACHINE, "WrongCode")
    assert f"the code in {run}/code/" in row["error.message"]
