"""The file of evaluations, and its columns in tables of runs."""

from jobs import train

from harness.launch.rows import load
from harness.run.result import EVALUATIONS, newest
from harness.tools.inference.evaluate import append
from harness.tools.report.runs import report_runs
from harness.util.tables import Table


def test_newest(tmp_path):
    assert newest(tmp_path) == {}
    for loss in (3.0, 2.0):
        append(
            tmp_path / EVALUATIONS, [{"task": "data", "loss": loss, "step": 4, "code.torch": "2"}]
        )
    append(
        tmp_path / EVALUATIONS, [{"task": "lm_eval:q", "acc": 0.5, "split": "all", "seq_len": 8}]
    )
    with (tmp_path / EVALUATIONS).open("a") as file:
        file.write('{"task": "da')
    assert newest(tmp_path) == {"evaluation.data.loss": 2.0, "evaluation.q.acc": 0.5}


def test_report_has_the_newest_evaluations(tmp_path):
    run = train(tmp_path / "runs", "training.steps=4", "training.seq_len=16", "name=evaluated")
    append(run.folder.path / EVALUATIONS, [{"task": "lm_eval:q", "acc": 0.25, "examples": 4}])
    rows = load(tmp_path / "runs")
    assert [row["evaluation.q.acc"] for row in rows] == [0.25]
    tables = [each for each in report_runs("runs", rows).blocks if isinstance(each, Table)]
    [table] = [each for each in tables if each.title == "Runs"]
    assert "0.2500" in table.cells()[0]
