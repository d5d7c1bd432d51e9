"""A study of Optuna whose controller is killed: the same command takes up the run it was in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import optuna
from launching import PATIENCE, Launch, until
from optuna.trial import TrialState

from harness.util.errors import EXIT_OK


def test_a_killed_study_resumes_its_run(launch: Callable[..., Launch], tmp_path: Path) -> None:
    sweeper = ("sweep=optuna", "sweep.n_trials=2", "sweep.n_jobs=1")
    typed = ("-m", *sweeper, "optimizer.lr=interval(1e-4,1e-2)", "name=cut", "metrics.console=none")
    typed = (*typed, "training.steps=30", "checkpoint.interval=5")

    def saved() -> list[Path]:
        return list(tmp_path.glob("runs/cut/*/checkpoints/step-*/manifest.json"))

    first = launch(*typed)
    until(lambda: len({path.parents[2] for path in saved()}) == 2, PATIENCE)
    first.process.kill()
    until(lambda: not first.ranks(), PATIENCE)
    [run] = [path.parent for path in tmp_path.glob("runs/cut/*/result.json") if _reason(path) == "completed"]
    done = (run / "result.json").stat().st_mtime_ns
    steps = {path.parents[2].name: int(path.parent.name.removeprefix("step-")) for path in sorted(saved())}

    second = launch(*typed)
    assert second.finish() == EXIT_OK, second.err
    assert "runs/cut: minimize loss by optuna, 1 of 2 trials left\n" in second.err
    rows = {
        path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/cut/*/result.json")
    }
    assert [row["exit_reason"] for row in rows.values()] == ["completed"] * 2
    assert (run / "result.json").stat().st_mtime_ns == done, "it was not run again"
    [taken_up] = set(steps) - {run.name}
    assert rows[taken_up]["start_step"] >= steps[taken_up] > 0
    trials = optuna.load_study(study_name="cut", storage=f"sqlite:///{tmp_path}/runs/cut/study.db").trials
    stored = sorted(trial.value for trial in trials if trial.state == TrialState.COMPLETE)
    assert stored == sorted(row["loss"] for row in rows.values())
    assert second.out.splitlines()[-2].startswith("best (minimize loss): optimizer.lr=")


def _reason(path: Path) -> str:
    return str(json.loads(path.read_text())["exit_reason"])
