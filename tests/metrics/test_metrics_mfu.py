"""MFU computed by hand, and none for unknown hardware."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from harness.metrics.mfu import Peak, describe_inputs, mfu, peak_of, utilization


@dataclass(frozen=True)
class Flops:
    flops_per_token_full: float
    flops_per_token_causal: float


# Llama 3 8B at 8192 tokens as torchtitan counts it: 6 * (N - N_embedding) + 12 * L * d * T, N = 8.03e9.
PARAMETERS = 6 * (8_030_261_248 - 128_256 * 4096)
ATTENTION = 12 * 32 * 4096 * 8192
LLAMA3_8B = Flops(PARAMETERS + ATTENTION, PARAMETERS + ATTENTION / 2)


def test_published_llama3_8b() -> None:
    assert LLAMA3_8B.flops_per_token_full == pytest.approx(57.9e9, rel=1e-3)
    row = utilization(6667, LLAMA3_8B, peak_of("NVIDIA H100 80GB HBM3", "bfloat16"))
    assert row["tflops_per_device"] == pytest.approx(386, abs=0.5)
    assert row["mfu"] == pytest.approx(0.390, abs=0.001)
    assert row["mfu_causal"] == pytest.approx(
        row["mfu"] * (PARAMETERS + ATTENTION / 2) / (PARAMETERS + ATTENTION)
    )


def test_the_peak_is_that_of_the_arithmetic() -> None:
    assert peak_of("NVIDIA H100 80GB HBM3", "float8").flops == 1978.9e12
    assert peak_of("NVIDIA H100 80GB HBM3", "float32").flops == 66.9e12
    missing = peak_of("NVIDIA A100-SXM4-80GB", "float8")
    assert missing.flops is None
    assert "float8" in missing.origin


def test_unknown_hardware_has_no_mfu() -> None:
    peak = peak_of("Some CPU", "bfloat16")
    row = utilization(1e3, LLAMA3_8B, peak)
    assert row["mfu"] is None and row["mfu_causal"] is None
    assert row["tflops_per_device"] == pytest.approx(57.9, rel=1e-3)
    assert describe_inputs(LLAMA3_8B, peak).startswith("no MFU: no known peak for 'Some CPU'; 57.9")


def test_no_throughput_no_mfu() -> None:
    assert set(utilization(None, LLAMA3_8B, Peak(1e12, "test")).values()) == {None}
    assert mfu(None, 1.0, 1.0) is None


def test_inputs_are_described_in_both_conventions() -> None:
    line = describe_inputs(LLAMA3_8B, peak_of("NVIDIA H100 80GB HBM3", "bfloat16"))
    assert "57.91 GFLOP/token (full attention)" in line
    assert "51.47 (causal half)" in line
    assert "989.4 TFLOP/s (H100 SXM, dense bfloat16" in line
