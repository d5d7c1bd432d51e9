"""``harness report``: reports of sweeps and experiments, and errors for a wrong folder."""

import csv
import re
import sys

import pytest
from made import DEVICE, make_sweep, plan_of, rate_of, result

from harness.compose.composer import compose_points
from harness.launch.rows import as_planned
from harness.tools.plan.constants import Calibration, Constants
from harness.tools.report.predictions import CALIBRATION, calibration_of, with_predictions
from harness.tools.report.verb import VERB
from harness.util.encoding import flatten


def run(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["harness report", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        VERB.main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_a_sweep(
    tmp_path,
    monkeypatch,
    capsys,
    plan_with,
):
    seen = []

    def make_plan(job, calibration):
        assert calibration is None
        seen.append(job.cluster.accelerator)
        return plan_of(lambda job: 1.1 * rate_of(job))(job)

    plan_with(make_plan)
    folder = make_sweep(
        tmp_path, failing=lambda job: job.parallelism.tp == 2 and job.parallelism.pp == 2
    )
    assert run(monkeypatch, folder) == 0
    # The measured device differs from the job's accelerator; the failed row has only the job's.
    assert seen == ["H100 SXM"] * 4
    shown = capsys.readouterr().out
    assert "6 points: 3 completed, 1 failed, 2 skipped." in shown
    assert "The fastest: `tp=1 pp=1`, 1,008.0 tokens/s/rank (spread of its steps 4.0%)." in shown
    assert "throughput: median error 10.0%, worst 10.0% (3 rows)" in shown
    text = (folder / "report" / "tables.md").read_text()
    assert "| **tp=1 pp=1** | FSDP8 | 8 | 1,008.0 | 4.0% | 1,108.8 | +10.0% |" in text
    assert "| failed | out_of_memory | rank 3: Tried to allocate 2 GiB |" in text
    assert re.search(
        r"\| tp=3 pp=1 \|.*\| skipped \|.*parallelism.dp_shard=-1: .*world size 8", text
    )
    rows = list(csv.DictReader((folder / "report" / "table.csv").open()))
    assert [row["state"] for row in rows] == ["completed"] * 3 + ["failed"] + ["skipped"] * 2
    assert float(rows[0]["predicted.tokens_per_second_per_rank"]) == pytest.approx(1.1 * 1008)
    page = (folder / "report" / "index.html").read_text()
    assert 'style="--share: 100%" data-value="1008.0">1,008.0<' in page
    assert 'style="--share: 50%" data-value="504.0">504.0<' in page


def test_differing_numerics_without_matplotlib(
    tmp_path,
    monkeypatch,
    plan_with,
):
    plan_with(plan_of(rate_of))
    space = ["data=synthetic", "tokenizer=bytes", "cluster.device=cpu", "name=n"]
    folder = make_sweep(tmp_path, [*space, "optimizer.lr=1e-3,2e-3"])
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # as in an install without extras
    assert run(monkeypatch, folder, "--out", tmp_path / "words") == 0
    assert {each.suffix for each in (tmp_path / "words").iterdir()} == {".md", ".csv", ".html"}
    assert not (folder / "report").exists()
    text = (tmp_path / "words" / "tables.md").read_text()
    assert "The numerics of runs differ (optimizer.lr): compare losses as well as speed." in text


def test_a_calibration_beside_the_rows_applies(tmp_path, plan_with):
    here, other = Calibration(Constants(), source="here"), Calibration(Constants(), source="other")
    here.write(str(tmp_path / CALIBRATION))
    other.write(str(tmp_path / "other.json"))
    used = []

    def make_plan(job, calibration):
        used.append(calibration)
        return plan_of(rate_of)(job)

    plan_with(make_plan)
    job = compose_points(["cluster.device=cpu", "data=synthetic", "training.seed=1,2"])[0].job
    row = {**as_planned("x", job, []), **flatten(result(job, 1.0, DEVICE)), "state": "completed"}
    for path in (None, tmp_path / "other.json"):
        with_predictions([row], calibration_of(tmp_path, path))
    assert used == [here, other]
    assert calibration_of(tmp_path / "elsewhere") is None
