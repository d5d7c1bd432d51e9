"""Verdicts on made-up curves whose true difference is known: both error rates, and each statistic alone."""

import functools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from cases import rows

from harness.tools.study.judge import (
    BETTER,
    DIFFERENT,
    EQUAL,
    NORM,
    UNDECIDED,
    WORSE,
    Curves,
    differences,
    estimate,
    judge,
    lead,
    slope_of,
)
from harness.tools.study.techniques import ConvergeConfig

STEPS = np.arange(1, 121)
CONFIG = ConvergeConfig()
BOUND = CONFIG.bound
EXPERIMENTS, TECHNIQUES, SEEDS = 60, 8, 3


def truth(steps):
    """A loss that falls from 7 to 2.3: quickly at first, then by a power of the step."""
    curve = 2 + 4 * np.exp(-steps / 12) + 0.8 * (1 + steps / 20) ** -0.5
    return curve


def experiment(random, *, drift, speed=0.0, offset=0.0):
    """Make the curves of a control and of techniques with the same true difference.

    Args:
        random: source of noise.
        drift: standard deviation of the relative difference at the last step. It is a random walk of each
            run, so consecutive steps are correlated, like those of runs that drift apart.
        speed: by how much the techniques learn faster.
        offset: relative difference of their losses.
    """
    noise = {seed: 1 + 0.03 * random.standard_normal(len(STEPS)) for seed in range(SEEDS)}

    def runs(speed, offset, drift):
        walks = (
            drift * random.standard_normal((SEEDS, len(STEPS))).cumsum(axis=1) / len(STEPS) ** 0.5
        )
        curve = truth(STEPS * (1 + speed)) * (1 + offset)
        return Curves(
            STEPS, {seed: curve * noise[seed] * (1 + walks[seed]) for seed in range(SEEDS)}
        )

    techniques = {f"{number}": runs(speed, offset, drift) for number in range(TECHNIQUES)}
    return runs(0.0, 0.0, 0.0), techniques


def verdict(control, curves, *, same=False):
    estimates = differences(control, curves, CONFIG)
    return judge(estimates, BOUND, has_same_numerics=same)


@functools.cache
def rates(**differences):
    """Return the share of each verdict."""
    random = np.random.default_rng(0)
    words = Counter()
    for _ in range(EXPERIMENTS):
        control, techniques = experiment(random, **differences)
        words.update(verdict(control, curves)[0] for curves in techniques.values())
    return Counter({word: count / EXPERIMENTS / TECHNIQUES for word, count in words.items()})


@pytest.mark.parametrize(("drift", "most"), [(0.001, 0.0), (0.01, 0.02), (0.03, 0.1)])
def test_equal_techniques_are_rarely_called_different(drift, most):
    """If seeds differ by more than the bound, each of two measures errs at each side with at most 5 %."""
    words = rates(drift=drift)
    assert words[BETTER] + words[WORSE] <= most


@pytest.mark.parametrize(
    ("differences", "word", "least", "most"),
    # A learning rate 5 % off changes the speed of experiments/convergence/dense by 2.2 % (seeds: 0.1 %).
    # The last two differences are just above the bound, and are not called equal.
    rows("""
        {drift: 0.001}                  equal      0.99  1
        {drift: 0.03}                   undecided  0.8   1
        {drift: 0.001, speed: 0.02}     better     0.95  1
        {drift: 0.001, speed: -0.02}    worse      0.95  1
        {drift: 0.003, speed: 0.02}     equal      0     0
        {drift: 0.003, speed: -0.02}    equal      0     0
        {drift: 0.001, offset: 0.03}    worse      0.95  1
        {drift: 0.003, speed: 0.012}    equal      0     0.05
        {drift: 0.003, offset: 0.011}   equal      0     0.05
    """),
)
def test_shares_of_verdicts(differences, word, least, most):
    assert least <= rates(**differences)[word] <= most


@pytest.mark.parametrize("offset", [0.03, -0.03])
def test_who_claims_the_same_numbers_and_differs_is_different(offset):
    """Whether it would be worse or better."""
    control, techniques = experiment(np.random.default_rng(1), drift=0.001, offset=offset)
    assert verdict(control, techniques["0"], same=True) == (DIFFERENT, "final loss")


def test_one_seed_is_undecided():
    control, techniques = experiment(np.random.default_rng(2), drift=0.001, speed=0.5)
    single = replace(techniques["0"], losses={0: techniques["0"].losses[0]})
    assert verdict(control, single)[0] == UNDECIDED


def test_lead_is_the_speed():
    curve = truth(STEPS * 1.0)
    slope = slope_of(STEPS, curve)
    assert lead(STEPS, 0.01 * slope, slope) == pytest.approx(0.01)
    assert lead(STEPS, truth(STEPS * 1.01) - curve, slope) == pytest.approx(0.01, rel=0.2)


def test_slope():
    """The slope against log(step) of a logarithm is its factor."""
    assert slope_of(STEPS, 5 - 0.3 * np.log(STEPS)) == pytest.approx(np.full(len(STEPS), -0.3))


def test_same_bits_are_equal():
    """Differences without variance do not divide by zero."""
    control, _ = experiment(np.random.default_rng(5), drift=0.0)
    same = differences(control, control, CONFIG)
    assert judge(same, BOUND, has_same_numerics=True) == (EQUAL, "")
    assert {estimate.mean for estimate in same.values()} == {0.0}


@pytest.mark.parametrize(("factor", "word"), [(1.001, EQUAL), (1.02, DIFFERENT)])
def test_norms_differ_with_equal_losses(factor, word):
    control, _ = experiment(np.random.default_rng(8), drift=0.0)
    control = replace(control, norms=control.losses)
    scaled = replace(control, norms={seed: factor * norms for seed, norms in control.norms.items()})
    assert verdict(control, scaled, same=True)[0] == word
    assert differences(control, scaled, CONFIG)[NORM].mean == pytest.approx(factor - 1)
    assert NORM not in differences(control, replace(scaled, norms={}), CONFIG)


def test_an_interval_is_inside_outside_or_neither():
    """Mean 2, standard error 1/sqrt(3), two degrees of freedom."""
    found = estimate([1.0, 2.0, 3.0], 0.05)
    half = 2.919986 / math.sqrt(3)
    assert found[1:] == pytest.approx((2, 2 - half, 2 + half), rel=1e-6)
    assert found.is_inside(4.0) and not found.is_outside(4.0)
    assert not found.is_inside(3.0) and not found.is_outside(3.0)
    assert found.is_outside(0.3)
    assert estimate([-1.0, -2.0, -3.0], 0.05).is_outside(0.3)
