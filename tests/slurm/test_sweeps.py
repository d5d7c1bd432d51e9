"""A sweep on a real SLURM with invalid, raising, out-of-memory and killed points, and a killed controller."""

from __future__ import annotations

import csv
import json
import signal
from pathlib import Path

import optuna
import pytest
from commands import FAULTS, ON_SLURM, TINY, Commands, logs_of, read, until
from optuna.trial import TrialState
from scheduler import Scheduler

# 10 points: jobs of one, two and four nodes, and dp_shard=3, which does not divide a batch of eight.
AXES = (
    "parallelism={dp_shard:1},{dp_shard:2},{dp_shard:3},{tp:2},{dp_shard:4}",
    "training.seed=1,2",
)
NAMES = {
    "raises": "parallelism={dp_shard:2} training.seed=2",
    "starves": "parallelism={tp:2} training.seed=2",
    "is killed": "parallelism={dp_shard:4} training.seed=2",
}


@pytest.fixture(scope="module")
def commands(slurm: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    slurm.wait_for_up()
    return Commands(slurm, tmp_path_factory.mktemp("sweep"))


@pytest.fixture(scope="module")
def arguments(commands: Commands) -> tuple[str, ...]:
    # W&B is off in the ranks; the table is logged offline.
    return (
        *("-m", *TINY, f"runs_dir={commands.home}", "name=layouts", *AXES, *ON_SLURM[:-1]),
        *(FAULTS, "cluster.ranks_per_node=1", "cluster.mem=2500M"),
        *("cluster.wait=true", "metrics.wandb=true", "checkpoint.interval=2"),
    )


def table(commands: Commands) -> dict[str, dict[str, str]]:
    """The rows of table.csv by point."""
    with (commands.home / "layouts" / "table.csv").open() as file:
        return {row["point"]: row for row in csv.DictReader(file)}


def submitted(commands: Commands) -> list[str]:
    """Return all SLURM jobs that were submitted for the sweep's points."""
    job_records = (commands.home / "layouts").glob("*/slurm/job.json")
    return sorted(str(read(path)["job_id"]) for path in job_records)


@pytest.fixture(scope="module")
def interrupted(commands: Commands, arguments: tuple[str, ...]) -> str:
    """Start the sweep, and kill its controller as soon as one array of three is submitted."""
    controller = commands.start("train", *arguments)
    assert controller.stderr is not None
    shown = ""
    while "submitted " not in shown:
        line = controller.stderr.readline()
        assert line, shown
        shown += line
    controller.send_signal(signal.SIGKILL)
    controller.communicate()
    return shown


def test_the_plan_is_shown_first(interrupted: str) -> None:
    assert "10 points, 8 to run" in interrupted
    assert "2 skipped" in interrupted
    assert "parallelism={dp_shard:3} training.seed=1: training.global_batch_size=8" in interrupted
    for shape in ("2 x 1 node x 1 rank", "4 x 2 nodes x 1 rank", "2 x 4 nodes x 1 rank"):
        assert shape in interrupted


def test_status_of_a_sweep_whose_controller_is_gone(commands: Commands, interrupted: str) -> None:
    shown = commands.run("sweep", "status", str(commands.home / "layouts"))
    assert len([line for line in shown.splitlines() if line.startswith("parallelism=")]) == 8
    assert "2 skipped" in shown.splitlines()[-1]
    assert "planned" in shown


@pytest.fixture(scope="module")
def resumed(commands: Commands, interrupted: str) -> str:
    """Start the remaining points by ``resume``, and wait for all."""
    return commands.run("sweep", "resume", str(commands.home / "layouts"), code=1)


def test_every_failure_is_named_with_its_class_and_all_others_complete(
    commands: Commands, resumed: str
) -> None:
    named = resumed.split("3 of 8 points did not complete:\n")[1].splitlines()
    named_points = {line.split(": ")[0].strip(): line.split(": ")[1] for line in named[:3]}
    assert named_points == {
        NAMES["raises"]: "bug",
        NAMES["starves"]: "out_of_memory",
        NAMES["is killed"]: "unknown",
    }
    commands.run("sweep", "collect", str(commands.home / "layouts"))
    rows = table(commands)
    assert len(rows) == 8
    states = {name: row["state"] for name, row in rows.items()}
    assert {name for name, state in states.items() if state != "completed"} == set(NAMES.values())
    # No point was submitted twice.
    assert len(submitted(commands)) == 8
    # The controller may have been killed while it created the folders of the next array.
    rows = [read(path) for path in (commands.home / "layouts").glob("*/attempts/*/result.json")]
    assert all(row["exit_reason"] == "interrupted" and row["step"] == 0 for row in rows)


def test_the_culprit_is_named_and_not_its_victims(commands: Commands, resumed: str) -> None:
    runs = {name: read(run_of(commands, name) / "result.json") for name in NAMES.values()}
    raised, starved, killed = (runs[NAMES[what]] for what in ("raises", "starves", "is killed"))
    assert (raised["error.rank"], raised["error.message"]) == (1, "injected into rank 1")
    assert starved["error.kind"] == "out_of_memory", logs_of(run_of(commands, NAMES["starves"]))
    assert (killed["error.rank"], killed["error.type"]) == (3, "RankDied")
    assert "Killed" in killed["error.message"]
    assert all(row["exit_code"] != 0 and row["exit_reason"] == "failed" for row in runs.values())


def test_layouts_of_one_seed_have_one_loss(commands: Commands, resumed: str) -> None:
    rows = [row for name, row in table(commands).items() if name.endswith("seed=1")]
    assert len(rows) == 4
    first = float(rows[0]["loss"])
    assert [float(row["loss"]) for row in rows] == pytest.approx([first] * 4, rel=1e-5)


def test_collect_makes_a_table_and_a_plot(commands: Commands, resumed: str) -> None:
    home = commands.home / "layouts"
    page = (home / "table.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| parallelism={tp:2} seed=2 |")]
    assert any("failed" in row for row in rows)
    assert "\n| parallelism={dp_shard:3} seed=2 | training.global" in page.split("Not possible")[1]
    assert (home / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_runs_and_the_table_share_a_group(commands: Commands, resumed: str) -> None:
    job = read(run_of(commands, NAMES["raises"]) / "job.json")
    assert job["metrics"]["wandb_group"] == "layouts"
    assert list((commands.home / "layouts" / "wandb").glob("offline-run-*"))


def test_resuming_completes_what_can_be(commands: Commands, arguments: tuple[str, ...], resumed: str) -> None:
    # Repeating the command resumes; points that ran out of memory are left out unless requested.
    again = commands.run("train", *arguments, code=1)
    assert "10 points, 2 to run" in again
    assert "5 completed already" in again
    assert "1 out of memory before, left out (resume --out-of-memory" in again
    assert "1 of 8 points did not complete" in again
    last = commands.run("sweep", "resume", str(commands.home / "layouts"), "--out-of-memory")
    assert "8 points, 1 to run" in last
    assert {row["state"] for row in states(commands)} == {"completed"}
    # They resumed from their checkpoints.
    assert read(run_of(commands, NAMES["is killed"]) / "result.json")["start_step"] == 2
    nothing = commands.run("sweep", "resume", str(commands.home / "layouts"))
    assert "8 points, 0 to run" in nothing


def test_a_sweep_that_is_cancelled(commands: Commands) -> None:
    held = (*ON_SLURM, "cluster.sbatch={hold: true}")
    sweep = ("-m", *TINY, f"runs_dir={commands.home}", "name=held", "training.seed=1,2,3")
    commands.run("train", *sweep, *held)
    before = job_records(commands, "held")
    # A sweep that is started twice is submitted once.
    assert "0 to run" in commands.run("train", *sweep, *held)
    assert job_records(commands, "held") == before
    assert "3 pending" in commands.run("sweep", "status", str(commands.home / "held"))
    assert "cancelled 3 of 3" in commands.run("sweep", "cancel", str(commands.home / "held"))
    shown = until(
        lambda: (
            "3 cancelled" in (text := commands.run("sweep", "status", str(commands.home / "held"))) and text
        ),
        "the cancelled jobs to be gone",
        60,
    )
    assert "failed" not in shown


def test_batches_are_arrays_whose_values_are_waited_for(commands: Commands) -> None:
    """Three points at once: jobs of one and of two nodes, and one that is not valid."""
    # With this seed the three trials are of 2, 1 and 3 ranks.
    sweeper = ("sweep=optuna", "sweep.sampler=random", "sweep.seed=1")
    sweeper = (*sweeper, "sweep.n_trials=3", "sweep.n_jobs=3")
    typed = ("-m", *sweeper, *TINY, "parallelism.dp_shard=1,2,3", "cluster.ranks_per_node=1", *ON_SLURM)
    shown = commands.run("train", *typed, f"runs_dir={commands.home}", "name=study")
    assert shown.count("submitted ") == 2 and "1 x 2 nodes x 1 rank" in shown
    assert "2 completed, 1 skipped\nbest (minimize loss): " in shown
    storage = f"sqlite:///{commands.home}/study/study.db"
    trials = optuna.load_study(study_name="study", storage=storage).trials
    states = {trial.params["parallelism.dp_shard"]: trial.state for trial in trials}
    assert states == {1: TrialState.COMPLETE, 2: TrialState.COMPLETE, 3: TrialState.FAIL}
    rows = [read(path) for path in (commands.home / "study").glob("*/result.json")]
    assert sorted(row["loss"] for row in rows) == sorted(t.value for t in trials if t.value is not None)


def job_records(commands: Commands, name: str) -> list[dict[str, object]]:
    return [read(path) for path in sorted((commands.home / name).glob("*/slurm/job.json"))]


def states(commands: Commands) -> list[dict[str, str]]:
    commands.run("sweep", "collect", str(commands.home / "layouts"))
    return list(table(commands).values())


def run_of(commands: Commands, name: str) -> Path:
    """The run folder of a point."""
    rows = [json.loads(line) for line in (commands.home / "layouts" / "sweep.jsonl").read_text().splitlines()]
    wanted = name.split(" ")
    found = [row for row in rows if "point" in row and all(part in row["overrides"] for part in wanted)]
    assert len(found) == 1, (name, found)
    return commands.home / "layouts" / found[0]["run_dir"]
