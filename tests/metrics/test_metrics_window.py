"""Throughput covers training only: no warm-up, no validation, no saving."""

from __future__ import annotations

import statistics

import pytest

from harness.metrics.window import StepTimer, Window


class Clock:
    """A clock that only ``wait`` advances."""

    now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_lap_leaves_out_validation_and_checkpoint() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    with timer.section("data"):
        clock.wait(0.5)
    clock.wait(2.0)
    with timer.section("validation"):
        clock.wait(30.0)
    with timer.section("checkpoint"):
        clock.wait(10.0)
    lap = timer.lap()
    assert (lap.seconds, lap.spent["data"]) == (2.5, 0.5)
    assert (lap.spent["validation"], lap.spent["checkpoint"]) == (30.0, 10.0)


def test_no_time_falls_between_laps() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.wait(1.0)
    timer.lap()
    with timer.section("checkpoint"):
        clock.wait(5.0)
    clock.wait(0.25)  # e.g. logging, which is part of the step
    assert timer.lap().seconds == 0.25


def test_restart_forgets_the_time_before_the_first_step() -> None:
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.wait(60.0)
    timer.restart()
    clock.wait(1.0)
    assert timer.lap().seconds == 1.0


def test_queued_work_counts_for_its_step() -> None:
    clock = Clock()
    queued = [3.0]  # seconds of queued device work

    def synchronize() -> None:
        clock.wait(queued.pop() if queued else 0.0)

    timer = StepTimer(synchronize, clock)
    with timer.section("data"):  # must not wait for the device: that would end all overlap
        clock.wait(0.1)
    assert queued
    with timer.section("validation"):
        clock.wait(1.0)
    lap = timer.lap()
    assert lap.seconds == pytest.approx(3.1)
    assert lap.spent["validation"] == pytest.approx(1.0)


def test_misuse_of_sections_is_refused() -> None:
    timer = StepTimer(clock=Clock())
    with pytest.raises(ValueError, match="no section 'lunch'"), timer.section("lunch"):
        pass
    with (
        pytest.raises(RuntimeError, match="'data' opened inside of 'validation'"),
        timer.section("validation"),
        timer.section("data"),
    ):
        pass
    with pytest.raises(RuntimeError, match="ended inside of section 'data'"), timer.section("data"):
        timer.lap()
    timer.lap()  # an error inside of a section closes it


def test_warmup_counts_for_no_throughput() -> None:
    window = Window(warmup_steps=2)
    window.add(50.0, 1000)
    window.add(10.0, 1000)
    first = window.interval()
    assert first == {"step_seconds": 30.0, "tokens_per_second": None, "data_share": None}
    for seconds in (1.0, 1.0, 4.0):
        window.add(seconds, 1000, data_seconds=0.3)
    summary = window.summary()
    assert summary["window_steps"] == 3
    assert summary["tokens_per_second"] == 3000 / 6
    assert summary["tokens_per_second_median"] == 1000
    assert summary["data_share"] == pytest.approx(0.9 / 6)


def test_interval_starts_where_the_last_one_ended() -> None:
    window = Window(warmup_steps=1)
    window.add(9.0, 100)
    window.add(1.0, 100, 0.5)
    assert window.interval() == {"step_seconds": 5.0, "tokens_per_second": 100.0, "data_share": 0.5}
    window.add(2.0, 100)
    assert window.interval() == {"step_seconds": 2.0, "tokens_per_second": 50.0, "data_share": 0.0}
    assert window.interval() == {"step_seconds": None, "tokens_per_second": None, "data_share": None}
    assert window.summary()["window_steps"] == 2


def test_nothing_survived_warmup() -> None:
    window = Window(warmup_steps=3)
    window.add(1.0, 10)
    summary = window.summary()
    assert summary.pop("window_steps") == 0
    assert summary and all(value is None for value in summary.values())


def test_quantiles() -> None:
    window = Window(warmup_steps=0)
    seconds = [0.9, 1.0, 1.1, 1.3, 5.0, 1.2]
    for value in seconds:
        window.add(value, 1)
    summary = window.summary()
    deciles = statistics.quantiles(seconds, n=10, method="inclusive")
    assert summary["step_seconds_p10"] == pytest.approx(deciles[0])
    assert summary["step_seconds_p90"] == pytest.approx(deciles[-1])
    assert summary["step_seconds_median"] == pytest.approx(1.15)
    assert summary["step_seconds_spread"] == pytest.approx((deciles[-1] - deciles[0]) / 1.15)


def test_a_step_that_compiles_again_counts_as_warm_up() -> None:
    window = Window(warmup_steps=1)
    for seconds, tokens, length in ((9.0, 10, 5), (1.0, 10, 5), (9.0, 20, 10), (1.0, 20, 10)):
        window.add(seconds, tokens, warms_up=seconds == 9.0, seq_len=length)
    assert window.interval()["tokens_per_second"] == 15
    assert window.interval_lengths == window.lengths == {5: 10, 10: 20}
    assert window.summary()["window_steps"] == 2
