"""Context parallelism: the sequence is split over ranks; only attention needs the other ranks' positions.

Everything else in a decoder works on one position at a time. So each rank selects its positions of
inputs and labels (once, where a batch enters: ``local_positions_of``) and of the rotation table.
Attention gets a kernel that exchanges keys and values with the other ranks.

With ``cp_load_balance=documents`` a rank's positions depend on the documents of each row. All ranks
have all document numbers, and compute the same order from them.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import _functional_collectives
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group
from torch.distributed.tensor.experimental._context_parallel._attention import (
    _cp_options,
    _RotateMethod,
    _templated_ring_attention,
    _templated_ring_attention_backward,
)

from harness.config.parallelism import ParallelismConfig
from harness.data.batch import PADDING, Batch
from harness.model.kernels import AttentionSpec, Kernel, Positions, widened
from harness.model.moe import inverse_of, permute
from harness.model.part import ModelPart
from harness.parallelism.mesh import Mesh

# B: batch, T: sequence, S: sequence of one rank, H: query heads, K: key and value heads, D: head
# width


def apply_context_parallel(part: ModelPart, mesh: Mesh, layout: ParallelismConfig) -> None:
    """Make a model part work on this rank's positions, in place."""
    if not layout.balances_documents:
        pieces = []
        start = 0
        for length in part.segments:
            pieces.append(start + local_positions(layout, length, mesh.rank("cp")))
            start += length
        part.set_length(part.seq_len, torch.cat(pieces))
    group = mesh.group("cp")
    for module in part.kernels:
        if layout.cp_method == "ulysses":
            module.inner = UlyssesAttention(module.inner, group)
        elif layout.cp_method == "gather":
            module.inner = GatheredAttention(module.inner, group, layout)
        else:
            module.inner = RingAttention(module.inner.spec, group, layout)


def local_positions(layout: ParallelismConfig, seq_len: int, rank: int) -> Tensor:
    """Positions of the sequence that a context-parallel rank works on, in its order."""
    return torch.cat([torch.arange(*piece) for piece in local_pieces(layout, seq_len, rank)])


def local_pieces(layout: ParallelismConfig, seq_len: int, rank: int) -> list[tuple[int, int]]:
    """Pieces of the sequence that a context-parallel rank works on, in its order: begin and end.

    Late positions attend to more keys than early ones. With load balancing, rank r has the r-th
    chunk from the head and the r-th from the tail, which is the same work on all ranks.
    """
    numbers = [rank]
    chunks = layout.cp
    if layout.cp > 1 and layout.balances_context:
        chunks *= 2
        numbers = [rank, chunks - 1 - rank]
    length = seq_len // chunks
    return [(number * length, number * length + length) for number in numbers]


def fixed_positions(layout: ParallelismConfig, seq_len: int, rank: int) -> Tensor | None:
    """``local_positions``; None if a rank has all positions, or other ones in each row."""
    if layout.cp == 1 or layout.balances_documents:
        return None
    return local_positions(layout, seq_len, rank)


def places_within(documents_BT: Tensor) -> Tensor:
    """The place of each position within its document, from 0."""
    position_T = torch.arange(documents_BT.shape[1], device=documents_BT.device)
    begins_BT = F.pad(documents_BT.diff(dim=1) != 0, (1, 0), value=True)
    return position_T - (begins_BT * position_T).cummax(1).values


def blocks_by_rank(layout: ParallelismConfig, documents_BT: Tensor) -> Tensor:
    """Numbers of each row's blocks that each rank works on, ascending, int64 [B, ranks, blocks].

    A query's work is its place in its document: windows and chunks are not counted. Blocks are
    dealt out from the one with most work to the one with least, to the ranks there and back.
    """
    B, T = documents_BT.shape
    ranks = layout.cp
    each = layout.document_blocks(T)
    work_BG = places_within(documents_BT).unflatten(1, (ranks * each, -1)).sum(2)
    # Stable: all ranks deal out equal blocks in the same way.
    heaviest = work_BG.sort(stable=True, dim=1, descending=True).indices
    dealt = heaviest.view(B, each, ranks)
    dealt[:, 1::2] = dealt[:, 1::2].flip(2)
    return dealt.transpose(1, 2).sort(2).values


def positions_by_documents(layout: ParallelismConfig, documents_BT: Tensor, rank: int) -> Tensor:
    """Positions of each row that a rank works on, in order, [B, S]."""
    blocks_BN = blocks_by_rank(layout, documents_BT)[:, rank]
    length = documents_BT.shape[1] // layout.cp // blocks_BN.shape[1]
    within_L = torch.arange(length, device=documents_BT.device)
    return (blocks_BN.unsqueeze(2) * length + within_L).flatten(1)


class Share:
    """Selects the positions of batches that a rank works on."""

    def __init__(
        self, layout: ParallelismConfig, seq_len: int, rank: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.rank = rank
        fixed_S = fixed_positions(layout, seq_len, rank)
        self.fixed_S = None if fixed_S is None else fixed_S.to(device)

    def positions(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Positions in a batch, [S] or [B, S], None for all; and the batch with document numbers if
        they depend on them.
        """
        if not self.layout.balances_documents:
            return batch, self.fixed_S
        documents_BT = batch.documents_BT
        if documents_BT is None:
            documents_BT = torch.zeros_like(batch.inputs_BT)
            if batch.real_B is not None:
                documents_BT = documents_BT.masked_fill(~batch.real_B.unsqueeze(1), PADDING)
        positions_BS = positions_by_documents(self.layout, documents_BT, self.rank)
        return batch._replace(documents_BT=documents_BT), positions_BS


def local_positions_of(batch: Batch, positions: Tensor | None) -> Batch:
    """This rank's positions of a batch, [S] or [B, S].

    Document numbers stay complete, because attention needs them all.
    """
    if positions is None:
        return batch
    index_BS = positions.expand(len(batch.inputs_BT), -1)
    return batch._replace(
        inputs_BT=batch.inputs_BT.gather(1, index_BS),
        labels_BT=batch.labels_BT.gather(1, index_BS),
    )


def queries_of(layout: ParallelismConfig, positions: Positions, rank: int) -> list[Positions]:
    """A rank's queries, in parts that a kernel computes at once, with the keys that they see."""
    documents_BT = positions.documents_BT
    if not layout.balances_documents:
        pieces = local_pieces(layout, positions.length, rank)
        return [positions.of_queries(*piece) for piece in pieces]
    assert documents_BT is not None, "the order of documents needs their numbers"
    own_BS = positions_by_documents(layout, documents_BT, rank)
    blocks = layout.document_blocks(positions.length)
    return [positions._replace(own_BT=own_BS, pieces=blocks)]


class RingAttention(Kernel):
    """Ring attention: keys and values rotate over the ranks; each rank keeps its queries."""

    def __init__(
        self, reach: AttentionSpec, group: dist.ProcessGroup, layout: ParallelismConfig
    ) -> None:
        super().__init__(reach)
        self.options = group.group_name, layout.balances_context, layout.cp_rotate_method

    def mask(self, positions: Positions) -> None:
        limited = positions.documents_BT is not None or self.spec.has_sinks
        causal = self.spec.is_causal(positions.length) and not limited
        assert causal, "the ring supports the causal mask only: other jobs are refused"

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        width = q_BTHD.shape[-1]
        value_width = v_BTKE.shape[-1]
        # The ring's kernels scale scores by width**-0.5 and need values as wide as keys.
        q_BTHD = (
            q_BTHD if self.spec.scale == width**-0.5 else q_BTHD * (self.spec.scale * width**0.5)
        )
        v_BTKE = widened(v_BTKE, width)
        q_BHTD, k_BKTD, v_BKTE = (x.transpose(1, 2) for x in (q_BTHD, k_BTKD, v_BTKE))
        out_BHTE, _ = ring_attention(q_BHTD, k_BKTD, v_BKTE, *self.options)
        return out_BHTE.transpose(1, 2)[..., :value_width]


class UlyssesAttention(Kernel):
    """DeepSpeed Ulysses (arXiv:2309.14509): exchange positions for heads, attend, exchange back.

    Works with any kernel: inside, each rank has some heads of the full sequence.
    """

    def __init__(self, inner: Kernel, group: dist.ProcessGroup) -> None:
        super().__init__(inner.spec)
        self.inner = inner
        self.group = group
        self.ranks = group.size()

    def mask(self, positions: Positions) -> Any | None:
        return self.inner.mask(positions)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Any | None,
        sinks_H: Tensor | None = None,
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


class GatheredAttention(Kernel):
    """This rank's queries attend to the keys and values of all ranks (arXiv:2407.21783, section 3.3.2).

    Works with any kernel, mask and number of ranks. It takes the memory of all ranks' keys and values, and
    their gradients are summed in the dtype of the keys.
    """

    def __init__(self, inner: Kernel, group: dist.ProcessGroup, layout: ParallelismConfig) -> None:
        super().__init__(inner.spec)
        self.inner = inner
        self.group = group
        self.layout = layout

    def mask(self, positions: Positions) -> Any:
        """The mask of each part of this rank's queries, and ``places_of`` the documents."""
        parts = queries_of(self.layout, positions, self.group.rank())
        masks = [self.inner.mask(each) for each in parts]
        return masks, places_of(self.layout, positions.documents_BT)

    def forward(
        self,
        q_BTHD: Tensor,
        k_BTKD: Tensor,
        v_BTKE: Tensor,
        mask: Any,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        widths = [k_BTKD.shape[-1], v_BTKE.shape[-1]]
        masks, places = mask
        own_BTKD = torch.cat((k_BTKD, v_BTKE), dim=-1).contiguous()
        # Since torch 2.13; older ones are refused (mesh.py).
        gather = _functional_collectives.all_gather_single_autograd
        every = gather(own_BTKD, 0, self.group).unflatten(0, (-1, len(own_BTKD)))
        k, v = in_order(every, self.layout, places).split(widths, dim=-1)
        ends = [k.shape[1]]
        if not self.layout.balances_documents:
            # No query of a piece sees a key after its end.
            pieces = local_pieces(self.layout, k.shape[1], self.group.rank())
            ends = [end for _, end in pieces]
        queries = q_BTHD.chunk(len(masks), dim=1)
        found = [
            self.inner(q, k[:, :end], v[:, :end], own, sinks_H)
            for q, own, end in zip(queries, masks, ends, strict=True)
        ]
        return found[0] if len(found) == 1 else torch.cat(found, dim=1)


def in_order(
    by_rank: Tensor, layout: ParallelismConfig, places: tuple[Tensor, Tensor] | None = None
) -> Tensor:
    """Put all ranks' positions [ranks, B, T, ...] into the sequence's order: [B, ranks * T, ...].

    Args:
        places: ``places_of`` the documents, if the order depends on them.
    """
    if places is not None:
        ranks, B, T = by_rank.shape[:3]
        blocks = by_rank.reshape(places[0].shape[0], -1)
        return permute(blocks, *places).view(B, ranks * T, *by_rank.shape[3:])
    if layout.balances_context:
        heads, tails = by_rank.chunk(2, dim=2)
        by_rank = torch.cat((heads, tails.flip(0)))
    return by_rank.transpose(0, 1).flatten(1, 2)


def places_of(
    layout: ParallelismConfig, documents_BT: Tensor | None
) -> tuple[Tensor, Tensor] | None:
    """Where all rows' blocks are among those of all ranks [ranks, B, blocks], and the inverse.

    None if the order does not depend on documents.
    """
    if documents_BT is None or not layout.balances_documents:
        return None
    blocks_BRN = blocks_by_rank(layout, documents_BT)
    B, ranks, each = blocks_BRN.shape
    rows = torch.arange(B, device=documents_BT.device)[:, None, None]
    # From the order of ranks to that of the sequence.
    inverse = (rows * ranks * each + blocks_BRN).transpose(0, 1).flatten()
    return inverse_of(inverse), inverse


# Ring attention as one custom operator. torch implements causal ring attention in
# `_templated_ring_attention`: keys and values rotate over the ranks and partial results are merged
# by their log-sum-exps (arXiv:2310.01889). Its public interface replaces
# scaled_dot_product_attention for the entire process, and supports CUDA kernels only. So the
# function is called directly here, with the kernel of the device, as one operator that is opaque to
# compile and recomputation. Keys and values are sent without being repeated for grouped queries.

aten = torch.ops.aten

ROTATIONS = {"allgather": _RotateMethod.ALL_GATHER, "alltoall": _RotateMethod.ALL_TO_ALL}
SEQUENCE_DIM = 2


@torch.library.custom_op("harness::ring_attention", mutates_args=())
def ring_attention(
    q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, group: str, balanced: bool, rotation: str
) -> tuple[Tensor, Tensor]:
    """Causal attention of this rank's queries to the keys and values of all ranks of a group.

    Args:
        group: name of the process group.
        balanced: whether each rank has one chunk of the sequence's head and one of its tail; else
            rank r has the r-th chunk.
        rotation: a value of parallelism.cp_rotate_method.

    Returns:
        The output [B, H, T, D], and the log-sum-exp of every row, [B, H, T] in float32.
    """
    _set_options(balanced, rotation)
    out, lse = _templated_ring_attention(
        _resolve_process_group(GroupName(group)),
        SEQUENCE_DIM,
        _attend,  # type: ignore[arg-type]
        q_BHTD,
        k_BKTD,
        v_BKTD,
        is_causal=True,
    )
    return out.contiguous(), lse.contiguous()


@ring_attention.register_fake
def _(q_BHTD: Tensor, *_others: Any) -> tuple[Tensor, Tensor]:
    return q_BHTD.new_empty(q_BHTD.shape), q_BHTD.new_empty(q_BHTD.shape[:-1], dtype=torch.float32)


@torch.library.custom_op("harness::ring_attention_backward", mutates_args=())
def ring_attention_backward(
    grad_out: Tensor,
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    out: Tensor,
    lse: Tensor,
    group: str,
    balanced: bool,
    rotation: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this rank's queries, keys and values."""
    _set_options(balanced, rotation)
    grad_q, grad_k, grad_v = _templated_ring_attention_backward(
        _resolve_process_group(GroupName(group)),
        SEQUENCE_DIM,
        _attend_backward,  # type: ignore[arg-type]
        grad_out.contiguous(),
        "grad_out",
        q_BHTD,
        k_BKTD,
        v_BKTD,
        out,
        lse,
        is_causal=True,
    )
    # These two share one buffer, and an operator's outputs must not overlap.
    return grad_q.contiguous(), grad_k.clone(), grad_v.clone()


@ring_attention_backward.register_fake
def _(grad_out: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in saved[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, *output)


def _differentiate(ctx: Any, grad_out: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    return (*ring_attention_backward(grad_out, *ctx.saved_tensors, *ctx.options), None, None, None)


ring_attention.register_autograd(_differentiate, setup_context=_save)


def _set_options(balanced: bool, rotation: str) -> None:
    _cp_options.enable_load_balance = balanced
    _cp_options.rotate_method = ROTATIONS[rotation]


LSE_ROWS = 32
"""The memory-efficient kernel pads its log-sum-exps to a multiple of this many rows."""


def _attend(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor]:
    """One step of the ring: output and log-sum-exps, by the kernel of the device and dtype."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal)
    if q.dtype != torch.float32:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[:2]
    k, v = _for_all_heads(q, k, v)
    out, lse = aten._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal)[:2]
    return out, lse[:, :, : q.shape[2]]


def _attend_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    grad_out: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of one step; output and log-sum-exps are those of all steps combined."""
    given = grad_out, query, key, value, out, logsumexp
    if query.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, is_causal)
    if query.dtype != torch.float32:
        # The None arguments are sequence boundaries (varlen only); random states are read for
        # dropout only.
        unused = torch.empty(0, dtype=torch.uint64, device=query.device)
        lengths = None, None, query.shape[2], key.shape[2]
        return aten._scaled_dot_product_flash_attention_backward(
            *given, *lengths, 0.0, is_causal, unused, unused
        )
    whole = _for_all_heads(query, key, value)
    lse = F.pad(logsumexp, (0, -logsumexp.shape[2] % LSE_ROWS), value=float("inf"))
    unused = torch.empty((), dtype=torch.int64, device=query.device)
    needed = [True, True, True, False]
    grad_q, *grads, _ = aten._scaled_dot_product_efficient_attention_backward(
        grad_out, query, *whole, None, out, lse, unused, unused, 0.0, needed, is_causal
    )
    return grad_q, *(grad.unflatten(1, (key.shape[1], -1)).sum(2) for grad in grads)


def _for_all_heads(q: Tensor, *shared: Tensor) -> list[Tensor]:
    """Keys and values repeated for every query head: the memory-efficient kernel has no grouped queries."""
    return [each.repeat_interleave(q.shape[1] // each.shape[1], dim=1) for each in shared]
