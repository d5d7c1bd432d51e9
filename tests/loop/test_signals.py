"""A stop is noted, not obeyed at once; another ^C is obeyed."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from harness.loop import signals
from harness.loop.signals import StopRequest, stop_signals_interrupt


@pytest.fixture(autouse=True)
def _python_answers_to_interrupts() -> object:
    """As in a foreground process, wherever the tests run."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def send(number: int) -> None:
    os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_is_noted_and_handlers_come_back(number: int) -> None:
    # A shell may have started the tests with SIGHUP ignored (nohup), and what is ignored stays so.
    outer = signal.signal(number, signal.default_int_handler)
    try:
        with StopRequest() as request:
            assert request.signal is None
            send(number)
            assert request.signal == number and not request.insists
        assert signal.getsignal(number) == signal.default_int_handler
    finally:
        signal.signal(number, outer)


def test_a_second_interrupt_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SAME_KEY_PRESS_SECONDS", 0.0)
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
    monkeypatch.setattr(signals, "SAME_KEY_PRESS_SECONDS", 0.0)
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
