"""Times of steps by hand, the window of throughput, MFU, and peak memory."""

import statistics
import tracemalloc

import pytest
from processes import python

from harness.compose.composer import compose_job
from harness.metrics import window
from harness.metrics.mfu import Peak, describe_inputs, mfu, peak_of, utilization
from harness.metrics.window import StepTimer, Window
from harness.model.accounting import account


class Clock:
    """A clock that only ``wait`` advances."""

    now = 100.0

    def __call__(self):
        return self.now

    def wait(self, seconds):
        self.now += seconds


def test_laps_leave_out_validation_and_checkpoint_and_nothing_else():
    clock = Clock()
    timer = StepTimer(clock=clock)
    clock.wait(60.0)
    timer.restart()  # before the first step
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
    with timer.section("checkpoint"):
        clock.wait(5.0)
    clock.wait(0.25)  # e.g. logging, which is part of the step
    assert timer.lap().seconds == 0.25


def test_queued_work_counts_for_its_step():
    clock = Clock()
    queued = [3.0]  # seconds of queued device work

    def synchronize():
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


def test_warmup_counts_for_no_throughput():
    window = Window(warmup_steps=2)
    window.add(50.0, 1000)
    window.add(10.0, 1000)
    first = window.interval()
    assert first == {"step_seconds": 30.0, "tokens_per_second": None, "data_share": None}
    nothing = window.summary()
    assert nothing.pop("window_steps") == 0 and {*nothing.values()} == {None}
    for seconds in (1.0, 1.0, 4.0):
        window.add(seconds, 1000, data_seconds=0.3)
    # An interval starts where the last one ended.
    assert window.interval()["step_seconds"] == 2.0
    assert window.interval() == {
        "step_seconds": None,
        "tokens_per_second": None,
        "data_share": None,
    }
    summary = window.summary()
    assert summary["window_steps"] == 3
    assert summary["tokens_per_second"] == 3000 / 6
    assert summary["tokens_per_second_median"] == 1000
    assert summary["data_share"] == pytest.approx(0.9 / 6)


def test_quantiles():
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


def test_a_step_that_compiles_again_counts_as_warm_up():
    window = Window(warmup_steps=1)
    for seconds, tokens, length in ((9.0, 10, 5), (1.0, 10, 5), (9.0, 20, 10), (1.0, 20, 10)):
        window.add(seconds, tokens, warms_up=seconds == 9.0, seq_len=length)
    assert window.interval()["tokens_per_second"] == 15
    assert window.interval_lengths == window.lengths == {5: 10, 10: 20}
    assert window.summary()["window_steps"] == 2


LLAMA3_8B = account(compose_job(["model=llama3_8b"]).model, 8192)


def test_published_llama3_8b():
    """As torchtitan counts it: tests/model/test_accounting.py has the FLOPs."""
    row = utilization(6667, LLAMA3_8B, peak_of("NVIDIA H100 80GB HBM3", "bfloat16"))
    assert row["tflops_per_device"] == pytest.approx(386, abs=0.5)
    assert row["mfu"] == pytest.approx(0.390, abs=0.001)
    causal = LLAMA3_8B.flops_per_token_causal / LLAMA3_8B.flops_per_token_full
    assert row["mfu_causal"] == pytest.approx(row["mfu"] * causal)


def test_the_peak_is_that_of_the_arithmetic():
    h100 = peak_of("NVIDIA H100 80GB HBM3", "bfloat16")
    assert peak_of("NVIDIA H100 80GB HBM3", "float8").flops == 1978.9e12
    assert peak_of("NVIDIA H100 80GB HBM3", "float32").flops == 66.9e12
    missing = peak_of("NVIDIA A100-SXM4-80GB", "float8")
    assert missing.flops is None and "float8" in missing.origin
    line = describe_inputs(LLAMA3_8B, h100)
    for part in (
        "57.91 GFLOP/token (full attention)",
        "51.47 (causal half)",
        "989.4 TFLOP/s (H100 SXM, dense bfloat16",
    ):
        assert part in line


def test_unknown_hardware_or_throughput_has_no_mfu():
    assert (
        set(utilization(None, LLAMA3_8B, Peak(1e12, "test")).values())
        == {mfu(None, 1.0, 1.0)}
        == {None}
    )
    peak = peak_of("Some CPU", "bfloat16")
    row = utilization(1e3, LLAMA3_8B, peak)
    assert row["mfu"] is None and row["mfu_causal"] is None
    assert row["tflops_per_device"] == pytest.approx(57.9, rel=1e-3)
    assert describe_inputs(LLAMA3_8B, peak).startswith("no MFU: no known peak for 'Some CPU'; 57.9")


def test_peak_follows_an_allocation():
    script = (
        "from harness.metrics.memory import peak_memory_gib as peak\n"
        "before = peak('cpu'); block = b'x' * 2**27; del block\n"
        "print(peak('cpu') - before)"
    )
    assert 0.06 < float(python("-c", script).stdout) < 0.2


def test_a_long_run_keeps_the_times_of_its_latest_steps(monkeypatch):
    """Totals are those of all steps."""
    monkeypatch.setattr(window, "LATEST_STEPS", 100)
    steps = Window(warmup_steps=0)
    traced = []
    tracemalloc.start()
    for step in range(1, 2001):
        steps.add(2.0 if step <= 1000 else 1.0, 8, seq_len=4)
        if step % 5 == 0:
            assert steps.interval()["tokens_per_second"] == (4 if step <= 1000 else 8)
        if step in (500, 2000):
            traced.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert traced[1] - traced[0] < 1500, "memory grows by a byte or more at each step"
    summary = steps.summary()
    assert (summary["window_steps"], summary["window_seconds"], steps.lengths) == (
        2000,
        3000,
        {4: 16000},
    )
    assert summary["step_seconds_median"] == 1
