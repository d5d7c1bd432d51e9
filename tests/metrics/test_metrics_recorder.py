"""The recorder: the file first, then the console, which may be closed without stopping a run."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from rich.console import Console as Terminal

from harness.config.metrics import MetricsConfig
from harness.config.training import OBSERVERS
from harness.metrics.console import PlainConsole, RichConsole, SilentConsole, make_console, progress
from harness.metrics.jsonl import read_metrics
from harness.metrics.recorder import Recorder
from harness.metrics.views import ShownRun
from harness.train.rows import metrics_of_rows


def record(run_dir: Path, start_step: int = 0, **fields: Any) -> Recorder:
    config = MetricsConfig(**{"console": "plain", **fields})
    recorder = Recorder(ShownRun(config, run_dir, "id", "name", {}), total_steps=10)
    recorder.begin(start_step, metrics_of_rows(OBSERVERS.values()))
    return recorder


def test_rows_console_and_summary(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = record(tmp_path)
    recorder.message("hello")
    recorder.log({"step": 1, "loss": 2.0})
    recorder.log({"step": 1, "validation_loss": 3.0})
    summary = {"exit": "done", "tokens_per_second": 123456.7, "mfu": None, "window_steps": 1200, "ok": True}
    recorder.close(summary)
    recorder.close(summary)
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
def test_plain_row(row: dict[str, Any], line: str) -> None:
    """None is left out, and nan is not."""
    out = io.StringIO()
    console = PlainConsole(100, out)
    console.begin(0, METRICS)
    console.log(row)
    assert out.getvalue() == line


def test_rich_bar_and_lines_above_it() -> None:
    out = io.StringIO()
    now = [0.0]
    terminal = Terminal(file=out, force_terminal=True, width=160, color_system=None)
    console = RichConsole(100, terminal, clock=lambda: now[0])
    console.begin(10, METRICS)
    for step in (11, 12, 13):
        console.log({**ROW, "step": step})
    now[0] = 60.0
    console.log({**ROW, "step": 14})
    console.log({"step": 14, "validation_loss": 4.0})
    console.message("saved [step 14]")
    console.warn("a view is off")
    console.log({**ROW, "step": 100})
    console.close()
    console.summary("summary", {"exit": "done"})
    console.summary("summary", {"exit_code": 2})  # of a failed run: the error says it
    lines = [line.split("\x1b[2K")[-1].strip("\r ") for line in out.getvalue().splitlines()]
    permanent = [line for line in lines if line.startswith("step  ")]
    assert [line.split("  loss")[0] for line in permanent if "loss 5" in line] == [
        "step    11/100",
        "step    14/100",
        "step   100/100",
    ]
    assert "step    14/100  validation_loss 4.0000" in lines
    assert {"saved [step 14]", "warning: a view is off"} <= {*lines}
    assert "exit_code" not in out.getvalue()
    assert "100/100" in out.getvalue() and "  exit  done" in out.getvalue()


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_of_verbs(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    """A bar on a terminal; a log file gets lines."""
    err, times = io.StringIO(), iter([0.0, 0.0, 60.0])
    monkeypatch.setattr(err, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stderr", err)
    monkeypatch.setattr("harness.metrics.console.time", Mock(monotonic=lambda: next(times)))
    with progress(2) as show:
        show("fsdp")
        show("tp")
    bar, lines = ("\r", " tp, about 0:01:00 left"), "[1/2] fsdp\n[2/2] tp, about 0:01:00 left\n"
    assert all(part in err.getvalue() for part in bar) if terminal else err.getvalue() == lines


@pytest.mark.parametrize(("terminal", "kind"), [(True, RichConsole), (False, PlainConsole)])
def test_auto_looks_at_standard_output(monkeypatch: pytest.MonkeyPatch, terminal: bool, kind: type) -> None:
    out = io.StringIO()
    monkeypatch.setattr(out, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr("sys.stdout", out)
    console = make_console("auto", 10)
    console.close()
    assert isinstance(console, kind)


def test_silent_console_still_warns(
    caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    console = make_console("none", 10)
    assert isinstance(console, SilentConsole)
    with caplog.at_level(logging.WARNING):
        console.log(ROW)
        console.message("hello")
        console.warn("wandb is off")
    assert capsys.readouterr().out == ""
    assert caplog.messages == ["wandb is off"]
