"""Sweeps on this machine: points run in turn, failures are named, a killed controller can be resumed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import PATIENCE, Launch, until

from harness.util.errors import EXIT_OK, EXIT_USER

Start = Callable[..., Launch]


def sweep(folder: Path, *arguments: str, code: int = EXIT_OK) -> str:
    """Return the output of ``harness sweep``, stderr first."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", "sweep", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert done.returncode == code, done.stderr
    return done.stderr + done.stdout


def test_a_sweep_goes_on_after_failures_and_names_them(launch: Start, tmp_path: Path) -> None:
    """Two points that are not valid jobs, one without data, and one that completes."""
    (tmp_path / "there.txt").write_text("All the world is text. " * 200)
    typed = ("-m", "parallelism.dp_shard=1,3", "data=local_text", "data.paths=[there.txt],[gone.txt]")
    typed = (*typed, "data.cache_dir=cache", "name=swept", "training.steps=4", "metrics.wandb=true")
    job = launch(*typed, environment={"WANDB_MODE": "offline"})
    assert job.finish() == 1
    assert job.err.startswith("runs/swept: 4 points, 2 to run\n")
    rule = "parallelism.dp_shard=3 data.paths=[there.txt]: training.global_batch_size=4: must be a multiple"
    assert rule in job.err
    assert "[2/2] data.paths=[gone.txt]\n" in job.err
    assert "1 of 2 points did not complete:\n  data.paths=[gone.txt]: user: " in job.err
    shown = dict(line.split()[:2] for line in job.out.splitlines() if line.startswith("data.paths="))
    assert shown == {"data.paths=[there.txt]": "completed", "data.paths=[gone.txt]": "failed"}
    assert list((tmp_path / "runs" / "swept" / "wandb").glob("offline-run-*")), "the table"

    again = launch(*typed, environment={"WANDB_MODE": "disabled"})
    assert again.finish() == 1
    assert "4 points, 1 to run" in again.err and "1 completed already" in again.err

    printed = sweep(tmp_path, "status", "runs/swept")
    assert printed.splitlines()[-1] == "1 completed, 1 failed, 2 skipped"
    sweep(tmp_path, "collect", "runs/swept")
    table = (tmp_path / "runs" / "swept" / "table.csv").read_text().splitlines()
    assert len(table) == 3 and table[0].startswith("point,state,kind,")
    refused = sweep(tmp_path, "status", "nothing", code=EXIT_USER)
    assert refused == "error: nothing: neither a sweep folder nor a run folder\n"


GRID = ("training.seed=1,2",)
STUDY = ("sweep=optuna", "sweep.n_trials=2", "sweep.n_jobs=1", "optimizer.lr=interval(1e-4,1e-2)")


@pytest.mark.parametrize("axes", [GRID, STUDY], ids=["grid", "study"])
def test_a_sweep_whose_controller_is_killed_is_resumed(
    launch: Start, tmp_path: Path, axes: tuple[str, ...]
) -> None:
    typed = ("-m", *axes, "name=cut", "training.steps=100", "checkpoint.interval=10")
    typed = (*typed, "metrics.log_interval=10")
    first = launch(*typed)
    until(lambda: bool(list(tmp_path.glob("runs/cut/*/checkpoints/step-*/manifest.json"))), PATIENCE)

    second = launch(*typed)
    assert second.finish() == EXIT_USER
    assert "another process is starting the jobs of this sweep" in second.err

    first.process.kill()
    until(lambda: not first.ranks(), PATIENCE)
    if axes == GRID:
        printed = sweep(tmp_path, "status", "runs/cut")
        assert printed.splitlines()[-1] in ("1 failed, 1 planned", "1 stopped, 1 planned")
        assert "2 points, 2 to run" in sweep(tmp_path, "resume", "runs/cut")
    else:
        third = launch(*typed)
        assert third.finish() == EXIT_OK, third.err
        assert third.out.splitlines()[-2].startswith("best (minimize loss): optimizer.lr=")
    rows = [json.loads(path.read_text()) for path in tmp_path.glob("runs/cut/*/result.json")]
    assert [row["exit_reason"] for row in rows] == ["completed"] * 2
    assert max(row["start_step"] for row in rows) > 0, "it resumed from a checkpoint"
