"""Times of passes: bubbles match the schedules' papers, and no pass starts before its inputs are ready."""

from __future__ import annotations

import pytest

from harness.config.parallelism import ParallelismConfig
from harness.tools.plan.order import pipeline_order, sends_of_ranks, simulate
from harness.tools.plan.plan import Action

FORWARD, BACKWARD = 1.0, 2.0


def span(name: str, pp: int, microbatches: int, stages_per_rank: int, send: float = 0.0) -> float:
    """Duration of a schedule if all stages together take 3 seconds times pp."""
    order = pipeline_order(ParallelismConfig(pp=pp, pp_schedule=name), 64, microbatches)
    each = {"F": FORWARD, "B": BACKWARD, "I": BACKWARD / 2, "W": BACKWARD / 2}
    timed = simulate(order, lambda action: each[action.kind] / stages_per_rank, send)
    return max(actions[-1].end for actions in timed)


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
@pytest.mark.parametrize(("pp", "microbatches"), [(2, 2), (4, 8), (8, 32)])
def test_one_stage_each(name: str, pp: int, microbatches: int) -> None:
    """(m + p - 1) passes there and back (arXiv:1811.06965; arXiv:2104.04473, section 2.2)."""
    assert span(name, pp, microbatches, 1) == (microbatches + pp - 1) * (FORWARD + BACKWARD)


@pytest.mark.parametrize(("pp", "microbatches"), [(2, 4), (4, 8), (8, 32)])
def test_two_stages_each_halve_the_bubble(pp: int, microbatches: int) -> None:
    """arXiv:2104.04473, section 2.2.2."""
    bubble = span("Interleaved1F1B", pp, microbatches, 2) - microbatches * (FORWARD + BACKWARD)
    assert bubble == (pp - 1) * (FORWARD + BACKWARD) / 2


def test_splitting_backward_fills_the_bubble() -> None:
    """arXiv:2401.10241: with equal thirds, ZBV's only bubble is the first microbatch's forward."""
    spans = {
        name: span(name, 4, 16, 2) for name in ("Interleaved1F1B", "InterleavedZeroBubble", "ZBVZeroBubble")
    }
    assert spans["ZBVZeroBubble"] <= spans["InterleavedZeroBubble"] < spans["Interleaved1F1B"]
    assert spans["ZBVZeroBubble"] - 16 * (FORWARD + BACKWARD) <= 3 * FORWARD / 2


def test_sending_adds_latency_at_both_ends_only() -> None:
    base, far = span("1F1B", 4, 32, 1), span("1F1B", 4, 32, 1, send=0.1)
    assert 2 * 3 * 0.1 <= far - base <= 2 * 3 * 0.1 + 0.1 * 32 * 2


def test_passes_wait_for_their_inputs() -> None:
    order = [
        [Action(0, "F", 0), Action(0, "B", 0)],
        [Action(1, "F", 0), Action(1, "I", 0), Action(1, "W", 0)],
    ]
    first, second = simulate(order, lambda action: {"F": 1.0, "B": 4.0, "I": 2.0, "W": 2.0}[action.kind], 0.5)
    assert [(a.start, a.end) for a in first] == [(0.0, 1.0), (5.0, 9.0)]
    assert [(a.start, a.end) for a in second] == [(1.5, 2.5), (2.5, 4.5), (4.5, 6.5)]


def test_ranks_that_wait_for_each_other_are_found() -> None:
    order = [[Action(0, "B", 0), Action(0, "F", 0)]]
    with pytest.raises(ValueError, match="deadlocks"):
        simulate(order, lambda action: 1.0, 0.0)


@pytest.mark.parametrize(
    ("name", "stages_per_rank", "sends"),
    [
        ("1F1B", 1, [8, 16, 16, 8]),
        ("Interleaved1F1B", 2, [24, 32, 32, 24]),
        ("ZBVZeroBubble", 2, [16, 32, 32, 16]),
    ],
)
def test_sends_of_every_rank(name: str, stages_per_rank: int, sends: list[int]) -> None:
    """Eight microbatches: a stage sends each once to a neighbour, unless the neighbour is on the same rank.

    In a V the first rank has the first and the last stage, and the last rank the two in the middle.
    """
    order = pipeline_order(ParallelismConfig(pp=4, pp_schedule=name), 4 * stages_per_rank * 2, 8)
    assert sends_of_ranks(order) == sends
