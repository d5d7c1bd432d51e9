"""Context parallelism of Gated DeltaNet: fragments of a sequence compute alone, then exchange their states.

The state after a fragment is a linear function of the state before it. A rank computes both parts of
this function in one scan, by further columns of the state that begin as the identity: the state that
the fragment makes from nothing, and the matrix that earlier states are multiplied by. All ranks gather
these of all fragments, and compose the state before each of their own. Convolutions need the last
inputs of the fragment before. Both are small, and do not grow with the sequence.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives

from harness.config.parallelism import ParallelismConfig
from harness.model.delta import DeltaRule
from harness.model.kernels import Positions
from harness.model.part import ModelPart
from harness.parallelism.context import in_order, local_pieces
from harness.parallelism.mesh import Mesh

# B: batch, F: fragments of a rank, M: fragments of this rank of all sequences (B x F), N: fragments of a
# sequence, T: positions, W: width of a convolution, H: value heads, D: width of keys, E: width of values,
# R: channels with a decay of their own


def split_scans(part: ModelPart, mesh: Mesh, layout: ParallelismConfig) -> None:
    """Make the layers of Gated DeltaNet of a model part work on this rank's positions, in place."""
    group = mesh.group("cp")
    for module in part.scans:
        module.inner = FragmentedDelta(module.inner, group, layout)


class FragmentedDelta(DeltaRule):
    """The operation on this rank's fragments: consecutive positions each, as ``local_pieces`` has them."""

    def __init__(
        self, inner: DeltaRule, group: dist.ProcessGroup, layout: ParallelismConfig
    ) -> None:
        super().__init__(inner.spec)
        self.rule = inner.rule
        self.group = group
        self.layout = layout
        # Of sequences with one position in each fragment.
        self.fragments = 2 if layout.balances_context else 1
        pieces = local_pieces(layout, self.fragments * group.size(), group.rank())
        self.numbers = [begin for begin, _ in pieces]

    def mask(self, positions: Positions) -> Any | None:
        documents_BT = super().mask(positions)
        if documents_BT is None:
            return None
        pieces = local_pieces(self.layout, positions.length, self.group.rank())
        own = [documents_BT[:, begin : end + self.spec.kernel - 1] for begin, end in pieces]
        return torch.stack(own, 1).flatten(0, 1)

    def forward(
        self,
        streams: tuple[Tensor, ...],
        kernels: tuple[Tensor, ...],
        decay_BTHR: Tensor,
        beta_BTH: Tensor,
        mask: Any | None,
    ) -> Tensor:
        of_fragments = tuple(map(self._cut, streams))
        before = self._inputs_before(of_fragments)
        E = self.spec.value_head_dim
        D = self.spec.key_head_dim
        M = len(of_fragments[0])
        identity_DS = F.pad(torch.eye(D, device=decay_BTHR.device, dtype=decay_BTHR.dtype), (E, 0))
        start_MHDS = identity_DS.expand(M, decay_BTHR.shape[2], -1, -1)
        gates = self._cut(decay_BTHR), self._cut(beta_BTH)
        out_MTHS, last_MHDS = self.scan(of_fragments, kernels, *gates, mask, before, start_MHDS)
        state_MHDE = self._states_before(last_MHDS)
        made_MTHE, read_MTHD = out_MTHS.split([E, D], dim=-1)
        out_MTHE = made_MTHE + torch.einsum("mthd,mhde->mthe", read_MTHD, state_MHDE)
        out_BTHE = out_MTHE.unflatten(0, (-1, self.fragments)).flatten(1, 2)
        return out_BTHE.type_as(streams[0])

    def _cut(self, x_BTC: Tensor) -> Tensor:
        return x_BTC.unflatten(1, (self.fragments, -1)).flatten(0, 1)

    def _inputs_before(self, streams: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The last inputs of the convolutions in the fragment before each of this rank's."""
        last = [x_MTC[:, 1 - self.spec.kernel :] for x_MTC in streams]
        last_BNWC = self._of_all(torch.cat(last, dim=-1))
        # Before the first fragment there is nothing.
        before_BNWC = F.pad(last_BNWC[:, :-1], (0, 0, 0, 0, 1, 0))
        before_MWC = self._own(before_BNWC)
        return before_MWC.split([x_MTC.shape[-1] for x_MTC in streams], dim=-1)

    def _states_before(self, last_MHDS: Tensor) -> Tensor:
        """The states before this rank's fragments."""
        widths = [self.spec.value_head_dim, self.spec.key_head_dim]
        made_BNHDE, factor_BNHDD = self._of_all(last_MHDS).split(widths, dim=-1)
        states = [torch.zeros_like(made_BNHDE[:, 0])]
        for number in range(made_BNHDE.shape[1] - 1):
            states.append(made_BNHDE[:, number] + factor_BNHDD[:, number] @ states[-1])
        return self._own(torch.stack(states, dim=1))

    def _of_all(self, own_M: Tensor) -> Tensor:
        """Of the fragments of all ranks, in the order of the sequence, [B, N, ...]."""
        own_BF = own_M.unflatten(0, (-1, self.fragments)).contiguous()
        # Since torch 2.13; older ones are refused (mesh.py).
        gather = _functional_collectives.all_gather_single_autograd
        return in_order(gather(own_BF, 0, self.group).unflatten(0, (-1, len(own_BF))), self.layout)

    def _own(self, of_all_BN: Tensor) -> Tensor:
        """Of this rank's fragments. All ranks depend on all fragments, so that their backwards have the
        same collectives: also the first rank, which needs nothing of the others."""
        of_all = of_all_BN.unbind(1)
        return torch.stack([of_all[number] for number in self.numbers], dim=1).flatten(0, 1)
