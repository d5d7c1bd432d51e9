"""Verdicts on made-up curves whose true difference is known: both error rates, and each statistic alone."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from harness.tools.study.judge import (
    BETTER,
    DIFFERENT,
    EQUAL,
    UNDECIDED,
    WORSE,
    Curves,
    Estimate,
    Losses,
    holm,
    judge,
    lead,
    log_departure,
    slope_of,
)
from harness.tools.study.techniques import ConvergeConfig

STEPS = np.arange(1, 121)
CONFIG = ConvergeConfig()
EXPERIMENTS, TECHNIQUES, SEEDS = 60, 8, 3


def truth(steps: Losses) -> Losses:
    """A loss that falls from 7 to 2.3: quickly at first, then by a power of the step."""
    curve: Losses = 2 + 4 * np.exp(-steps / 12) + 0.8 * (1 + steps / 20) ** -0.5
    return curve


def experiment(
    random: np.random.Generator, *, drift: float, speed: float = 0.0, offset: float = 0.0
) -> tuple[Curves, dict[str, Curves]]:
    """Make the curves of a control and of techniques with the same true difference.

    Args:
        random: source of noise.
        drift: standard deviation of the relative difference at the last step. It is a random walk of each
            run, so consecutive steps are correlated, like those of runs that drift apart.
        speed: by how much the techniques learn faster.
        offset: relative difference of their losses.
    """
    noise = {seed: 1 + 0.03 * random.standard_normal(len(STEPS)) for seed in range(SEEDS)}

    def runs(speed: float, offset: float, drift: float) -> Curves:
        walks = drift * random.standard_normal((SEEDS, len(STEPS))).cumsum(axis=1) / len(STEPS) ** 0.5
        curve = truth(STEPS * (1 + speed)) * (1 + offset)
        return Curves(STEPS, {seed: curve * noise[seed] * (1 + walks[seed]) for seed in range(SEEDS)})

    techniques = {f"{number}": runs(speed, offset, drift) for number in range(TECHNIQUES)}
    return runs(0.0, 0.0, 0.0), techniques


@functools.cache
def rates(**differences: float) -> tuple[Counter[str], float]:
    """Return the share of each verdict, and the share of experiments with any difference reported."""
    random = np.random.default_rng(0)
    words: Counter[str] = Counter()
    alarms = 0
    for _ in range(EXPERIMENTS):
        control, techniques = experiment(random, **differences)
        found = [verdict.word for verdict in judge(control, None, techniques, CONFIG).values()]
        words.update(found)
        alarms += not {*found} <= {EQUAL, UNDECIDED}
    shares = Counter({word: count / EXPERIMENTS / TECHNIQUES for word, count in words.items()})
    return shares, alarms / EXPERIMENTS


@pytest.mark.parametrize("drift", [0.001, 0.01, 0.03])
def test_equal_techniques_are_not_called_different(drift: float) -> None:
    """At most 5 % of experiments report any difference (60 experiments: at most 7 with 99 % probability)."""
    assert rates(drift=drift)[1] <= 7 / 60


@pytest.mark.parametrize(
    ("differences", "word", "least", "most"),
    [
        ({"drift": 0.001}, EQUAL, 0.99, 1),
        ({"drift": 0.03}, UNDECIDED, 0.8, 1),
        # A learning rate 5 % off changes the speed of experiments/convergence/dense by 2.2 % (seeds: 0.1 %).
        ({"drift": 0.001, "speed": 0.02}, BETTER, 0.95, 1),
        ({"drift": 0.001, "speed": -0.02}, WORSE, 0.95, 1),
        ({"drift": 0.003, "speed": 0.02}, EQUAL, 0, 0),
        ({"drift": 0.003, "speed": -0.02}, EQUAL, 0, 0),
        ({"drift": 0.001, "offset": 0.03}, WORSE, 0.95, 1),
        # Differences above the bound are not called equal.
        ({"drift": 0.003, "speed": 0.012}, EQUAL, 0, 0.05),
        ({"drift": 0.003, "offset": 0.011}, EQUAL, 0, 0.05),
    ],
)
def test_shares_of_verdicts(differences: dict[str, float], word: str, least: float, most: float) -> None:
    assert least <= rates(**differences)[0][word] <= most


def test_a_gain_of_one_who_claims_the_same_numbers_is_different() -> None:
    random = np.random.default_rng(1)
    control, techniques = experiment(random, drift=0.001, speed=0.02)
    assert judge(control, None, {"a": techniques["0"]}, CONFIG)["a"].word == BETTER
    claiming = replace(techniques["0"], same_numerics=True)
    assert judge(control, None, {"a": claiming}, CONFIG)["a"].word == DIFFERENT


def test_significant_difference_below_the_bound_is_equal() -> None:
    random = np.random.default_rng(1)
    control, techniques = experiment(random, drift=1e-6, offset=0.002)
    verdict = judge(control, None, techniques, CONFIG)["0"]
    assert verdict.word == EQUAL
    assert verdict.reason == "significant, below the bound: final loss and learning speed"
    assert verdict.p < 0.01


def test_one_seed_is_undecided() -> None:
    control, techniques = experiment(np.random.default_rng(2), drift=0.001, speed=0.5)
    single = replace(techniques["0"], losses={0: techniques["0"].losses[0]})
    verdict = judge(control, None, {"a": single}, CONFIG)["a"]
    assert (verdict.word, verdict.reason) == (UNDECIDED, "one seed; needs more seeds")
    assert verdict.p == 1.0


def test_lead_is_the_speed() -> None:
    curve = truth(STEPS * 1.0)
    slope = slope_of(STEPS, curve)
    assert lead(STEPS, 0.01 * slope, slope) == pytest.approx(0.01)
    assert lead(STEPS, truth(STEPS * 1.01) - curve, slope) == pytest.approx(0.01, rel=0.2)


def test_slope() -> None:
    """The slope against log(step) of a logarithm is its factor."""
    assert slope_of(STEPS, 5 - 0.3 * np.log(STEPS)) == pytest.approx(np.full(len(STEPS), -0.3))


def test_departure_ignores_the_sign_and_compares_blocks() -> None:
    curve = truth(STEPS * 1.0)
    signs = np.where(STEPS % 2, 1, -1)
    assert log_departure(STEPS, curve * (1 + 1e-4 * signs), curve, 20) == pytest.approx(-4)
    growing = 1e-6 * 10 ** (2.0 * ((STEPS - 1) // 20 % 2))  # 1e-6 and 1e-4 in turn
    assert log_departure(STEPS, curve * (1 + growing), curve, 20) == pytest.approx(-5, abs=1e-3)
    rounding = np.log10(2.0**-24)
    assert log_departure(STEPS, curve, curve, 20) == pytest.approx(rounding)


@pytest.mark.parametrize(("times", "word"), [(3, EQUAL), (300, DIFFERENT)])
def test_departure_of_techniques_with_the_same_numerics(times: float, word: str) -> None:
    """Noise of no direction, 300 times the twin's, is found only if the technique claims equal numbers."""
    random = np.random.default_rng(3)

    def apart(control: Curves, size: float, *, same: bool) -> Curves:
        noise = {seed: 1 + size * random.standard_normal(len(STEPS)) for seed in control.losses}
        return Curves(STEPS, {seed: each * noise[seed] for seed, each in control.losses.items()}, same)

    control, _ = experiment(random, drift=0.0)
    twin = apart(control, 1e-6, same=True)
    techniques = {"twin": twin, "same": apart(control, times * 1e-6, same=True)}
    techniques["other"] = apart(control, times * 1e-6, same=False)
    found = judge(control, twin, techniques, CONFIG)
    assert found["same"].word == word
    assert found["same"].departure is not None
    assert 10 ** found["same"].departure.mean == pytest.approx(times, rel=0.2)
    assert found["other"].word == found["twin"].word == EQUAL
    assert found["other"].departure is None


def same_bits(control: Curves) -> Curves:
    return Curves(STEPS, {seed: losses.copy() for seed, losses in control.losses.items()}, same_numerics=True)


def test_same_bits_are_equal() -> None:
    """Differences without variance do not divide by zero, and leave room for rounding."""
    random = np.random.default_rng(5)
    control, _ = experiment(random, drift=0.0)
    twin, own = same_bits(control), control.losses
    rounded = {seed: own[seed] * (1 + 1e-7 * random.standard_normal(len(STEPS))) for seed in own}
    techniques = {"twin": twin, "a": same_bits(control)}
    found = judge(control, twin, techniques, CONFIG).values()
    assert {(each.word, each.p, each.final.mean, each.speed.mean) for each in found} == {
        (EQUAL, 1.0, 0.0, 0.0)
    }
    techniques["rounded"] = Curves(STEPS, rounded, same_numerics=True)
    assert judge(control, twin, techniques, CONFIG)["rounded"].word == EQUAL


@pytest.mark.parametrize(("factor", "word"), [(1 + 1e-7, EQUAL), (1.001, DIFFERENT)])
def test_norms_depart_with_equal_losses(factor: float, word: str) -> None:
    control, _ = experiment(np.random.default_rng(8), drift=0.0)
    control = replace(same_bits(control), norms=control.losses)
    scaled = replace(control, norms={seed: factor * norms for seed, norms in control.norms.items()})
    found = judge(control, control, {"scaled": scaled}, CONFIG)["scaled"]
    assert (found.word, found.final.mean) == (word, 0.0)


@pytest.mark.parametrize(
    ("seeds", "reason"),
    [
        ([], "the twin has no curve of these seeds"),
        ([0], "interval of departure exceeds the bound; needs more seeds"),
    ],
)
def test_without_the_twin_equal_numerics_are_not_claimed(seeds: list[int], reason: str) -> None:
    control, _ = experiment(np.random.default_rng(6), drift=0.0)
    twin = replace(same_bits(control), losses={seed: control.losses[seed] for seed in seeds})
    same = same_bits(control)
    techniques = {"same": same, "other": replace(same, same_numerics=False)}
    found = judge(control, twin, techniques, CONFIG)
    assert (found["same"].word, found["same"].reason) == (UNDECIDED, reason)
    assert found["other"].word == EQUAL
    assert judge(control, None, techniques, CONFIG)["same"].word == EQUAL, "converge.twin is empty"


def test_holm_counts_every_test_of_the_table() -> None:
    """Two tests of each technique, and the departure of one with the control's numerics."""
    random = np.random.default_rng(7)
    control, techniques = experiment(random, drift=0.003)
    techniques["same"] = replace(techniques["0"], same_numerics=True)
    found = judge(control, same_bits(control), techniques, CONFIG)
    smallest = min(
        min(
            each.final.p_of_zero(),
            each.speed.p_of_zero(),
            each.departure.p_of_at_most(1.0) if each.departure else 1,
        )
        for each in found.values()
    )
    assert min(each.p for each in found.values()) == pytest.approx((2 * TECHNIQUES + 3) * smallest)


def test_estimate() -> None:
    """Mean 2, standard error 1/sqrt(3), two degrees of freedom."""
    estimate = Estimate.of([1.0, 2.0, 3.0], 0.05)
    half = 2.919986 / math.sqrt(3)
    assert (estimate.low, estimate.mean, estimate.high) == pytest.approx((2 - half, 2, 2 + half), rel=1e-6)
    assert estimate.p_of_zero() == pytest.approx(0.0742, abs=1e-4)  # t = 2 * sqrt(3)
    assert estimate.p_of_at_most(2.0) == pytest.approx(0.5)
    assert estimate.p_of_at_most(0.0) == pytest.approx(0.0742 / 2, abs=1e-4)
    assert estimate.p_of_at_most(4.0) == pytest.approx(1 - 0.0742 / 2, abs=1e-4)


def test_estimates_without_variance_or_of_one_value() -> None:
    equal, other, single = (Estimate.of(values, 0.05) for values in ([0.0] * 3, [0.1] * 3, [0.0]))
    assert equal.p_of_zero() == 1.0 and equal.is_within(-1e-9, 1e-9) and other.p_of_zero() == 0.0
    assert not single.is_within(-1e9, 1e9)
    assert single.p_of_zero() == single.p_of_at_most(-1.0) == 1.0


def test_holm() -> None:
    """The smallest p-value times 4, the next times 3, and so on; none below the one before."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
