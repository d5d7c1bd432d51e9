"""The order of a mixture's sources: counts close to the shares, and resuming."""

from __future__ import annotations

import json
from fractions import Fraction

import numpy as np
import pytest

from harness.data.mixture import SourceOrder

B = 8
WEIGHTS = {"code": 0.2, "math": 0.1, "web": 0.7}


def shares(weights: dict[str, float]) -> dict[str, Fraction]:
    exact = {name: Fraction(str(weight)) for name, weight in weights.items()}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


# Each: (first sample, weights).
RULES = [
    [(0, {"a": 1})],
    [(0, {"a": 0.5, "b": 0.5})],
    [(0, {"a": 0.7, "b": 0.3})],
    [(0, {"a": 0.999, "b": 0.001})],
    [(0, WEIGHTS)],
    [(0, {"a": 7e9, "b": 1.2e9, "c": 123456789, "d": 1, "e": 33})],
    [
        (0, {"a": 0.9, "b": 0.1, "c": 0}),
        (4000, {"a": 0.1, "b": 0.1, "c": 0.8}),
        (4100, {"a": 1, "b": 0, "c": 0}),
    ],
    [(100 * i, {"a": 100 - i, "b": i, "c": 3}) for i in range(100)],
]


@pytest.mark.parametrize("rule", RULES)
def test_counts_are_as_close_to_the_shares_as_the_rule_promises(
    rule: list[tuple[int, dict[str, float]]],
) -> None:
    """After every block, up to sample 10,000 and exactly: by at most 1 - 1/(2k - 2), Tijdeman's bound."""
    names, block = sorted(rule[0][1]), 20
    order = SourceOrder([(first, shares(weights)) for first, weights in rule], block=block, seed=3)
    bound = 1 - Fraction(1, 2 * len(names) - 2) if len(names) > 1 else 0
    targets, counts = dict.fromkeys(names, Fraction(0)), dict.fromkeys(names, 0)
    current: dict[str, Fraction] = {}
    for number in range(10_000):
        current = next((shares(weights) for first, weights in rule if first == number), current)
        source, own = order.which(number)
        name = order.names[source]
        assert own == counts[name], "every source is read in its own order"
        counts[name] += 1
        targets = {each: target + current[each] for each, target in targets.items()}
        if (number + 1) % block == 0:
            assert all(abs(counts[each] - target) <= bound for each, target in targets.items()), number
            assert order.counts(number + 1) == counts


def test_every_row_draws_every_source() -> None:
    """The rule alone would alternate: row 0 would see one of two sources only."""
    order = SourceOrder([(0, shares({"a": 1, "b": 1}))], block=B, seed=0)
    drawn = np.array([order.which(number)[0] for number in range(100 * B)]).reshape(-1, B)
    assert (drawn.sum(1) == B // 2).all(), "and every step has both in equal shares"
    assert (drawn.mean(0) > 0.3).all() and (drawn.mean(0) < 0.7).all()
    other = SourceOrder([(0, shares({"a": 1, "b": 1}))], block=B, seed=1)
    assert [other.which(number)[0] for number in range(100 * B)] != drawn.flatten().tolist()


@pytest.mark.parametrize("number", [0, 5, B, 3 * B + 1, 41 * B])
def test_the_order_resumes_anywhere(number: int) -> None:
    rule = [(0, shares(WEIGHTS)), (40 * B, shares({"code": 1, "math": 1, "web": 1}))]
    first, second = (SourceOrder(rule, block=B, seed=2) for _ in range(2))
    for before in range(number):
        first.which(before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(number))))
    assert second.counts(number) == first.counts(number)
    expected = [first.which(each) for each in range(number, number + 50)]
    assert [second.which(each) for each in range(number, number + 50)] == expected


def test_a_position_far_ahead_needs_no_replay() -> None:
    order, far = SourceOrder([(0, shares(WEIGHTS))], block=B, seed=2), 8 * 10**17
    state = order.state_dict(0) | {"samples": far}
    counts = {name: int(share * far) for name, share in shares(WEIGHTS).items()}
    order.load_state_dict(state | {"counts": counts, "block": {"first": far, "counts": counts}})
    assert [order.which(far + i)[1] for i in range(B)]
    assert order.counts(far + 10 * B) == {
        name: counts[name] + share * 8 for name, share in (("code", 2), ("math", 1), ("web", 7))
    }


def test_no_block_crosses_a_change() -> None:
    order = SourceOrder([(0, shares({"a": 1, "b": 0})), (3, shares({"a": 0, "b": 1}))], block=B, seed=0)
    assert [order.which(number)[0] for number in range(20)] == [0] * 3 + [1] * 17


def test_changed_shares_count_from_the_position_on() -> None:
    order = SourceOrder([(0, shares({"a": 9, "b": 1}))], block=B, seed=2)
    changed = SourceOrder([(0, shares({"b": 1, "c": 1}))], block=B, seed=2)
    changed.load_state_dict(order.state_dict(83))
    assert changed.counts(83) == {"b": order.counts(83)["b"], "c": 0}
    assert changed.counts(83 + 10 * B) == {"b": order.counts(83)["b"] + 5 * B, "c": 5 * B}
