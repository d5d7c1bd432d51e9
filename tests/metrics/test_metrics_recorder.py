"""The recorder: the file first, then the console, which may be closed without stopping a run."""

import io
from unittest.mock import Mock

import pytest

from harness.config.metrics import MetricsConfig
from harness.config.training import OBSERVERS
from harness.metrics.console import PlainConsole, progress
from harness.metrics.jsonl import read_metrics
from harness.metrics.recorder import Recorder
from harness.metrics.views import ShownRun
from harness.train.rows import metrics_of_rows


def record(run_dir, start_step=0, **fields):
    config = MetricsConfig(**{"console": "plain", **fields})
    recorder = Recorder(ShownRun(config, run_dir, "id", "name", {}), total_steps=10)
    recorder.begin(start_step, metrics_of_rows(OBSERVERS.values()))
    return recorder


def test_rows_console_and_summary(tmp_path, capsys):
    recorder = record(tmp_path)
    recorder.message("hello")
    recorder.log({"step": 1, "loss": 2.0})
    recorder.log({"step": 1, "validation_loss": 3.0})
    summary = {
        "exit": "done",
        "tokens_per_second": 123456.7,
        "mfu": None,
        "window_steps": 1200,
        "ok": True,
    }
    recorder.close(summary)
    recorder.close(summary)
    # The error of a failed run says the rest.
    recorder._console.summary({"exit_code": 2})
    assert read_metrics(tmp_path / "metrics.jsonl") == [
        {"step": 1, "loss": 2.0},
        {"step": 1, "validation_loss": 3.0},
    ]
    assert capsys.readouterr().out.splitlines() == [
        "hello",
        "step     1/10  loss 2.0000",
        "step     1/10  validation_loss 3.0000",
        "summary",
        "  exit               done",
        "  tokens_per_second  123,457",
        "  window_steps       1,200",
        "  ok                 yes",
    ]


def test_a_closed_console_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def fail(text):
        raise BrokenPipeError("Broken pipe")

    recorder = record(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(recorder._console._stream, "write", fail)
        recorder.log({"step": 1, "loss": 2.0})
        recorder.log({"step": 2, "loss": 2.0})
        recorder.close({})
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == 2
    assert caplog.messages == [
        "console is off, metrics.jsonl continues: BrokenPipeError: Broken pipe"
    ]


def test_a_full_disk_does_stop_the_run(tmp_path, monkeypatch):
    def fail(row):
        raise OSError("No space left on device")

    recorder = record(tmp_path)
    monkeypatch.setattr(recorder._file, "write", fail)
    with pytest.raises(OSError, match="No space left"):
        recorder.log({"step": 1})


METRICS = metrics_of_rows(OBSERVERS.values())

ROW = {
    "step": 20,
    "loss": 5.12341,
    "grad_norm": 1.2341,
    "lr": 3e-4,
    "tokens_per_second": 2345.4,
    "mfu": 0.4123,
    "memory_gib": 1.234,
    "data_share": 0.004,
    "tokens": 10,
}


FULL = "step    20/100  loss 5.1234  grad_norm 1.234  lr 3.00e-04  tokens/s 2,345  mfu 41.2%  mem 1.23 GiB"
SPARSE = {"step": 1, "loss": float("nan"), "mfu": None, "tokens_per_second": None}


@pytest.mark.parametrize(
    ("row", "line"),
    [
        (ROW, f"{FULL}\n"),
        (ROW | {"data_share": 0.04}, f"{FULL}  data 4.0%\n"),
        (SPARSE, "step     1/100  loss nan\n"),
    ],
)
def test_plain_row(row, line):
    """None is left out, and nan is not."""
    out = io.StringIO()
    console = PlainConsole(100, out)
    console.begin(METRICS)
    console.log(row)
    assert out.getvalue() == line


def test_progress_of_verbs(monkeypatch):
    """Lines, and no more than the seconds between them allow."""
    err, times = io.StringIO(), iter([0.0, 0.0, 60.0, 70.0, 130.0])
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("harness.metrics.console.time", Mock(monotonic=lambda: next(times)))
    with progress(4, seconds=60.0) as show:
        for name in ("fsdp", "tp", "pp", "cp"):
            show(name)
    assert err.getvalue() == "[2/4] tp, about 0:03:00 left\n[4/4] cp, about 0:00:43 left\n"
