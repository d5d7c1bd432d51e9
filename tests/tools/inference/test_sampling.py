"""Sampling: frequencies, filters, and independence of the other sequences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.tools.inference.decode import Sampler

LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, -2.0])


def drawn(count: int, **options: float | int | None) -> Tensor:
    """Frequencies of each token in ``count`` draws, a tenth for each of ten sequences."""
    given = {"temperature": 1.0, "top_k": None, "top_p": 1.0, **options}
    sampler = Sampler(seed=1, numbers=range(10), **given)  # type: ignore[arg-type]
    tokens = torch.cat([sampler.choose(LOGITS.expand(10, -1)) for _ in range(count // 10)])
    return tokens.bincount(minlength=len(LOGITS)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_the_probabilities(temperature: float) -> None:
    wanted = (LOGITS / temperature).softmax(-1)
    assert (drawn(4000, temperature=temperature) - wanted).abs().max() < 0.03


def test_temperature_zero_is_greedy() -> None:
    assert drawn(10, temperature=0.0)[0] == 1
    assert drawn(10, temperature=1e-42)[0] == 1


def test_top_k_and_top_p() -> None:
    probabilities = LOGITS.softmax(-1)
    kept = probabilities[:2] / probabilities[:2].sum()
    assert (drawn(4000, top_k=2)[:2] - kept).abs().max() < 0.03
    assert drawn(500, top_k=2)[2:].sum() == 0
    # The first token has 0.636 of the probability, the first two 0.870.
    assert drawn(200, top_p=0.6)[0] == 1
    assert (drawn(4000, top_p=0.7)[:2] - kept).abs().max() < 0.03
    assert drawn(500, top_p=0.7)[2:].sum() == 0


def test_a_sequence_does_not_depend_on_the_others() -> None:
    logits = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    together, alone = (Sampler(1.0, None, 1.0, 7, numbers) for numbers in ([4, 5, 6], [5]))
    for _ in range(20):
        assert together.choose(logits)[1] == alone.choose(logits[1:2])[0]


def test_seeds_differ() -> None:
    logits = torch.zeros(1, 1000)
    tokens = {Sampler(1.0, None, 1.0, seed, [0]).choose(logits).item() for seed in range(20)}
    assert len(tokens) > 15
