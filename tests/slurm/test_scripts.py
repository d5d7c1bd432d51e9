"""Scripts that fail before the harness starts, nodes that fail their check, and verbs for single jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from commands import ENVIRONMENT, ON_SLURM, TINY, Commands, job_of, logs_of, read, until
from scheduler import Scheduler

PATCH = Path(__file__).parent / "patch"
STARVED = f"cluster.env={{{ENVIRONMENT},PYTHONPATH:'{PATCH}',TEST_PATCH:starved}}"
ONE_NODE = ("parallelism=fsdp", "parallelism.dp_shard=2", "training.steps=2")


@pytest.fixture(scope="module")
def commands(slurm: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    slurm.wait_for_up()
    return Commands(slurm, tmp_path_factory.mktemp("scripts") / "100%j")


@pytest.fixture(scope="module", autouse=True)
def submitted(commands: Commands) -> dict[str, str]:
    """Submit all jobs at once, because they mostly wait; return what was printed to stdout."""
    commands.home.mkdir()
    common = (*TINY, f"runs_dir={commands.home}", *ONE_NODE)
    arguments = {
        "moved": (
            *("cluster.node_check=exclude", "cluster.time=null", "cluster.confirm_gpu_hours=1e5"),
            *("cluster.parsable=true", *ON_SLURM[:1], *ON_SLURM[2:-1], STARVED),
        ),
        "unset": ("cluster.setup=['export A=1','cat /nonexistent','touch reached']", *ON_SLURM),
        "held": ("cluster.sbatch={hold: true}", *ON_SLURM),
        "planned": ("cluster.dry_run=true", *ON_SLURM),
    }
    started = {name: commands.start("train", *common, f"name={name}", *arguments[name]) for name in arguments}
    printed = {}
    for name, process in started.items():
        printed[name], said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    script = commands.home / "planned.sh"
    script.write_text(printed["planned"])
    # SLURM also treats a percent sign in the working folder as a pattern.
    commands.slurm.run("sbatch", f"--chdir={commands.home.parent}", str(script))
    return printed


def test_a_single_job_is_shown_and_cancelled_by_its_run_folder(commands: Commands) -> None:
    run = commands.only_run("held")
    assert f"job {job_of(run)} waits: JobHeldUser" in commands.run("sweep", "status", str(run))
    assert "cancelled 1 of 1 points" in commands.run("sweep", "cancel", str(run))
    assert "1 cancelled" in commands.run("sweep", "status", str(run))
    assert read(run / "status.json")["state"] == "interrupted"


def test_a_script_of_a_dry_run_that_is_submitted_by_hand_says_what_is_missing(commands: Commands) -> None:
    def said() -> str:
        return "".join(path.read_text() for path in commands.home.parent.glob("slurm-*.out"))

    assert "job.json is missing: submit the job with the harness, and without cluster.dry_run" in until(
        said, "SLURM's log", 120
    )


def test_a_line_of_setup_that_fails_is_named_and_the_run_has_failed(commands: Commands) -> None:
    run = commands.only_run("unset")
    until(lambda: read(run / "status.json").get("state") == "failed", "the job to fail", 120)
    [log] = run.glob("slurm/*.out")
    assert log.name == f"{job_of(run)}_0_log.out", "a percent sign in the path is not a pattern of SLURM's"
    assert "No such file or directory" in log.read_text()
    row = read(run / "result.json")
    assert re.match(
        r"cluster\.setup=cat /nonexistent: this line ended with exit code 1 on node\d", row["error.message"]
    )
    assert "1 failed" in commands.run("sweep", "status", str(run))


def test_a_node_that_fails_its_check_is_left_out_when_the_job_is_requeued(
    commands: Commands, submitted: dict[str, str]
) -> None:
    run = commands.only_run("moved")
    assert submitted["moved"] == f"{job_of(run)}\n", "only the id is on stdout"
    until(lambda: read(run / "status.json").get("state") in ("completed", "failed"), "the job to end", 120)
    assert read(run / "status.json")["state"] == "completed", logs_of(run)
    log = (run / "slurm" / f"{job_of(run)}_0_log.out").read_text()
    [node] = re.findall(r"requeueing without (node\d): \1: 0.0 GiB of", log)
    described = commands.slurm.run("scontrol", "show", "job", "--oneliner", job_of(run))
    facts = dict(word.partition("=")[::2] for word in described.split())
    assert facts["ExcNodeList"] == node
    assert facts["TimeLimit"] in ("UNLIMITED", "365-00:00:00"), "the second is what it is once it has started"
    assert f"output of rank 0 {run}/logs/rank0.out" in log
