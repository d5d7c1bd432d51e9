"""Single jobs and arrays on a real SLURM: equal numerics, no effect of edits, no loss by requeues."""

import json
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cases import words
from commands import (
    COMMAND_SECONDS,
    ON_SLURM,
    TINY,
    Commands,
    job_of,
    logs_of,
    losses,
    read,
    restarts_of,
    step_of,
    until,
    until_done,
)
from plugins import install

from harness.data.corpus import open_shards
from harness.metrics.jsonl import read_rows
from harness.util.errors import EXIT_INTERRUPTED, EXIT_RESUMABLE

ROOT = Path(__file__).parents[2]


@pytest.fixture
def commands(slurm, tmp_path, moved):
    return Commands(slurm, tmp_path)


def test_two_nodes_of_two_ranks_compute_what_one_process_does(commands):
    layout = ("name=pair", "parallelism=fsdp_tp", *ON_SLURM)
    said = commands.train(*layout, "cluster.wait=true")
    run = commands.only_run("pair")
    assert f"submitted as job {job_of(run)}, 2 nodes x 2 ranks, at most 2 rank-hours" in said
    assert "pair: completed\n" in said

    commands.train("name=alone")
    alone = dict(losses(commands.only_run("alone")))
    assert dict(losses(run)) == pytest.approx(alone, rel=1e-5)
    assert read(run / "result.json")["world_size"] == 4
    assert commands.train(*layout).startswith("pair: done after 6 steps")


DECAY = """
from harness.config.optimizer import Decay
HALF = Decay(lambda progress: float(progress < 0.5))
"""


def test_edits_do_not_change_a_waiting_job_and_ranks_find_packages(slurm, tmp_path):
    checkout, packages = tmp_path / "checkout", tmp_path / "packages"
    for name in ("harness", "conf", "experiments", "sweeps"):
        shutil.copytree(ROOT / name, checkout / name, symlinks=True)
    install(packages, "half_decay", {"harness.schedule": {"half": "half_decay:HALF"}}, DECAY)
    commands = Commands(slurm, tmp_path / "runs", checkout)
    schedule = ("schedule.decay_type=half", "schedule.warmup_steps=0", "schedule.decay_ratio=1")
    hold = "cluster.sbatch={hold: true}"
    commands.train("name=held", *ON_SLURM, *schedule, hold, PYTHONPATH=str(packages))
    run = commands.only_run("held")
    dim = read(run / "job.json")["model"]["dim"]
    model = checkout / "conf" / "model" / "llama3_tiny.yaml"
    model.write_text(model.read_text().replace(f"dim: {dim}", f"dim: {2 * dim}"))
    (checkout / "harness" / "train" / "rank.py").write_text(
        "raise RuntimeError('this code was not submitted')\n"
    )
    slurm.run("scontrol", "release", job_of(run))
    until_done(run)
    row = read(run / "result.json")
    assert (row["job.model.dim"], row["step"]) == (dim, 6)
    rates = [row["lr"] for row in read_rows(run / "metrics.jsonl")[0]]
    assert rates == [rates[0]] * 3 + [0.0] * 3 and rates[0] > 0


def test_an_array_writes_the_corpus_of_one_process(slurm, tmp_path):
    lines = (json.dumps({"text": f"document {number} " * (number % 7)}) for number in range(400))
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    typed = (
        "data=local_jsonl",
        f"data.paths=[{tmp_path / 'a.jsonl'}]",
        "data.validation_fraction=0.1",
    )
    typed = (*typed, "tokenizer=bytes", "tokenize.unit_mib=0.002", "tokenize.workers=1")
    array = (*typed, "tokenize.shards=3", f"tokenize.target={tmp_path / 'array'}", *ON_SLURM)
    commands = Commands(slurm, tmp_path)
    assert "submitted as job" in commands.run("tokenize", *array)
    until((tmp_path / "array" / "manifest.json").exists, "a manifest")
    commands.run("tokenize", *typed, f"tokenize.target={tmp_path / 'one'}", "cluster.device=cpu")
    assert "is complete" in commands.run("tokenize", *array)
    for split in ("train", "validation"):
        parts = open_shards(tmp_path / "array", split)
        assert len(parts) == 3
        tokens = [token for part in parts for token in part.tokens.tolist()]
        (whole,) = open_shards(tmp_path / "one", split)
        assert tokens == whole.tokens.tolist()


LONG = tuple(
    words("""
    training.steps=160 checkpoint.interval=1000 parallelism=fsdp parallelism.dp_shard=2
    debug=deterministic
""")
)


def move_a_job(commands):
    """Tells a job to make place three times, once because its time is up; returns its run.

    Beside it runs the same one here, which is left alone.
    """
    slurm = commands.slurm
    here = (
        *TINY,
        f"runs_dir={commands.home}",
        "name=left_alone",
        *LONG,
        "cluster.threads_per_rank=1",
    )
    alone = commands.start("train", *here)
    # Use a separate node, because other tests take nodes down meanwhile.
    own_node = ("cluster.signal_seconds=25", "cluster.exclude='node[2-4]'")
    run = commands.job("moved", *LONG, *own_node, patch="slow")
    job = job_of(run)

    def after_some_steps(act):
        began, seen = step_of(run), restarts_of(run)
        until(lambda: step_of(run) > began + 2, "some steps")
        act()
        until(lambda: restarts_of(run) > seen, "the job to be started again")

    def shorten_limit():
        # SLURM checks limits every 30 s, may signal up to 30 s early, and must check before the end.
        said = re.search(r"RunTime=(\d+):(\d+):(\d+)", slurm.run("scontrol", "show", "job", job))
        assert said is not None
        hours, minutes, seconds = map(int, said.groups())
        limit = -(-(3600 * hours + 60 * minutes + seconds + 35) // 60)
        slurm.run("scontrol", "update", f"jobid={job}", f"timelimit={limit}")

    after_some_steps(lambda: slurm.run("scontrol", "requeue", job))
    after_some_steps(lambda: slurm.run("scontrol", "requeue", job))
    after_some_steps(shorten_limit)
    slurm.run("scontrol", "update", f"jobid={job}", "timelimit=30")
    until_done(run)
    _, said = alone.communicate(timeout=COMMAND_SECONDS)
    assert alone.returncode == 0, said
    return run


@pytest.fixture(scope="session")
def moved(slurm, tmp_path_factory):
    """Run that job in the background of the other tests: it mostly waits."""
    commands = Commands(slurm, tmp_path_factory.mktemp("moved"))
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(move_a_job, commands)


def test_a_job_that_is_cancelled_and_submitted_again(commands):
    layout = ("name=ended", "training.steps=100000", "metrics.log_interval=10", *ON_SLURM)
    commands.train(*layout)
    run = commands.only_run("ended")
    job = job_of(run)
    until(lambda: step_of(run) > 10, "steps")
    assert f"already submitted (running) as job {job}" in commands.train(*layout)
    commands.slurm.run("scancel", job)
    until(lambda: read(run / "status.json").get("state") == "interrupted", "it to end")
    until(
        lambda: not commands.slurm.run("squeue", "--noheader", f"--jobs={job}").strip(), "the queue"
    )
    row = read(run / "result.json")
    assert (row["exit_code"], row["error.kind"], row["saved"]) == (
        EXIT_INTERRUPTED,
        "cancelled",
        True,
    )
    assert "1 cancelled" in commands.run("runs", str(run))
    assert "submitted as job" in commands.train(*layout)
    assert job_of(run) != job
    commands.slurm.run("scancel", job_of(run))


@pytest.mark.last
def test_a_requeued_job_ends_as_if_left_alone(commands, moved):
    run = moved.result()
    alone = Commands(commands.slurm, run.parents[1]).only_run("left_alone")
    assert restarts_of(run) >= 3
    attempts = [read(path / "result.json") for path in sorted((run / "attempts").iterdir())]
    assert [row["exit_code"] for row in attempts] == [EXIT_RESUMABLE] * len(attempts), logs_of(run)
    assert all(row["saved"] for row in attempts[:3])
    assert losses(run) == losses(alone)
    assert read(run / "result.json")["loss"] == read(alone / "result.json")["loss"]
