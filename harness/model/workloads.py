"""Workloads of experts: which experts tokens go to, regardless of scores, for measurements.

A choice is a function of the workload's name, the seed, the step, the layer and the token's
position in its sequence. So it is the same on every layout, and known without the model: plans and
tests count rows with the function that routers call. Its arithmetic is that of integers, but for
4,096 logarithms.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

IN_TURN = "in_turn"
"""The workload of ``model.moe.force_balance``; the others are those of ``debug.routing``."""
_MASK = 2**31 - 1
_DRAWS = 4096

# T: positions, K: experts of a token, E: experts


@dataclass(frozen=True)
class Workload:
    """The experts of positions in one layer. Routers have tensors as ``key`` and ``step``."""

    name: str
    num_experts: int
    top_k: int
    key: int | Tensor = 0
    """``key_of`` the layer; as a tensor, so that layers share compiled code."""
    step: int | Tensor = 1
    """Step of training, from 1; as a tensor, it is changed in place."""

    def choose(self, positions_T: Tensor) -> Tensor:
        """The experts of positions, int64 [T, K], none twice, without a wait for the device.

        Experts race for each position: their times are exponential, the longer the smaller their
        weight, and the first K are chosen.
        """
        device = positions_T.device
        if self.name == IN_TURN:
            turns_TK = positions_T.unsqueeze(1) * self.top_k
            turns_TK = turns_TK + torch.arange(self.top_k, device=device)
            return turns_TK % self.num_experts
        experts_E = torch.arange(self.num_experts, device=device)
        key_T = _mixed(_mixed(self.key, self.step), positions_T)
        draws_TE = _mixed(key_T.unsqueeze(1), experts_E) % _DRAWS
        # No logarithm is closer than 1e-4 to the middle of two integers, so devices agree.
        times_TE = draws_TE.double().add(0.5).div(_DRAWS).log().mul(-(2**18)).round().long()
        # If times are equal, the number of the expert decides.
        ends_TE = times_TE * self._slowness(experts_E) * self.num_experts + experts_E
        return ends_TE.topk(self.top_k, largest=False, sorted=False).indices

    def _slowness(self, experts_E: Tensor) -> Tensor:
        """The reciprocal of each expert's weight; 0: it is always chosen."""
        if self.name == "uniform":
            return torch.ones_like(experts_E)
        if self.name == "one_hot":
            return (experts_E > 0).long()
        first = self.step - 1 if self.name == "drifting" else 0
        return (experts_E - first) % self.num_experts + 1


def key_of(seed: int, layer: int) -> int:
    """What makes the choices of a run and a layer its own."""
    return int(_mixed(seed & _MASK, layer))


def _mixed(state: int | Tensor, value: int | Tensor) -> Tensor:
    """Hash a hash and a number, both of 31 bits."""
    state = state ^ value
    for factor in (0x7FEB352D, 0x846CA68B):
        state = (state ^ (state >> 16)) * factor & _MASK
    return state ^ (state >> 15)  # type: ignore[return-value]
