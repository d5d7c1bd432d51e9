"""A study of Optuna on a real SLURM: batches are arrays of jobs, whose values the command waits for."""

from __future__ import annotations

from pathlib import Path

import optuna
import pytest
from commands import ON_SLURM, TINY, Commands, read
from optuna.trial import TrialState
from scheduler import Scheduler


@pytest.fixture(scope="module")
def commands(slurm: Scheduler, tmp_path_factory: pytest.TempPathFactory) -> Commands:
    slurm.wait_for_up()
    return Commands(slurm, tmp_path_factory.mktemp("study"))


def test_batches_are_arrays_whose_values_are_waited_for(commands: Commands) -> None:
    """Three points at once: jobs of one and of two nodes, and one that is not valid."""
    # With this seed the three trials are of 2, 1 and 3 ranks.
    sweeper = ("sweep=optuna", "sweep.sampler=random", "sweep.seed=1")
    sweeper = (*sweeper, "sweep.n_trials=3", "sweep.n_jobs=3")
    typed = ("-m", *sweeper, *TINY, "parallelism.dp_shard=1,2,3", "cluster.ranks_per_node=1", *ON_SLURM)
    shown = commands.run("train", *typed, f"runs_dir={commands.home}", "name=s")
    assert shown.count("submitted ") == 2 and "1 x 2 nodes x 1 rank" in shown
    assert "2 completed, 1 skipped\nbest (minimize loss): " in shown
    storage = f"sqlite:///{commands.home}/s/study.db"
    trials = optuna.load_study(study_name="s", storage=storage).trials
    states = {trial.params["parallelism.dp_shard"]: trial.state for trial in trials}
    assert states == {1: TrialState.COMPLETE, 2: TrialState.COMPLETE, 3: TrialState.FAIL}
    rows = [read(path) for path in Path(commands.home, "s").glob("*/result.json")]
    assert sorted(row["loss"] for row in rows) == sorted(t.value for t in trials if t.value is not None)
