"""Runs with scheduled batch sizes and lengths resume in the middle of every phase, also on another layout."""

from __future__ import annotations

from pathlib import Path

import pytest
from jobs import train as train_here
from resumable_runs import SMALL, Outcome, train
from tiers import rest_is_thorough

from harness.checkpoint.catalog import remove
from harness.compose.composer import compose_job
from harness.config.training import Sizes
from harness.launch.pool import RankPool
from harness.metrics.jsonl import read_metrics

STEPS = 9
SCHEDULE = [
    "schedule.batch_size=[{until_step:3,sequences:4},{until_step:6,sequences:6}]",
    "schedule.seq_len=[{until_step:2,tokens:8},{until_step:5,tokens:16}]",
]
TRAINED = Sizes(8, 32, [(3, 4), (6, 6)], [(2, 8), (5, 16)]).tokens(STEPS)


def run(pool: RankPool, run_dir: Path, *overrides: str, stop: int | None = None) -> list[Outcome]:
    job = compose_job([*SMALL, *SCHEDULE, f"training.steps={STEPS}", f"runs_dir={run_dir}", *overrides])
    run_dir.mkdir(parents=True, exist_ok=True)
    return pool.run(job.world_size, train, job.to_json(), str(run_dir), stop)


def test_every_phase_resumes_bitwise(pool: RankPool, tmp_path: Path) -> None:
    straight = run(pool, tmp_path / "straight", "parallelism=fsdp", "checkpoint=disabled")
    # Validation has full length, whatever the length of the step before.
    stopped = ["parallelism=fsdp", "validation.interval=1", "validation.steps=1"]
    parts = [run(pool, tmp_path / "stopped", *stopped, stop=stop) for stop in (1, 2, 4, 5, 8, None)]
    for rank, whole in enumerate(straight):
        for of in ("losses", "norms", "batches"):
            assert {k: v for part in parts for k, v in getattr(part[rank], of).items()} == getattr(whole, of)
        assert parts[-1][rank].state == whole.state
        assert parts[-1][rank].facts["tokens"] == whole.facts["tokens"] == TRAINED


CHANGED = [("parallelism=fsdp", "parallelism=single"), ("parallelism=cp", "parallelism=fsdp")]


@pytest.mark.parametrize("layouts", rest_is_thorough(CHANGED, CHANGED[1]), ids=" ".join)
def test_another_layout_goes_on(pool: RankPool, tmp_path: Path, layouts: tuple[str, str]) -> None:
    [straight] = run(pool, tmp_path / "straight", "parallelism=single", "checkpoint=disabled")
    shared = f"checkpoint.folder={tmp_path / 'shared'}"
    run(pool, tmp_path / "first", layouts[0], shared, stop=4)
    for outcome in run(pool, tmp_path / "second", layouts[1], shared):
        assert sorted(outcome.losses) == list(range(5, STEPS + 1))
        assert outcome.losses == pytest.approx({s: straight.losses[s] for s in outcome.losses}, rel=1e-5)
        assert outcome.facts["tokens"] == TRAINED


def test_sizes_follow_the_step_where_the_data_begins_again(tmp_path: Path) -> None:
    options = [*SMALL, *SCHEDULE, "checkpoint.interval=4"]
    folder = train_here(tmp_path, *options, "training.steps=8").folder
    remove(str(folder.path / "checkpoints" / "step-8"))
    excluded = "checkpoint.exclude_from_loading=[data_loader]"
    folder = train_here(tmp_path, *options, "training.steps=8", excluded).folder
    rows = {row["step"]: row for row in read_metrics(folder.path / "metrics.jsonl") if "tokens" in row}
    sizes = {step: (row["schedule.batch_size"], row["schedule.seq_len"]) for step, row in rows.items()}
    assert sizes[5] == (6, 16)
    assert sizes[8] == (8, 32)


def test_a_longer_run_of_the_same_curve_goes_on_without_permission(tmp_path: Path) -> None:
    curve = [*SMALL, "schedule.total_steps=8", "checkpoint.interval=2"]
    long = train_here(tmp_path / "long", *curve, "training.steps=8")
    short = train_here(tmp_path / "short", *curve, "training.steps=4").folder
    path = short.path / "checkpoints" / "step-4"
    start = [f"checkpoint.initial_load_path={path}", "checkpoint.initial_load_model_only=false"]
    again = train_here(tmp_path / "again", *curve, "training.steps=8", *start)
    assert again.code == 0
    losses = [
        {row["step"]: row["loss"] for row in read_metrics(run.folder.path / "metrics.jsonl") if "loss" in row}
        for run in (long, again)
    ]
    assert losses[1] == {step: loss for step, loss in losses[0].items() if step > 4}
