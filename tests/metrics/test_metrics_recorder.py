"""The recorder writes the file first, and a failing view does not stop a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from harness.config.metrics import MetricsConfig
from harness.config.training import OBSERVERS
from harness.metrics import views
from harness.metrics.jsonl import read_metrics
from harness.metrics.recorder import Recorder
from harness.train.rows import metrics_of_rows


def record(run_dir: Path, start_step: int = 0, **fields: Any) -> Recorder:
    config = MetricsConfig(**{"console": "plain", **fields})
    recorder = Recorder(config, run_dir, run_id="id", name="name", job={}, total_steps=10)
    recorder.begin(start_step, metrics_of_rows(OBSERVERS.values()))
    return recorder


class BrokenView:
    """A view that fails from a given call on."""

    name = "broken"

    def __init__(self, *args: object) -> None:
        self.logged: list[int] = []

    def log(self, row: dict[str, Any]) -> None:
        self.logged.append(row["step"])
        if row["step"] >= 2:
            raise ConnectionError("the server\nis gone")

    def close(self, summary: dict[str, Any]) -> None:
        raise ConnectionError("still gone")


def test_rows_console_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = record(tmp_path)
    recorder.message("hello")
    recorder.log({"step": 1, "loss": 2.0})
    recorder.log({"step": 1, "validation_loss": 3.0})
    recorder.close({"exit": "done"})
    recorder.close({"exit": "done"})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.0},
        {"step": 1, "validation_loss": 3.0},
    ]
    assert capsys.readouterr().out.splitlines() == [
        "hello",
        "step     1/10  loss 2.0000",
        "step     1/10  validation_loss 3.0000",
        "summary",
        "  exit  done",
    ]


def test_a_resume_drops_the_rows_it_will_write_again(tmp_path: Path) -> None:
    first = record(tmp_path)
    for step in (1, 2, 3):
        first.log({"step": step, "loss": 1.0})
    first.close({})
    again = record(tmp_path, start_step=2)
    again.log({"step": 3, "loss": 9.0})
    again.close({})
    losses = [(row["step"], row["loss"]) for row in read_metrics(tmp_path / "metrics.jsonl")]
    assert losses == [(1, 1.0), (2, 1.0), (3, 9.0)]


def test_a_failing_init_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(**settings: object) -> None:
        raise RuntimeError("no server")

    monkeypatch.setattr("wandb.init", fail)
    recorder = record(tmp_path, wandb=True)
    recorder.log({"step": 1, "loss": 2.0})
    recorder.close({})
    warnings = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warnings == ["warning: wandb is off, metrics.jsonl continues: RuntimeError: no server"]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 1


def test_a_view_that_fails_later_is_switched_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    view = BrokenView()
    monkeypatch.setattr(views, "WandbView", lambda run: view)
    recorder = record(tmp_path, wandb=True, tensorboard=True)
    for step in (1, 2, 3):
        recorder.log({"step": step, "loss": 2.0})
    recorder.close({})
    assert view.logged == [1, 2]
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 3
    assert (
        capsys.readouterr().out.count(
            "broken is off, metrics.jsonl continues: ConnectionError: the server is"
        )
        == 1
    )
    assert list((tmp_path / "tensorboard").iterdir()), "the other view continues"


def test_close_survives_a_failing_view(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(views, "WandbView", BrokenView)
    record(tmp_path, wandb=True).close({})


def test_a_closed_console_does_not_stop_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(text: str) -> None:
        raise BrokenPipeError("Broken pipe")

    recorder = record(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(recorder._console._stream, "write", fail)  # type: ignore[attr-defined]
        recorder.log({"step": 1, "loss": 2.0})
        recorder.log({"step": 2, "loss": 2.0})
        recorder.close({})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert caplog.messages == ["console is off, metrics.jsonl continues: BrokenPipeError: Broken pipe"]


def test_a_full_disk_does_stop_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(row: dict[str, Any]) -> None:
        raise OSError("No space left on device")

    recorder = record(tmp_path)
    monkeypatch.setattr(recorder._file, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        recorder.log({"step": 1})
