"""``harness report``: reports of sweeps and experiments, and errors for a wrong folder."""

from __future__ import annotations

import base64
import csv
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gpu_cases import report_rows
from made import DEVICE, leave, make_sweep, plan_of, rate_of, result

from harness.compose.composer import compose_points
from harness.config.job import Job
from harness.launch.rows import KEPT, as_planned, keep
from harness.metrics.window import THROUGHPUT
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.report import experiment, published
from harness.tools.report.experiment import CALIBRATION, calibration_of, with_predictions
from harness.tools.report.verb import VERB
from harness.util.encoding import flatten

ROOT = Path(__file__).parents[3]
LLAMA = ROOT / "experiments" / "llama3_h100"
Put = Callable[[Any], None]


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["harness report", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        VERB.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_sweep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_with: Put
) -> None:
    seen: list[str | None] = []

    def make_plan(job: Job, calibration: Any) -> Any:
        assert calibration is None
        seen.append(job.cluster.accelerator)
        return plan_of(lambda job: 1.1 * rate_of(job))(job)

    plan_with(make_plan)
    folder = make_sweep(tmp_path, failing=lambda job: job.parallelism.tp == 2 and job.parallelism.pp == 2)
    assert run(monkeypatch, folder) == 0
    # The measured device differs from the job's accelerator; the failed row has only the job's.
    assert seen == ["H100 SXM"] * 4
    shown = capsys.readouterr().out
    assert "6 points: 3 completed, 1 failed, 2 skipped." in shown
    assert "The fastest: `tp=1 pp=1`, 1,008.0 tokens/s/rank (spread of its steps 4.0%)." in shown
    assert "throughput median error 10.0%, worst 10.0% (3 rows)" in shown
    assert "Spearman rank correlation of throughput, 3 runs: 1.00." in shown
    text = (folder / "report" / "tables.md").read_text()
    assert "| **tp=1 pp=1** | FSDP8 | 8 | 1,008.0 | 4.0% | 1,108.8 | +10.0% |" in text
    assert "| tp=2 pp=2 | failed | out_of_memory | rank 3: Tried to allocate 2 GiB |" in text
    assert re.search(r"\| tp=3 pp=1 \| parallelism.dp_shard=-1: .*world size 8", text)
    rows = list(csv.DictReader((folder / "report" / "table.csv").open()))
    assert [row["state"] for row in rows] == ["completed"] * 3 + ["failed"] + ["skipped"] * 2
    assert float(rows[0]["predicted.tokens_per_second_per_rank"]) == pytest.approx(1.1 * 1008)
    page = (folder / "report" / "index.html").read_text()
    assert 'data-value="1008.0">1,008.0<' in page
    assert base64.b64encode((folder / "report" / "runs.png").read_bytes()).decode() in page


def test_groups_of_numerics_and_no_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_with: Put
) -> None:
    plan_with(plan_of(rate_of))
    space = ["data=synthetic", "tokenizer=bytes", "cluster.device=cpu", "parallelism.dp_shard=1,2", "name=n"]
    folder = make_sweep(tmp_path / "both", [*space, "optimizer.lr=1e-3,2e-3"])
    assert run(monkeypatch, folder, "--out", tmp_path / "out") == 0
    text = (tmp_path / "out" / "tables.md").read_text()
    assert re.search(r"## Runs, group 1\n\nRuns of equal numerics \(`\w{12}`\): optimizer.lr=0.001.", text)
    assert re.search(r"## Runs, group 2\n\nRuns of equal numerics \(`\w{12}`\): optimizer.lr=0.002.", text)
    assert not (folder / "report").exists()
    folder = make_sweep(tmp_path / "each", [*space[:-2], "name=n", "optimizer.lr=1e-3,2e-3"])
    assert run(monkeypatch, folder) == 0
    text = (folder / "report" / "tables.md").read_text()
    assert "The numerics of all runs differ (optimizer.lr): compare losses as well as speed." in text
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as in an install without extras
    assert run(monkeypatch, folder, "--out", tmp_path / "words") == 0
    assert "without pictures: matplotlib is not installed; would work: pip" in capsys.readouterr().out
    assert {each.suffix for each in (tmp_path / "words").iterdir()} == {".md", ".csv", ".html"}


def test_published_tables_without_a_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_with: Put
) -> None:
    """A plan that is 5 % too fast, and predicts that asynchronous tensor parallel is slower."""
    rows = published.read(LLAMA)

    def rate(job: Job) -> float:
        assert job.cluster.accelerator == "H100 96GB"
        row = published.find(job, rows)
        assert row is not None
        return row.tokens_per_second_per_rank * (
            0.9 if row.table == "table4" and row.recipe.async_tp else 1.05
        )

    plan_with(plan_of(rate, gib=77.0))
    assert run(monkeypatch, LLAMA, "--out", tmp_path, "--runs", tmp_path / "no-runs") == 0
    shown = capsys.readouterr().out
    assert "18 published rows, 0 of them measured." in shown
    assert "Predicted throughput against published: median error 5.0%, worst 10.0% (18 rows)." in shown
    assert "Predicted memory against published: " in shown
    # Table 1 and 3: compile, float8; table 4: async TP; table 5: schedule.
    assert "Effects of one change with the right sign: 5 of 6; wrong: Table 4 async TP." in shown
    text = (tmp_path / "tables.md").read_text()
    assert "| Table 1 | 3 | 5.0% | 5.0% | 0.3% | 6.6% | 2 of 2 |" in text
    assert "| Table 4 | async TP | +5.7% | -9.4% | no |" in text
    assert "| Table 5 | schedule: 1F1B to Interleaved1F1B | +28.0% | +28.0% | yes |" in text
    assert "| eager, bf16 | 5,762 | 6,050 | +5.0% | 82.4 | 77.0 | -6.6% | 74.4 | -9.7% |" in text
    assert text.count("not measured") == 18 and THROUGHPUT not in text
    assert "`harness train -m experiment=llama3_h100/table1 cluster=slurm_h100`" in text
    lines = list(csv.DictReader((tmp_path / "table.csv").open()))
    assert [line["published.tokens_per_second_per_rank"] for line in lines[:3]] == [
        "5762.0",
        "6667.0",
        "8532.0",
    ]
    assert (tmp_path / "index.html").read_text().count("<img ") == 6
    assert not (tmp_path / KEPT).exists()


def test_published_tables_with_measurements(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_with: Put
) -> None:
    """Runs of another length, seed and name are measurements; those of another layout are not."""

    def rate(job: Job) -> float:
        return {"H100 96GB": 6000.0, "H100 SXM": 7000.0}[job.cluster.accelerator or ""]

    plan_with(plan_of(rate))
    monkeypatch.setattr(experiment, "spaces_of", lambda folder: [folder / "table1.yaml"])
    runs = tmp_path / "runs"
    [_, compiled, float8] = compose_points(
        ["experiment=llama3_h100/table1", "training.steps=50", "training.seed=3", f"runs_dir={runs}"]
    )
    leave(compiled.job, compiled.overrides, result(compiled.job, 7350.0))
    failed = {**result(float8.job, 1.0), "exit_reason": "failed", "error": {"kind": "node", "message": "ECC"}}
    leave(float8.job, float8.overrides, failed)
    [other, *_] = compose_points(
        ["experiment=llama3_h100/table1", "parallelism.tp=2", "parallelism.dp_shard=4", f"runs_dir={runs}"]
    )
    leave(other.job, other.overrides, result(other.job, 9999.0))
    assert run(monkeypatch, LLAMA, "--out", tmp_path, "--runs", runs) == 0
    shown = capsys.readouterr().out
    assert "3 published rows, 1 of them measured." in shown
    assert "Predicted throughput against measured: median error 4.8%, worst 4.8% (1 row)." in shown
    text = (tmp_path / "tables.md").read_text()
    [line] = [line for line in text.splitlines() if line.startswith("| compile, bf16 | 6,667 ")][:1]
    for cell in ("6,000 | -10.0%", "7,350 | 4.0% | +10.2%", "7,000 | -4.8%", DEVICE):
        assert cell in line
    assert "failed: node: ECC" in text
    assert f"Measured {THROUGHPUT}, divided by the number of GPUs. Spread: " in text
    assert "9,999" not in text
    # The rows are kept when the runs are deleted.
    kept = (tmp_path / KEPT).read_text().splitlines()
    assert len(kept) == 2 and str(tmp_path) not in "".join(kept)
    monkeypatch.setattr(experiment, "read_kept", lambda folder: experiment.load(tmp_path))
    assert run(monkeypatch, LLAMA, "--out", tmp_path / "again", "--runs", tmp_path / "gone") == 0
    assert (tmp_path / "again" / "table.csv").read_text() == (tmp_path / "table.csv").read_text()


def test_a_program_of_experiments_has_its_rows_in_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plan_with: Put
) -> None:
    plan_with(plan_of(lambda job: 110.0))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "gpu_single").mkdir(parents=True)
    facts = {"device": DEVICE, "versions": {"torch": "2.x"}, "commit": None, "dirty": None}
    row = {
        "shape": "tiny",
        "n_layers": None,
        "activation_checkpoint": "full",
        "mode": "bf16",
        "side": "harness",
        "round": 0,
        "overrides": ["data=synthetic", "tokenizer=bytes", "cluster.device=cuda"],
        "tokens_per_second": 100.0,
        "step_seconds": 0.5,
        "memory_gib": 2.0,
    }
    keep(tmp_path / "runs" / "gpu_single", report_rows(facts, [row]))
    assert run(monkeypatch, ROOT / "experiments" / "gpu_single", "--out", tmp_path / "out") == 0
    assert "throughput median error 10.0%, worst 10.0% (1 row)" in capsys.readouterr().out
    text = (tmp_path / "out" / "tables.md").read_text()
    assert "| **tiny bf16 full** | single | 1 | 100.0 | 0.0% | 110.0 | +10.0% | 40.0% | 2.00 | 4.00 |" in text


def test_a_calibration_beside_the_rows_applies(tmp_path: Path, plan_with: Put) -> None:
    here, other = Calibration(Constants(), source="here"), Calibration(Constants(), source="other")
    here.write(str(tmp_path / CALIBRATION))
    other.write(str(tmp_path / "other.json"))
    used: list[Calibration | None] = []

    def make_plan(job: Job, calibration: Calibration | None) -> Any:
        used.append(calibration)
        return plan_of(rate_of)(job)

    plan_with(make_plan)
    job = compose_points(["cluster.device=cpu", "data=synthetic", "training.seed=1,2"])[0].job
    row = {**as_planned("x", job, []), **flatten(result(job, 1.0, DEVICE)), "state": "completed"}
    for path in (None, tmp_path / "other.json"):
        with_predictions([row], calibration_of(tmp_path, path))
    assert used == [here, other]
    assert calibration_of(tmp_path / "elsewhere") is None
