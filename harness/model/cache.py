"""Keys, values and states of the tokens so far, so that generation computes new tokens only.

The first pass has the prompts, as in training, and stores their keys and values. Each later pass
has one new token of every sequence. Prompts of different lengths are padded at the end: no token
sees the padding, and the next token overwrites it. Shapes of a later pass do not depend on the
lengths, and the host knows none.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.model.delta import DeltaRule
from harness.model.kernels import AttentionSpec, Positions, SdpaKernel, capped, sees

# B: sequences, T: new tokens, S: slots, H: query heads, K: key and value heads, G: query heads of a
# key head, D: head width, E: head width of values


class Slots(NamedTuple):
    """What layers of equal specification store and see in one pass; attention gets it in place of a mask.

    Attributes:
        is_first: whether the pass has the prompts.
        visible: of prompts the mask; of one token what is added to the scores of slots, float32 [B,
            1, 1, S].
        place: the new token's slot, [B, 1]; of prompts the position that each slot stores, [B, S],
            None if slot p stores position p.
    """

    is_first: bool
    visible: Tensor | None
    place: Tensor | None


class CachedKernel(SdpaKernel):
    """Attention that stores keys and values, and attends from new tokens to the stored ones.

    A layer with a window or chunk stores no more positions than a token attends to: position p is
    in slot p modulo the number of slots.

    Args:
        capacity: longest sequence.
    """

    def __init__(self, spec: AttentionSpec, capacity: int) -> None:
        super().__init__(spec)
        self.slots = spec.span.most_reach(capacity)
        self.keys_BKSD: Tensor | None = None
        self.values_BKSE: Tensor | None = None

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Any,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Compute attention, and store keys and values; ``mask`` is ``Slots``."""
        keys_BKSD = self.store_keys(k_BTKD, mask)
        self.values_BKSE = _stored(self.values_BKSE, v_BTKE, self.slots, mask)
        if mask.is_first:
            return super().forward(q_BTHD, k_BTKD, v_BTKE, mask.visible, sinks_H)
        return self.attend(q_BTHD, keys_BKSD, self.values_BKSE, mask, sinks_H)

    def store_keys(self, k_BTKD: Tensor, new: Slots) -> Tensor:
        """Store keys; return those of all slots. They are all there is if values are part of them."""
        self.keys_BKSD = _stored(self.keys_BKSD, k_BTKD, self.slots, new)
        return self.keys_BKSD

    def attend(
        self,
        q_B1HD: Tensor,
        keys_BKSD: Tensor,
        values_BKSE: Tensor,
        new: Slots,
        sinks_H: Any = None,
    ) -> Tensor:
        """Attend from one token of each sequence to its stored tokens: [B, 1, H, E]."""
        assert new.visible is not None
        q_BKGD = q_B1HD.squeeze(1).unflatten(1, (keys_BKSD.shape[1], -1))
        products_BKGS = q_BKGD @ keys_BKSD.transpose(2, 3)
        if self.spec.cap is None:
            # Sum and product are computed in float32, by one kernel.
            scores_BKGS = torch.add(new.visible, products_BKGS, alpha=self.spec.scale)
        else:
            scores_BKGS = new.visible + capped(
                products_BKGS.float() * self.spec.scale, self.spec.cap
            )
        if sinks_H is not None:
            sinks_BKG1 = (
                sinks_H.float()
                .view(scores_BKGS.shape[1:3])
                .expand(len(q_B1HD), -1, -1)
                .unsqueeze(3)
            )
            scores_BKGS = torch.cat((scores_BKGS, sinks_BKG1), dim=-1)
        shares_BKGS = scores_BKGS.softmax(-1)[..., : self.slots].type_as(values_BKSE)
        return (shares_BKGS @ values_BKSE).flatten(1, 2).unsqueeze(1)


def _stored(slots_BKSD: Tensor | None, x_BTKD: Tensor, slots: int, new: Slots) -> Tensor:
    """Store keys or values of new tokens, in place if there are slots for so many sequences."""
    x_BKTD = x_BTKD.transpose(1, 2)
    place = new.place
    B, K, T, D = x_BKTD.shape
    if new.is_first and (slots_BKSD is None or len(slots_BKSD) != B):
        slots_BKSD = x_BTKD.new_zeros(B, K, slots, D)
    assert slots_BKSD is not None, "the first pass has the prompts"
    if place is None:
        slots_BKSD[:, :, :T] = x_BKTD
        return slots_BKSD
    place_BKND = place[:, None, :, None].expand(-1, K, -1, D)
    if new.is_first:
        return slots_BKSD.copy_(x_BKTD.gather(2, place_BKND))
    return slots_BKSD.scatter_(2, place_BKND, x_BKTD)


class CachedDelta(DeltaRule):
    """Gated DeltaNet that stores its state and the last inputs of its convolutions; a token is a step."""

    state_BHDE: Tensor | None = None
    inputs_BWC: Tensor | None = None

    def forward(
        self,
        streams: tuple[Tensor, ...],
        kernels: tuple[Tensor, ...],
        decay_BTHR: Tensor,
        beta_BTH: Tensor,
        mask: Any,
    ) -> Tensor:
        """Compute the operation after the tokens so far; ``mask`` is the ``CachedPass``."""
        x_BTC = torch.cat(streams, dim=-1)
        width = self.spec.kernel - 1
        state_BHDE = self.state_BHDE
        before_BWC = self.inputs_BWC
        last_B1 = torch.zeros_like(mask.last_B[:, None])
        if mask.prompts is not None or before_BWC is None:
            state_BHDE = None
            before_BWC = x_BTC.new_zeros(len(x_BTC), width, x_BTC.shape[2])
            last_B1 = mask.last_B[:, None]
            # Padding after a prompt leaves the state as it is.
            is_padding_BT1 = (mask.positions > last_B1).unsqueeze(-1)
            decay_BTHR = decay_BTHR.masked_fill(is_padding_BT1.unsqueeze(-1), 0)
            beta_BTH = beta_BTH.masked_fill(is_padding_BT1, 0)
        earlier = before_BWC.split([each.shape[2] for each in streams], dim=-1)
        out_BTHE, state_BHDE = self.scan(
            streams, kernels, decay_BTHR, beta_BTH, None, earlier, state_BHDE
        )
        place_BW = last_B1 + torch.arange(1, width + 1, device=x_BTC.device)
        inputs_BTC = torch.cat((before_BWC, x_BTC), dim=1)
        last_BWC = inputs_BTC.take_along_dim(place_BW.unsqueeze(-1), 1)
        self.state_BHDE = _in_place(self.state_BHDE, state_BHDE)
        self.inputs_BWC = _in_place(self.inputs_BWC, last_BWC)
        return out_BTHE.type_as(x_BTC)


def _in_place(held: Tensor | None, new: Tensor) -> Tensor:
    """New values, in the memory of those before if there are as many: a captured pass reads there."""
    return new if held is None or held.shape != new.shape else held.copy_(new)


class CachedPass:
    """One pass over new tokens of every sequence.

    Args:
        lengths_B: tokens of each sequence, the new ones included.
        prompts: number of tokens of a padded prompt; None: the pass has one token of each sequence.
    """

    def __init__(self, lengths_B: Tensor, prompts: int | None = None) -> None:
        self.last_B = lengths_B - 1
        self.prompts = prompts

    @property
    def positions(self) -> Tensor:
        """Positions of the new tokens: [T] for prompts, else [B, 1]."""
        if self.prompts is None:
            return self.last_B[:, None]
        return torch.arange(self.prompts, device=self.last_B.device)

    def last_of(self, x_BTC: Tensor) -> Tensor:
        """The last token of each sequence, [B, 1, C]."""
        if self.prompts is None:
            return x_BTC
        return x_BTC.gather(1, self.last_B[:, None, None].expand(-1, 1, x_BTC.shape[2]))

    def slots_of(self, kernel: CachedKernel) -> Slots:
        """What layers with this kernel's specification store and see."""
        last_B1 = self.last_B[:, None]
        slots = kernel.slots
        # The latest position in each slot after the new ones are stored; negative for empty slots.
        slot_S = torch.arange(slots, device=last_B1.device)
        position_BS = last_B1 - (last_B1 - slot_S) % slots
        if self.prompts is not None:
            prompts = Positions(None, len(last_B1), self.prompts, last_B1.device)
            visible = kernel.mask(prompts)
            return Slots(True, visible, None if self.prompts <= slots else position_BS.clamp(min=0))
        seen_BS = (position_BS >= 0) & sees(kernel.spec.span, last_B1, position_BS)
        hidden_BS = torch.zeros(seen_BS.shape, device=last_B1.device).masked_fill(
            ~seen_BS, float("-inf")
        )
        return Slots(False, hidden_BS[:, None, None], last_B1 % slots)
