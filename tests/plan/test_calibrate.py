"""Fitting: constants that made the rows are found again, and the defaults are those of the published rows."""

from __future__ import annotations

import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from published_rows import all_rows

from harness.compose import compose_job
from harness.errors import UserError
from harness.job import Job
from harness.plan.calibrate import START, Measured, fit, predicted_rate
from harness.plan.constants import Calibration, Constants
from harness.plan.cpu import measure_cpu

SMALL = ["cluster=slurm_h100", "precision=bf16", "training.seq_len=4096", "model=llama3_8b"]


def jobs() -> list[Job]:
    layouts = [["parallelism.dp_shard=8"], ["parallelism.dp_shard=8", "compile=on"]]
    layouts += [["parallelism.dp_shard=8", "compile=on", "precision=float8_tensorwise"]]
    return [compose_job([*SMALL, *layout, "data=synthetic", "tokenizer=bytes"]) for layout in layouts]


def test_what_made_the_rows_is_found_again() -> None:
    truth = Calibration(replace(START, matmul=0.45, float8=0.6))
    rows = [Measured(job, predicted_rate(job, truth)) for job in jobs()]
    found = fit(rows, Calibration(START)).constants
    assert found.matmul == pytest.approx(0.45, rel=0.02) and found.float8 == pytest.approx(0.6, rel=0.04)
    assert found.memory == START.memory


def test_the_defaults_are_fitted_on_four_published_rows() -> None:
    """Table 1 and the interleaved row of Table 5."""
    rows = [row for row in all_rows() if row.published.table == "table1"]
    rows += [row for row in all_rows() if row.name.startswith("table5") and "Interleaved" in row.name]
    assert [row.published.tokens_per_second_per_rank for row in rows] == [5762, 6667, 8532, 128]
    measured = [Measured(row.job, row.published.tokens_per_second_per_rank) for row in rows]
    found = fit(measured, Calibration(START)).constants
    assert found.matmul == pytest.approx(Constants().matmul, rel=0.01)
    assert found.float8 == pytest.approx(Constants().float8, rel=0.01)


def test_a_calibration_is_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "cpu.json")
    written = Calibration(replace(START, cores=2), measure_cpu(), source="here")
    written.write(path)
    assert Calibration.read(path) == written
    (tmp_path / "cpu.json").write_text('{"constants": {"speed": 3}}')
    for wrong, says in ((path, "cannot be read as a calibration"), (str(tmp_path / "no"), "no such file")):
        with pytest.raises(UserError, match=says):
            Calibration.read(wrong)


def test_a_core_is_measured() -> None:
    core = measure_cpu()
    assert 1e9 < core.peak_flops["float32"] < 1e12 and 1e8 < core.memory_bandwidth < 1e12


def test_published_rows_are_met() -> None:
    """The bounds hold on the 14 rows that nothing was fitted on as on all of them."""
    errors = {
        row.name: predicted_rate(row.job, Calibration(Constants())) / row.published.tokens_per_second_per_rank
        - 1
        for row in all_rows()
    }
    assert len(errors) == 18
    unseen = [abs(error) for name, error in errors.items() if not name.startswith(("table1", "table5"))]
    for amounts in (list(map(abs, errors.values())), unseen):
        assert statistics.median(amounts) <= 0.10 and max(amounts) <= 0.25, errors
