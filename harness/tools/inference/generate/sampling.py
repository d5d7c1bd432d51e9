"""Choose the next token of each sequence from its logits."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

# B: sequences, V: vocabulary


class Sampler:
    """Greedy choice, or sampling with a temperature from the most probable tokens.

    A sequence has a random generator of its own, so that its text depends on the seed and its number, but not
    on the other sequences or the layout.

    Args:
        temperature: logits are divided by it; 0 chooses the most probable token.
        top_k: sample from this many tokens; None: all.
        top_p: sample from the most probable tokens whose probabilities sum to at least this
            (arXiv:1904.09751).
        seed: seed of the generators.
        numbers: number of each sequence.
    """

    def __init__(
        self, temperature: float, top_k: int | None, top_p: float, seed: int, numbers: Sequence[int]
    ) -> None:
        self.temperature, self.top_k, self.top_p = temperature, top_k, top_p
        self._generators = [random.Random(f"{seed}.{number}") for number in numbers]

    def choose(self, logits_BV: Tensor) -> Tensor:
        """Return the chosen token of each sequence, int64 [B]."""
        if self.temperature == 0:
            return logits_BV.argmax(-1)
        logits_BV, tokens_BV = logits_BV.float().sort(dim=-1, descending=True, stable=True)
        # Relative to the largest, so that no quotient by a small temperature is infinity.
        logits_BV = (logits_BV - logits_BV[:, :1]).double() / self.temperature
        if self.top_k is not None:
            logits_BV, tokens_BV = logits_BV[:, : self.top_k], tokens_BV[:, : self.top_k]
        ends_BV = logits_BV.softmax(-1).cumsum(-1)
        if self.top_p < 1:
            # A token is left out if those before it already have the probability.
            starts_BV = ends_BV - logits_BV.softmax(-1)
            kept_BV = starts_BV < self.top_p
            kept_BV[:, 0] = True
            ends_BV = logits_BV.masked_fill(~kept_BV, float("-inf")).softmax(-1).cumsum(-1)
        drawn = torch.tensor([each.random() for each in self._generators])
        drawn_B1 = drawn.to(ends_BV).unsqueeze(1) * ends_BV[:, -1:]
        place_B1 = torch.searchsorted(ends_BV, drawn_B1, right=True).clamp(max=ends_BV.shape[1] - 1)
        return tokens_BV.gather(1, place_B1).squeeze(1)
