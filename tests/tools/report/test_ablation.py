"""One table per knob around the best point."""

from __future__ import annotations

from pathlib import Path

import pytest
from made import make_sweep

from harness.launch.rows import load
from harness.tools.report.ablation import ablation, best_of, knobs_of

RATE = "measured.tokens_per_second_per_rank"


def test_each_knob_is_turned_at_the_best_point(tmp_path: Path) -> None:
    """dp_shard follows from the other degrees, so it is not a knob."""
    rows = load(make_sweep(tmp_path, failing=lambda job: job.parallelism.pp == 2 and job.parallelism.tp == 1))
    best = best_of(rows)
    assert best is not None and best["point"] == "tp=1 pp=1"
    tp, pp = ablation(rows)
    assert (tp.name, [(row["knob"], row["state"]) for row in tp.rows]) == (
        "tp",
        [("1", "completed"), ("2", "completed"), ("3", "skipped")],
    )
    assert [row["gain"] for row in tp.rows] == [0.0, pytest.approx(504 / 1008 - 1), None]
    assert (pp.name, [(row["knob"], row["kind"]) for row in pp.rows]) == (
        "pp",
        [("1", None), ("2", "out_of_memory")],
    )


def test_fields_without_override_have_the_jobs_value() -> None:
    rows = [
        {"overrides": ["parallelism.pp=2", "parallelism.pp_schedule=GPipe"], "job.parallelism.tp": 1},
        {"overrides": ["parallelism.tp=2"], "job.parallelism.pp": 1, "job.parallelism.pp_schedule": "1F1B"},
        {"overrides": ["compile=on", "parallelism.pp=2", "parallelism.pp_schedule=GPipe"]},
    ]
    assert knobs_of(rows) == {
        "parallelism.pp": ["2", "1", "2"],
        "parallelism.pp_schedule": ["GPipe", "1F1B", "GPipe"],
        "parallelism.tp": ["1", "2", "default"],
        "compile": ["default", "default", "on"],
    }


def test_a_knob_without_effect_at_a_point_is_ignored_there() -> None:
    """Without a pipeline the schedule has no effect."""

    def row(pp: int, schedule: str | None, rate: float) -> dict[str, object]:
        typed = [f"parallelism.pp={pp}", *([f"parallelism.pp_schedule={schedule}"] if schedule else [])]
        resolved = {"job.parallelism.pp": pp, "job.parallelism.pp_schedule": schedule or "1F1B"}
        return {"overrides": typed, **resolved, RATE: rate, "world_size": 8, "state": "completed"}

    rows = [row(8, "GPipe", 9.0), row(8, "1F1B", 8.0), row(1, None, 7.0), row(4, "1F1B", 6.0)]
    pp, schedule = ablation(rows)
    assert [each["knob"] for each in pp.rows] == ["8", "1"]
    assert [each["knob"] for each in schedule.rows] == ["GPipe", "1F1B"]


def test_without_a_measurement_there_is_no_best() -> None:
    rows = [{"overrides": ["a=1"], "state": "failed", "world_size": 1}]
    assert best_of(rows) is None
    assert ablation(rows) == []
