"""The first signal only requests a stop; another ^C interrupts at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.compose.composer import compose_job
from harness.launch.begin import begin
from harness.launch.local import launch
from harness.run.folder import RunFolder
from harness.train import process
from harness.train.engine import Engine
from harness.train.process import StopRequest, stop_signals_interrupt

TINY = (
    *("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "cluster.device=cpu", "metrics.console=none"),
    *("training.seq_len=16", "training.global_batch_size=2", "training.steps=4", "checkpoint.enable=false"),
)


@pytest.fixture(autouse=True)
def _python_answers_to_interrupts() -> object:
    """Handle SIGINT as a foreground process does, also if the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_handlers_come_back(number: int) -> None:
    # A shell may have started the tests with SIGHUP ignored (nohup), and ignored signals stay ignored.
    outer = signal.signal(number, signal.default_int_handler)
    try:
        with StopRequest() as request:
            assert request.signal is None
            send(number)
            assert request.signal == number and not request.insists
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, outer)


def test_a_pipe_of_stderr_may_be_closed() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    stderr = os.dup(2)
    os.dup2(writer, 2)
    try:
        with StopRequest() as request:
            send(signal.SIGTERM)
            assert request.signal == signal.SIGTERM
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(writer)


def test_a_second_interrupt_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "SAME_KEY_PRESS_SECONDS", 0.0)
    with StopRequest(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGINT)
        send(signal.SIGINT)


def test_one_key_press_that_arrives_twice_is_one() -> None:
    with StopRequest(raises=False) as request:
        send(signal.SIGINT)
        send(signal.SIGINT)
        assert not request.insists


def test_a_second_termination_does_not_insist(monkeypatch: pytest.MonkeyPatch) -> None:
    # Schedulers send SIGTERM to a process and to its group, and a lost terminal several SIGHUPs.
    monkeypatch.setattr(process, "SAME_KEY_PRESS_SECONDS", 0.0)
    with StopRequest(raises=False) as request:
        send(signal.SIGTERM)
        send(signal.SIGTERM)
        send(signal.SIGHUP)
        assert not request.insists
        send(signal.SIGINT)
        assert request.insists and request.signal == signal.SIGTERM


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopRequest() as request:
            send(signal.SIGHUP)
            assert request.signal is None
    finally:
        signal.signal(signal.SIGHUP, before)


def test_outside_of_the_main_thread_nothing_is_touched() -> None:
    seen = []

    def enter() -> None:
        with StopRequest() as request:
            seen.append(request.signal)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert seen == [None]


def test_termination_interrupts_before_the_loop_begins() -> None:
    with stop_signals_interrupt(), pytest.raises(KeyboardInterrupt):
        send(signal.SIGTERM)


def test_signals_that_are_ignored_meanwhile_stay_so_when_a_request_ends() -> None:
    before = {number: signal.getsignal(number) for number in process.STOP_SIGNALS}
    try:
        with StopRequest():
            process.ignore_stop_signals()
        send(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_a_row_that_is_being_written_is_not_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For completed and failed runs, whether a rank or its controller writes."""
    job = compose_job([*TINY, f"runs_dir={tmp_path}"])
    write_result, ensure_result, seen = RunFolder.write_result, RunFolder.ensure_result, []

    def interrupt(name: str, call: Callable[..., None]) -> Callable[..., None]:
        def interrupted(*arguments: Any) -> None:
            for number in (signal.SIGINT, signal.SIGTERM):
                send(number)
            seen.append(name)
            call(*arguments)

        return interrupted

    monkeypatch.setattr(RunFolder, "write_result", interrupt("write_result", write_result))
    monkeypatch.setattr(RunFolder, "ensure_result", interrupt("ensure_result", ensure_result))
    folder = RunFolder(tmp_path / "done")
    begin(folder, job, [])
    assert launch(job, folder) == 0 and folder.row["exit_code"] == 0

    def fail(*_: object) -> None:
        send(signal.SIGINT)  # requests a stop; a second one would end the run at once
        raise LookupError("a bug")

    monkeypatch.setattr(Engine, "update", fail)
    folder = RunFolder(tmp_path / "failed")
    begin(folder, job, [])
    before = signal.getsignal(signal.SIGTERM)
    try:
        assert launch(job, folder, ends_process=True) == 1 and folder.row["error.type"] == "LookupError"
        send(signal.SIGTERM)  # the interpreter takes a while to end
    finally:
        for number in process.STOP_SIGNALS:
            signal.signal(number, before if number != signal.SIGINT else signal.default_int_handler)
    assert seen == ["write_result", "ensure_result"] * 2
