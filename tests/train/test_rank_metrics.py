"""``metrics.all_ranks``: the own values of a rank, kept through resumes."""

from __future__ import annotations

from pathlib import Path

import jobs

from harness.metrics.jsonl import read_metrics


def test_rows_of_a_rank_are_its_own_and_continue(tmp_path: Path) -> None:
    overrides = ("training.steps=4", "checkpoint.interval=2", "metrics.all_ranks=true")
    jobs.train(tmp_path, *overrides)
    run = jobs.train(tmp_path, *overrides, "checkpoint.load_step=2")
    own = read_metrics(run.folder.path / "metrics" / "rank0.jsonl")
    assert [row["step"] for row in own] == [1, 2, 3, 4]
    for row, of_all in zip(own, read_metrics(run.folder.path / "metrics.jsonl"), strict=True):
        assert row["loss"] == of_all["loss"]  # there is no other rank
        assert row["memory_gib"] > 0 and row["step_seconds"] == of_all["step_seconds"]
        assert (row["rank"], row["stage"]) == (0, 0)


def test_without_it_there_is_no_file(tmp_path: Path) -> None:
    run = jobs.train(tmp_path, "training.steps=2", "checkpoint=disabled")
    assert not (run.folder.path / "metrics").exists()
