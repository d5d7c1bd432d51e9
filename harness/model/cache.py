"""Keys and values of the tokens so far, so that generation computes new tokens only.

The first pass has the prompts, as in training, and stores their keys and values. Each later pass has one new
token of every sequence. Prompts of different lengths are padded at the end: no token sees the padding, and
the next token overwrites it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.config.model import AttentionSpan
from harness.model.kernels import AttentionSpec, SdpaKernel, sees

# B: sequences, T: new tokens, S: slots, H: query heads, K: key and value heads, G: query heads of a key head,
# D: head width, E: head width of values


class CachedKernel(SdpaKernel):
    """Attention that stores keys and values, and attends from new tokens to the stored ones.

    A layer with a window or chunk stores no more positions than a token attends to: position p is in slot
    p modulo the number of slots.

    Args:
        capacity: longest sequence.
    """

    def __init__(self, spec: AttentionSpec, capacity: int) -> None:
        super().__init__(spec)
        self.slots = spec.span.most_reach(capacity)
        self.keys_BKSD: Tensor | None = None
        self.values_BKSE: Tensor | None = None

    def forward(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: Any, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Compute attention; ``mask`` is a ``CachedPass``."""
        self.keys_BKSD = mask.stored(k_BTKD, self.keys_BKSD, self.slots)
        self.values_BKSE = mask.stored(v_BTKE, self.values_BKSE, self.slots)
        if mask.is_first:
            return super().forward(q_BTHD, k_BTKD, v_BTKE, mask.causal(self), sinks_H)
        return self.attend(q_BTHD, self.keys_BKSD, self.values_BKSE, mask, sinks_H)

    def store_keys(self, k_BTKD: Tensor, mask: CachedPass) -> None:
        """Store keys only, for attention whose values are part of them."""
        self.keys_BKSD = mask.stored(k_BTKD, self.keys_BKSD, self.slots)

    def attend(
        self,
        q_B1HD: Tensor,
        keys_BKSD: Tensor,
        values_BKSE: Tensor,
        mask: CachedPass,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attend from one token of each sequence to its stored tokens: [B, 1, H, E]."""
        visible_B11S, used = mask.visible(self.spec.span, self.slots)
        keys_BKSD, values_BKSE = keys_BKSD[:, :, :used], values_BKSE[:, :, :used]
        q_BKGD = q_B1HD.squeeze(1).unflatten(1, (keys_BKSD.shape[1], -1))
        scores_BKGS = (q_BKGD @ keys_BKSD.transpose(2, 3)).float() * self.spec.scale
        if visible_B11S is not None:
            scores_BKGS = scores_BKGS.masked_fill(~visible_B11S, float("-inf"))
        if sinks_H is not None:
            sinks_BKG1 = sinks_H.float().view(scores_BKGS.shape[1:3]).expand(len(q_B1HD), -1, -1).unsqueeze(3)
            scores_BKGS = torch.cat((scores_BKGS, sinks_BKG1), dim=-1)
        shares_BKGS = scores_BKGS.softmax(-1)[..., :used].type_as(values_BKSE)
        return (shares_BKGS @ values_BKSE).flatten(1, 2).unsqueeze(1)


class CachedPass:
    """One pass over new tokens of every sequence; attention gets it in place of a mask.

    Args:
        lengths: tokens of each sequence, the new ones included.
        is_first: whether the pass has the prompts.
    """

    def __init__(self, lengths: list[int], *, is_first: bool, device: torch.device) -> None:
        self.is_first, self.device = is_first, device
        self.longest, self.is_even = max(lengths), len(set(lengths)) == 1
        self.lengths_B = torch.tensor(lengths, device=device)
        self.rows_B = torch.arange(len(lengths), device=device)
        self._masks: dict[Any, Any] = {}

    @property
    def positions(self) -> Tensor:
        """Positions of the new tokens: [T] for prompts, else [B, 1]."""
        return (
            torch.arange(self.longest, device=self.device) if self.is_first else self.lengths_B[:, None] - 1
        )

    def last_of(self, x_BTC: Tensor) -> Tensor:
        """The last token of each sequence, [B, 1, C]."""
        return x_BTC[self.rows_B, self.lengths_B - 1].unsqueeze(1) if self.is_first else x_BTC

    def causal(self, kernel: SdpaKernel) -> Tensor | None:
        """The mask of the prompts; layers of equal specification share it."""
        if kernel.spec not in self._masks:
            self._masks[kernel.spec] = SdpaKernel.mask(
                kernel, None, len(self.rows_B), self.longest, self.device
            )
        return self._masks[kernel.spec]

    def stored(self, x_BTKD: Tensor, slots_BKSD: Tensor | None, slots: int) -> Tensor:
        """Store keys or values of the new tokens.

        Args:
            x_BTKD: keys or values.
            slots_BKSD: the stored ones, changed in place; the first pass makes new ones.

        Returns:
            The slots, [B, K, S, D].
        """
        if self.is_first:
            return self._store_prompts(x_BTKD.transpose(1, 2), slots)
        assert slots_BKSD is not None, "the first pass has the prompts"
        last_B = self.lengths_B - 1
        if self.is_even:
            slots_BKSD[:, :, (self.longest - 1) % slots] = x_BTKD.squeeze(1)
        else:
            slots_BKSD[self.rows_B, :, last_B % slots] = x_BTKD.squeeze(1)
        return slots_BKSD

    def _store_prompts(self, x_BKTD: Tensor, slots: int) -> Tensor:
        if self.longest <= slots:
            return F.pad(x_BKTD, (0, 0, 0, slots - self.longest))
        # The latest position of each slot, or 0 for a slot that no token has reached.
        position_BS = _latest(self.lengths_B - 1, slots).clamp(min=0)
        return x_BKTD.gather(
            2, position_BS[:, None, :, None].expand(-1, x_BKTD.shape[1], -1, x_BKTD.shape[3])
        )

    def visible(self, span: AttentionSpan, slots: int) -> tuple[Tensor | None, int]:
        """Slots that the new tokens attend to.

        Returns:
            A mask [B, 1, 1, S], None for all; and S, the number of slots in use.
        """
        used = min(self.longest, slots)
        if self.is_even and span.chunk is None:
            return None, used
        if (span, slots) not in self._masks:
            position_B1 = self.lengths_B[:, None] - 1
            position_BS = _latest(self.lengths_B - 1, slots)[:, :used]
            visible_BS = (position_BS >= 0) & sees(span, position_B1, position_BS)
            self._masks[span, slots] = visible_BS[:, None, None]
        return self._masks[span, slots], used


def _latest(position_B: Tensor, slots: int) -> Tensor:
    """The latest position in each slot [B, S] after ``position_B`` is stored; negative for empty slots."""
    slot_S = torch.arange(slots, device=position_B.device)
    position_B1 = position_B[:, None]
    return position_B1 - (position_B1 - slot_S) % slots
