"""Context parallelism: the sequence is split over ranks; only attention needs the other ranks' positions.

Everything else in a decoder works on one position at a time. So each rank selects its positions of inputs
and labels (once, where a batch enters: ``local_positions_of``) and of the rotation table. Attention gets a
kernel that exchanges keys and values with the other ranks.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd

from harness.config.parallelism import ParallelismConfig
from harness.data.loader import Batch
from harness.model.kernels import AttentionSpec, Kernel
from harness.model.part import ModelPart
from harness.parallelism.mesh import Mesh

# B: batch, T: sequence, S: sequence of one rank, H: query heads, K: key and value heads, D: head width


def apply_context_parallel(part: ModelPart, mesh: Mesh, layout: ParallelismConfig) -> None:
    """Make a model part work on this rank's positions, in place."""
    pieces, start = [], 0
    for length in part.segments:
        pieces.append(start + local_positions(layout, length, mesh.rank("cp")))
        start += length
    part.take_positions(torch.cat(pieces))
    group = mesh.group("cp")
    for module in part.kernels:
        inner, ring = module.inner, (group, layout.balances_context, layout.cp_rotate_method)
        module.inner = (
            UlyssesAttention(inner, group)
            if layout.cp_method == "ulysses"
            else RingAttention(inner.spec, *ring)
        )


def local_positions(layout: ParallelismConfig, seq_len: int, rank: int) -> Tensor:
    """Positions of the sequence that a context-parallel rank works on, in its order.

    Late positions attend to more keys than early ones. With load balancing, rank r has the r-th chunk from
    the head and the r-th from the tail, which is the same work on all ranks.
    """
    positions = torch.arange(seq_len)
    if not layout.balances_context:
        return positions.chunk(layout.cp)[rank]
    chunks = positions.chunk(2 * layout.cp)
    return torch.cat((chunks[rank], chunks[-1 - rank]))


def local_positions_of(batch: Batch, positions_S: Tensor | None) -> Batch:
    """This rank's positions of a batch; document numbers stay complete, because attention needs them all."""
    if positions_S is None:
        return batch
    return batch._replace(
        inputs_BT=batch.inputs_BT.index_select(1, positions_S),
        labels_BT=batch.labels_BT.index_select(1, positions_S),
    )


class RingAttention(Kernel):
    """Ring attention: keys and values rotate over the ranks; each rank keeps its queries."""

    def __init__(self, reach: AttentionSpec, group: dist.ProcessGroup, balanced: bool, rotation: str) -> None:
        super().__init__(reach)
        # Imported here: it needs private modules of torch, which other layouts should not depend on.
        from harness.parallelism.ring import ring_attention

        self.options = group.group_name, balanced, rotation
        self.attend = ring_attention

    def mask(self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device) -> None:
        causal = documents_BT is None and self.spec.is_causal(length) and not self.spec.has_sinks
        assert causal, "the ring supports the causal mask only: other jobs are refused"

    def forward(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: None, sinks_H: Tensor | None = None
    ) -> Tensor:
        width, value_width = q_BTHD.shape[-1], v_BTKE.shape[-1]
        # The ring's kernels scale scores by width**-0.5 and need values as wide as keys.
        q_BTHD = q_BTHD if self.spec.scale == width**-0.5 else q_BTHD * (self.spec.scale * width**0.5)
        v_BTKE = F.pad(v_BTKE, (0, width - value_width))
        q_BHTD, k_BKTD, v_BKTE = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKE))
        out_BHTE, _ = self.attend(q_BHTD, k_BKTD, v_BKTE, *self.options)
        return out_BHTE.transpose(1, 2)[..., :value_width]


class UlyssesAttention(Kernel):
    """DeepSpeed Ulysses (arXiv:2309.14509): exchange positions for heads, attend, exchange back.

    Works with any kernel: inside, each rank has some heads of the full sequence.
    """

    def __init__(self, inner: Kernel, group: dist.ProcessGroup) -> None:
        super().__init__(inner.spec)
        self.inner, self.group, self.ranks = inner, group, group.size()

    def mask(self, documents_BT: Tensor | None, batch: int, length: int, device: torch.device) -> Any | None:
        return self.inner.mask(documents_BT, batch, length, device)

    def forward(
        self, q_BTHD: Tensor, k_BTKD: Tensor, v_BTKE: Tensor, mask: Any | None, sinks_H: Tensor | None = None
    ) -> Tensor:
        # Queries, keys and values are concatenated by rank, so that one exchange suffices.
        by_rank = [t.unflatten(2, (self.ranks, -1)) for t in (q_BTHD, k_BTKD, v_BTKE)]
        shapes = [t.shape[3:] for t in by_rank]
        sent = torch.cat([t.flatten(3) for t in by_rank], dim=3).permute(2, 0, 1, 3)
        # The received positions are in the order of the ranks.
        received = self._exchange(sent).permute(1, 0, 2, 3).flatten(1, 2)
        pieces = received.split([shape.numel() for shape in shapes], dim=2)
        q, k, v = (piece.unflatten(2, shape) for piece, shape in zip(pieces, shapes, strict=True))
        sinks = None if sinks_H is None else sinks_H.chunk(self.ranks)[self.group.rank()]
        out_BTHE = self.inner(q, k, v, mask, sinks)
        sent = out_BTHE.unflatten(1, (self.ranks, -1)).permute(1, 0, 2, 3, 4)
        return self._exchange(sent).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchange(self, by_rank: Tensor) -> Tensor:
        """Send the r-th piece along the first dimension to rank r; return the pieces of all ranks."""
        pieces = by_rank.contiguous()
        return all_to_all_single_autograd(pieces, None, None, self.group).view(pieces.shape)
