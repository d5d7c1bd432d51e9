"""The MLflow view, read back with MLflow's own client from a database in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from harness.compose.composer import compose_job
from harness.config.metrics import MetricsConfig, MlflowOptions
from harness.metrics.recorder import Recorder
from harness.util.errors import UserError

mlflow = pytest.importorskip("mlflow")

JOB: dict[str, Any] = {
    "model": {"name": "tiny", "dims": [1, 2]},
    "cluster": {"env": {"A*B": "x" * 7000}},
    "training": {f"field{number}": number for number in range(150)},
}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    # Creating the tables takes seconds.
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow')}/mlflow.db"


def record(store: str, run_dir: Path, start_step: int = 0, name: str = "my run") -> Recorder:
    options = {"tracking_uri": store, "experiment": "here", "tags": {"team": "a"}}
    config = MetricsConfig(console="plain", views={"mlflow": options})
    recorder = Recorder(config, run_dir, run_id="abc123", name=name, job=JOB, total_steps=9)
    recorder.begin(start_step)
    return recorder


def runs(store: str, run_dir: Path) -> list[Any]:
    client = mlflow.MlflowClient(tracking_uri=store)
    experiment = client.get_experiment_by_name("here").experiment_id
    return list(client.search_runs([experiment], f"tags.`harness.run_dir` = '{run_dir}'"))


def history(store: str, run: Any, key: str) -> list[tuple[int, float]]:
    found = mlflow.MlflowClient(tracking_uri=store).get_metric_history(run.info.run_id, key)
    return [(metric.step, metric.value) for metric in found]


def test_a_run_its_failure_and_its_resumption(
    store: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = record(store, tmp_path)
    recorder.log({"step": 1, "loss": 3.5, "mfu": None, "note": "text"})
    recorder.log({"step": 2, "loss": math.nan, "moe.load[0]": 7})
    recorder.close({"exit_code": 3})
    [run] = runs(store, tmp_path)
    assert (run.info.status, run.info.run_name) == ("FAILED", "my run")
    assert run.data.tags["harness.job_id"] == "abc123" and run.data.tags["team"] == "a"
    assert run.data.params["model.name"] == "tiny" and run.data.params["model.dims"] == "[1, 2]"
    assert run.data.params["training.field149"] == "149"
    assert run.data.params["cluster.env.A_B"] == "x" * 6000
    assert history(store, run, "loss")[0] == (1, 3.5)
    step, value = history(store, run, "loss")[1]
    assert step == 2 and math.isnan(value)
    assert history(store, run, "moe.load_0_") == [(2, 7.0)]
    assert "mfu" not in run.data.metrics and "note" not in run.data.metrics

    resumed = record(store, tmp_path, start_step=1)
    [run] = runs(store, tmp_path)
    assert run.info.status == "RUNNING"
    resumed.log({"step": 2, "loss": 3.0})
    resumed.close({"loss": 3.0, "window": {"steps": 1}})
    [run] = runs(store, tmp_path)
    assert run.info.status == "FINISHED"
    assert history(store, run, "loss")[-1] == (2, 3.0)
    assert run.data.metrics["summary/window.steps"] == 1
    assert "is off" not in capfd.readouterr().out


def test_a_run_from_the_beginning_is_another_one(store: str, tmp_path: Path) -> None:
    first = record(store, tmp_path)
    first.close({"exit_reason": "SIGTERM"})
    second = record(store, tmp_path)
    second.close({})
    assert sorted(run.info.status for run in runs(store, tmp_path)) == ["FINISHED", "KILLED"]


def test_a_store_that_cannot_be_used_switches_the_view_off(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = record("gopher://server", tmp_path)
    recorder.log({"step": 1, "loss": 3.5})
    recorder.close({})
    assert "mlflow is off, metrics.jsonl continues" in "".join(capfd.readouterr())
    assert '"loss": 3.5' in (tmp_path / "metrics.jsonl").read_text()


def test_a_store_that_fails_later_switches_the_view_off(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    recorder = record(store, tmp_path)
    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", lambda *_, **__: 1 / 0)
    recorder.log({"step": 1, "loss": 3.5})
    recorder.close({})
    shown = capfd.readouterr().out
    assert shown.count("mlflow is off, metrics.jsonl continues: ZeroDivisionError: division by zero") == 1


def test_options_of_views() -> None:
    job = compose_job(["model=llama3_tiny", "metrics=mlflow", "metrics.views.mlflow.experiment=mine"])
    assert job.metrics.views == {"mlflow": {"tracking_uri": None, "experiment": "mine", "tags": {}}}
    assert MlflowOptions(**job.metrics.views["mlflow"]).experiment == "mine"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "metrics.views.mlflow.server=x",
            "metrics.views.mlflow.server=x: no such field; metrics.views.mlflow has: ",
        ),
        ("metrics.views.mlflow.tags=x", "metrics.views.mlflow.tags=x: must be a mapping of names to text"),
        ("metrics.views.wandb={}", "metrics.views.wandb={}: no such view; would work: metrics.wandb=true"),
        ("metrics.views.trackio={}", "metrics.views.trackio={}: no such view; would work: mlflow"),
        ("metrics.views.mlflow=on", "metrics.views.mlflow=on: must be a mapping of the view's options; "),
    ],
)
def test_wrong_options_of_views(override: str, message: str) -> None:
    with pytest.raises(UserError) as caught:
        compose_job(["model=llama3_tiny", override])
    assert str(caught.value).startswith(message)
