"""The rows of experiments/cpu_layouts in the repository: complete, and ranked as the plan ranks them."""

from __future__ import annotations

from pathlib import Path

from harness.launch.rows import job_of, load
from harness.tools.report.experiment import workload
from harness.tools.report.predict import calibration_of, with_predictions
from harness.tools.report.runs import spearman

FOLDER = Path(__file__).parents[3] / "experiments" / "cpu_layouts"
RATE = "tokens_per_second_per_rank"


def test_every_layout_was_measured_and_computed_the_same() -> None:
    rows = load(FOLDER)
    assert [row["state"] for row in rows] == ["completed"] * 20
    assert len({row["numerics_id"] for row in rows}) == 1
    losses = [row["loss"] for row in rows]
    assert max(losses) - min(losses) < 1e-4
    jobs = [job for row in rows if (job := job_of(row)) is not None]
    assert len({workload(job) for job in jobs}) == 20
    # Jobs rebuilt from rows are the jobs that ran.
    assert [job.id for job in jobs] == [row["id"] for row in rows]


def test_the_plan_ranks_layouts_as_they_were_measured() -> None:
    rows = with_predictions(load(FOLDER), calibration_of(FOLDER))
    rank = spearman([(row[f"predicted.{RATE}"], row[f"measured.{RATE}"]) for row in rows])
    assert rank is not None and rank >= 0.7
    text = (FOLDER / "tables.md").read_text()
    assert f"Spearman rank correlation of throughput, 20 runs: {rank:.2f}." in text


def test_kept_rows_have_no_machine_specific_paths() -> None:
    for path in FOLDER.iterdir():
        content = path.read_bytes()
        for path_part in (b"/home/", b"/root/", b"/tmp/", b'"host.name"'):
            assert path_part not in content, path.name
