"""The mean over seeds with its uncertainty, and Holm's correction."""

from __future__ import annotations

import math

import pytest

from harness.tools.study.judge import Estimate, holm


def test_estimate() -> None:
    """Mean 2, standard error 1/sqrt(3), two degrees of freedom."""
    estimate = Estimate.of([1.0, 2.0, 3.0], 0.05)
    half = 2.919986 / math.sqrt(3)
    assert (estimate.low, estimate.mean, estimate.high) == pytest.approx((2 - half, 2, 2 + half), rel=1e-6)
    assert estimate.p_of_zero() == pytest.approx(0.0742, abs=1e-4)  # t = 2 * sqrt(3)
    assert estimate.p_of_at_most(2.0) == pytest.approx(0.5)
    assert estimate.p_of_at_most(0.0) == pytest.approx(0.0742 / 2, abs=1e-4)
    assert estimate.p_of_at_most(4.0) == pytest.approx(1 - 0.0742 / 2, abs=1e-4)


def test_estimate_of_equal_values() -> None:
    assert Estimate.of([0.0] * 3, 0.05).p_of_zero() == 1.0
    assert Estimate.of([0.0] * 3, 0.05).is_within(-1e-9, 1e-9)
    assert Estimate.of([0.1] * 3, 0.05).p_of_zero() == 0.0


def test_one_value_decides_nothing() -> None:
    single = Estimate.of([0.0], 0.05)
    assert not single.is_within(-1e9, 1e9)
    assert single.p_of_zero() == single.p_of_at_most(-1.0) == 1.0


def test_holm() -> None:
    """The smallest p-value times 4, the next times 3, and so on; none below the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
