"""Runs that were started one by one have short names, and their plots have room for them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from made import leave, rate_of, result

from harness.compose.composer import compose_job
from harness.launch.rows import in_short, load
from harness.tools.report import plots
from harness.tools.report.runs import report_runs
from harness.util.tables import Table

COMMON = [
    *(
        "data=synthetic",
        "tokenizer=bytes",
        "cluster.device=cpu",
        "training.steps=20",
        "metrics.log_interval=5",
    ),
    *("training.seq_len=32", "training.global_batch_size=8", "checkpoint.enable=false"),
]


def leave_run(runs: Path, *typed: str) -> None:
    overrides = [*COMMON, *typed, f"runs_dir={runs}"]
    job = compose_job(overrides)
    leave(job, overrides, result(job, rate_of(job)))


def test_runs_are_named_by_the_fewest_fields(tmp_path: Path) -> None:
    leave_run(tmp_path, "name=a", "model=llama3_tiny", "optimizer.lr=1e-3", "training.seed=1")
    leave_run(tmp_path, "name=b", "model=llama3_tiny", "optimizer.lr=2e-3", "training.seed=2")
    more = ["cluster.env.A=b", "training.seed=1"]
    leave_run(tmp_path, "name=c", "model=llama3_tiny", "optimizer.lr=3e-3", *more)
    assert sorted(row["point"] for row in load(tmp_path)) == ["lr=0.001", "lr=0.002", "lr=0.003"]
    # Fields without override have a value too; runs with the same value are distinguished by a second field.
    leave_run(tmp_path, "name=d", "training.seed=7", "model=llama3_tiny", "optimizer.lr=3e-3")
    named = sorted(row["point"] for row in load(tmp_path))
    assert len(set(named)) == 4 and named[2:] == ["lr=0.003 seed=1", "lr=0.003 seed=7"]


def test_equal_jobs_of_different_names_are_shown_by_name(tmp_path: Path) -> None:
    for name in ("one", "two"):
        leave_run(tmp_path, f"name={name}", "model=llama3_tiny")
    assert [row["point"] for row in load(tmp_path)] == ["name=one", "name=two"]


def test_differing_models_are_summarized(tmp_path: Path) -> None:
    for model in ("llama3_tiny", "llama4_debug", "deepseek_v3_debug"):
        leave_run(tmp_path / "runs", f"model={model}", "training.seq_len=32")
    rows = load(tmp_path / "runs")
    assert sorted(row["point"] for row in rows) == [
        "model=deepseek_v3_debug",
        "model=llama3_tiny",
        "model=llama4_debug",
    ]
    table = report_runs("t", rows, tmp_path).blocks[0]
    assert isinstance(table, Table)
    text = table.notes[0]
    assert text.startswith("The numerics of all runs differ (model (") and len(text) < 200
    assert in_short(["model.dim", "optimizer.lr"]) == "model.dim, optimizer.lr"


def test_a_plot_has_room_for_long_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_run(tmp_path / "runs", "model=llama3_tiny")
    [row] = load(tmp_path / "runs")
    names = [" ".join(f"a_long_field_{n}=value_{n}" for n in range(6, 6 + count)) for count in (8, 2, 1)]
    figures = []
    save = plots.save

    def keep(figure: Any, path: Path) -> None:
        save(figure, path)
        figure.draw_without_rendering()  # positions were those at the saved resolution
        figures.append(figure)

    monkeypatch.setattr(plots, "save", keep)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert plots.bars(tmp_path / "runs.png", "t", names, [row, {**row, "state": "pending"}, row])
    [figure] = figures
    for label in figure.axes[0].get_yticklabels():
        box = label.get_window_extent()
        assert box.x0 >= 0 and box.y0 >= 0 and box.y1 <= figure.bbox.y1
    # The bars have most of the width.
    assert sum(axis.get_window_extent().width for axis in figure.axes) > 0.5 * figure.bbox.width
