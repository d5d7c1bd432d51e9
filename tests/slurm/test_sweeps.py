"""A sweep on a real SLURM with invalid, raising, out-of-memory and killed points, and a killed controller."""

import csv
import json
import signal
from ast import literal_eval

import optuna
import pytest
from commands import ON_SLURM, TINY, Commands, logs_of, misbehaving, read, until
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

# 10 points: jobs of one, two and four nodes, and dp_shard=9, which a batch of eight has too few rows for.
AXES = (
    "parallelism={dp_shard:1},{dp_shard:2},{dp_shard:9},{tp:2},{dp_shard:4}",
    "training.seed=1,2",
)
RAISES, STARVES, KILLED = (
    f"parallelism={{{layout}}} training.seed=2" for layout in ("dp_shard:2", "tp:2", "dp_shard:4")
)


@pytest.fixture(scope="module")
def commands(slurm, tmp_path_factory):
    slurm.wait_for_up()
    return Commands(slurm, tmp_path_factory.mktemp("sweep"))


def table(home):
    """The rows of the report's table by overrides of the axes, without skipped points."""
    table = csv.DictReader((home / "report" / "table.csv").open())
    typed = {row["overrides"]: row for row in table if row["state"] != "skipped"}
    return {
        " ".join(o for o in literal_eval(own) if o.startswith(AXIS_STARTS)): typed[own]
        for own in typed
    }


def results(home):
    """Run folders and rows by overrides of the axes."""
    rows = [json.loads(line) for line in (home / "sweep.jsonl").read_text().splitlines()]
    points = [row for row in rows if "point" in row]
    names = [
        " ".join(each for each in row["overrides"] if each.startswith(AXIS_STARTS))
        for row in points
    ]
    runs = [home / row["run_dir"] for row in points]
    return {name: (run, read(run / "result.json")) for name, run in zip(names, runs, strict=True)}


AXIS_STARTS = ("parallelism={", "training.seed=")


def start_and_kill(commands, arguments):
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


def test_a_sweep_names_its_failures_and_is_resumed(commands):
    home = commands.home / "layouts"
    arguments = (
        *("-m", *TINY, f"runs_dir={commands.home}", "name=layouts", *AXES, *ON_SLURM[:-1]),
        *(misbehaving("faults"), "cluster.ranks_per_node=1", "cluster.mem=2500M"),
        *("cluster.wait=true", "checkpoint.interval=2"),
    )
    shown = start_and_kill(commands, arguments)
    assert "10 points, 8 to run" in shown and "2 skipped" in shown
    assert "parallelism={dp_shard:9} training.seed=1: training.global_batch_size=8" in shown
    for shape in ("2 x 1 node x 1 rank", "4 x 2 nodes x 1 rank", "2 x 4 nodes x 1 rank"):
        assert shape in shown
    shown = commands.run("runs", str(home))
    assert len([line for line in shown.splitlines() if line.startswith("parallelism=")]) == 8
    assert "2 skipped" in shown.splitlines()[-1] and "planned" in shown

    # The remaining points are started by resume.
    resumed = commands.run("sweep", "resume", str(home), code=1)
    assert "3 of 8 points did not complete:\n" in resumed
    named = resumed.split("did not complete:\n")[1].splitlines()
    kinds = {line.split(": ")[0].strip(): line.split(": ")[1] for line in named[:3]}
    assert kinds == {RAISES: "bug", STARVES: "out_of_memory", KILLED: "unknown"}
    commands.run("report", str(home))
    rows = table(home)
    assert len(rows) == 8
    assert {name for name, row in rows.items() if row["state"] != "completed"} == set(kinds)
    ids = [str(read(path)["job_id"]) for path in home.glob("[0-9a-f]*/slurm/job.json")]
    assert len(ids) == len(set(ids)) == 8, "no point was submitted twice"
    # The controller may have been killed while it created the folders of the next array.
    earlier = [read(path) for path in home.glob("[0-9a-f]*/attempts/*/result.json")]
    assert all(row["exit_reason"] == "interrupted" and row["step"] == 0 for row in earlier)
    # The culprit is named, and not its victims.
    ended = results(home)
    raised, (starving, starved) = ended[RAISES][1], ended[STARVES]
    killed_run, killed = ended[KILLED]
    assert (raised["error.rank"], raised["error.message"]) == (1, "injected into rank 1")
    assert starved["error.kind"] == "out_of_memory", logs_of(starving)
    assert (killed["error.rank"], killed["error.type"]) == (3, "RankDied")
    assert "Killed" in str(killed["error.message"])
    assert all(ended[name][1]["exit_reason"] == "failed" for name in kinds)
    # Layouts of one seed have one loss.
    losses = [float(row["loss"]) for name, row in rows.items() if name.endswith("seed=1")]
    assert losses == pytest.approx([losses[0]] * 4, rel=1e-5)
    # Repeating the command resumes; points that ran out of memory are left out unless requested.
    again = commands.run("train", *arguments, code=1)
    assert "10 points, 2 to run" in again
    assert "5 completed already" in again
    assert "1 out of memory before, left out (resume --out-of-memory" in again
    assert "1 of 8 points did not complete" in again
    assert "8 points, 1 to run" in commands.run("sweep", "resume", str(home), "--out-of-memory")
    commands.run("report", str(home))
    assert {row["state"] for row in table(home).values()} == {"completed"}
    assert read(killed_run / "result.json")["start_step"] == 2, "it resumed from its checkpoint"
    assert "8 points, 0 to run" in commands.run("sweep", "resume", str(home))


def test_a_sweep_that_is_cancelled(commands):
    home = str(commands.home / "held")
    sweep = (
        "-m",
        *TINY,
        f"runs_dir={commands.home}",
        "name=held",
        "training.seed=1,2,3",
        *ON_SLURM,
    )
    for submitted in ("3 to run", "0 to run"):  # a sweep that is started twice is submitted once
        assert submitted in commands.run("train", *sweep, "cluster.sbatch={hold: true}")
    assert "3 pending" in commands.run("runs", home)
    assert "cancelled 3 of 3" in commands.run("sweep", "cancel", home)
    until(lambda: "\n3 cancelled" in commands.run("runs", home), "the jobs to be gone")


def test_batches_are_arrays_whose_values_are_waited_for(commands):
    """Three points at once: jobs of one and of two nodes, and one that is not valid."""
    # With this seed the three trials are of 2, 1 and 9 ranks.
    sweeper = ("sweep=optuna", "sweep.sampler=random", "sweep.seed=1")
    sweeper = (*sweeper, "sweep.n_trials=3", "sweep.n_jobs=3")
    typed = (
        "-m",
        *sweeper,
        *TINY,
        "parallelism.dp_shard=1,2,9",
        "cluster.ranks_per_node=1",
        *ON_SLURM,
    )
    shown = commands.run("train", *typed, f"runs_dir={commands.home}", "name=study")
    assert shown.count("submitted ") == 2 and "1 x 2 nodes x 1 rank" in shown
    assert "2 completed, 1 skipped\nbest (minimize loss): " in shown
    journal = JournalStorage(JournalFileBackend(f"{commands.home}/study/study.journal"))
    trials = optuna.load_study(study_name="study", storage=journal).trials
    states = {trial.params["parallelism.dp_shard"]: trial.state for trial in trials}
    assert states == {1: TrialState.COMPLETE, 2: TrialState.COMPLETE, 9: TrialState.FAIL}
    rows = [read(path) for path in (commands.home / "study").glob("[0-9a-f]*/result.json")]
    assert sorted(row["loss"] for row in rows) == sorted(
        t.value for t in trials if t.value is not None
    )
