"""Expert parallelism: ranks have different experts, and rows are sent to their experts.

Each rank routes its own tokens. One all-to-all sends rows to the ranks with their experts, and
another returns the outputs (GShard, arXiv:2006.16668, section 3.2). No tokens are dropped, so
message sizes vary. With ``ep_capacity`` they are fixed, and a step that needs larger ones is
refused. With tensor parallelism, either every rank of it routes its part of the sequence, or each
routes the full sequence and has a part of every expert (``expert_tensor_parallel``).
"""

from collections.abc import Mapping, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import (
    all_reduce,
    all_to_all_single,
    all_to_all_single_autograd,
    wait_tensor,
)
from torch.distributed.tensor import Partial, Placement, Replicate, Shard, distribute_tensor

from harness.config.parallelism import ParallelismConfig
from harness.model.architecture import architecture_of
from harness.model.grouped import on_host
from harness.model.moe import Experts, inverse_of, permute
from harness.model.part import ModelPart
from harness.model.spec import TensorSpec, tensors
from harness.parallelism.context import local_positions
from harness.parallelism.mesh import EXPERT, EXPERT_TENSOR, Mesh
from harness.parallelism.tensor_styles import SEQUENCE_DIM, into_stream, place

# R: rows that this rank routes, S: rows that it computes, C: residual width, E: experts, G: ranks that
# have different experts, P: places for rows in messages

THOUSANDTHS = 1000
"""Unit of ``capacity_needed``."""


def apply_expert_parallel(
    part: ModelPart, mesh: Mesh, layout: ParallelismConfig, *, plain: bool
) -> None:
    """Split the experts of a model part, in place, and set up its routers' counts; ``plain`` as there."""
    if not part.mixtures:
        return
    stream: Placement | None = None
    if not plain:
        stream = Shard(SEQUENCE_DIM) if layout.uses_sequence_parallel else Replicate()
    specs = tensors(part.config)
    architecture = architecture_of(part.config)
    for layer, moe in part.mixtures.items():
        if layout.tp > 1 and not plain:
            # Ranks route different tokens, or the same tokens to different parts of experts.
            for name, _ in list(moe.router.named_parameters()):
                place(moe.router, name, mesh.axis("tp"), None)
            moe.router.partial_gradients = {"weight": [Partial()], "bias": [Partial()]}  # type: ignore[assignment]
        if layout.ep > 1 or layout.splits_experts:
            prefix = f"{architecture.block_prefix(part.config, layer)}moe.experts."
            _split_experts(moe.experts, prefix, specs, mesh, layout)
        if layout.splits_experts:
            moe.reduce_output = partial(into_stream, mesh=mesh.axis("tp"), stream=stream)
        if layout.ep > 1:
            assert mesh.experts is not None
            group = mesh.experts.get_group(EXPERT)
            if layout.fixes_messages:
                moe.exchange = FixedExchange(group, layout)
                moe.capacity_needed = moe.exchange.capacity_needed
            else:
                moe.exchange = ExpertExchange(group)
        groups = [mesh.group("cp")] if layout.cp > 1 else []
        if layout.tp > 1 and not layout.splits_experts:
            groups.append(mesh.group("tp"))
        if groups:
            ranks = mesh.rank("cp"), mesh.rank("tp")
            moe.router.positions_T = routed_positions(layout, part.seq_len, *ranks)
            moe.router.over_sequence = partial(_summed, groups)
            moe.router.sequence_parts = prod(group.size() for group in groups)


def routed_positions(layout: ParallelismConfig, seq_len: int, cp_rank: int, tp_rank: int) -> Tensor:
    """Positions of a sequence that a rank's routers route, in order."""
    positions_T = local_positions(layout, seq_len, cp_rank)
    if layout.tp > 1 and not layout.splits_experts:
        positions_T = positions_T.chunk(layout.tp)[tp_rank]
    return positions_T


def rows_sent(layout: ParallelismConfig, num_experts: int, experts_TK: Tensor) -> Tensor:
    """Rows that each rank of a replica sends to each expert, of one sequence: int64 [groups, G, E].

    Args:
        experts_TK: experts of every position, equal in all sequences.
    """
    sent = []
    for cp_rank in range(layout.cp):
        for tp_rank in range(1 if layout.splits_experts else layout.tp):
            positions_T = routed_positions(layout, len(experts_TK), cp_rank, tp_rank)
            own = experts_TK[positions_T].flatten()
            sent.append(torch.bincount(own, minlength=num_experts))
    # Ranks of experts are neighbours, and the sequences of dp_shard are the outermost axis.
    return torch.stack(sent).repeat(layout.dp_shard, 1).unflatten(0, (-1, layout.ep))


def _split_experts(
    experts: Experts,
    prefix: str,
    specs: Mapping[str, TensorSpec],
    mesh: Mesh,
    layout: ParallelismConfig,
) -> None:
    axes = (EXPERT,) if layout.ep > 1 else ()
    by_expert: list[Placement] = [Shard(0)] if layout.ep > 1 else []
    if not layout.splits_experts:
        assert mesh.experts is not None
        on = mesh.experts[axes]
    else:
        on = mesh.axis("tp") if mesh.experts is None else mesh.experts[*axes, EXPERT_TENSOR]
        experts.output_shares = layout.tp
        experts.partial_gradients = {"b2": [*by_expert, Partial()]}  # type: ignore[assignment]
    for name, parameter in list(experts.named_parameters()):
        split = by_expert
        if layout.splits_experts:
            dim = specs[prefix + name].split_dim
            split = [*by_expert, Replicate() if dim is None else Shard(dim)]
        experts.register_parameter(name, nn.Parameter(distribute_tensor(parameter, on, split)))


def _summed(groups: list[dist.ProcessGroup], counts: Tensor) -> Tensor:
    """Sum counts over the ranks that a sequence is split over."""
    for group in groups:
        counts = all_reduce(counts, "sum", group)
    return counts


class ExpertExchange(nn.Module):
    """Sends rows to the ranks of a group that have their experts, and returns the outputs.

    Args:
        group: its r-th rank has the r-th part of the experts.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group = group
        self.ranks = group.size()

    def forward(self, x_RC: Tensor, load_E: Tensor, experts: Experts) -> Tensor:
        given = load_E.view(self.ranks, -1)
        got = wait_tensor(all_to_all_single(load_E, None, None, self.group)).view(self.ranks, -1)
        sent, arrived = self._lengths(given, got, len(x_RC))
        received = [sum(row) for row in arrived]
        padding = len(x_RC) - sum(sent)
        x_RC = x_RC[:-padding] if padding else x_RC
        x_SC = all_to_all_single_autograd(x_RC, received, sent, self.group)
        # Rows arrive by rank, then by expert.
        out_SC = experts(transposed(x_SC, arrived), got.sum(0))
        out_SC = transposed(out_SC, [*zip(*arrived, strict=True)])
        out_RC = all_to_all_single_autograd(out_SC, sent, received, self.group)
        return F.pad(out_RC, (0, 0, 0, padding)) if padding else out_RC

    def _lengths(self, given: Tensor, got: Tensor, rows: int) -> tuple[list[int], list[list[int]]]:
        """Numbers of rows to send to each rank, and to receive from it for each expert.

        The host needs them for the all-to-all: the only place where it waits for the device, once
        per layer and pass. A recomputed layer has them saved.
        """
        table = on_host(torch.cat((given.sum(1, keepdim=True), got), 1)).tolist()
        return [row[0] for row in table], [row[1:] for row in table]


def transposed(x_SC: Tensor, lengths: Sequence[Sequence[int]]) -> Tensor:
    """Rows in groups, ``lengths[a][b]`` in a group, ordered by b, then by a; a group moves as a whole."""
    columns = len(lengths[0])
    groups = x_SC.split([length for row in lengths for length in row])
    return torch.cat([group for column in range(columns) for group in groups[column::columns]])


class FixedExchange(nn.Module):
    """Like ``ExpertExchange``, with messages of a fixed size: the host needs no lengths, so it never waits.

    A message has room for ``ParallelismConfig.room_of`` rows: those for the receiver's experts, in
    order, then zeros. Rows without room are left out; ``capacity_needed`` says so, and
    ``Engine`` refuses the step.

    Args:
        group: its r-th rank has the r-th part of the experts.
    """

    def __init__(self, group: dist.ProcessGroup, layout: ParallelismConfig) -> None:
        super().__init__()
        self.group = group
        self.ranks = group.size()
        self.layout = layout

    def forward(self, x_RC: Tensor, load_E: Tensor, experts: Experts) -> Tensor:
        room = self.layout.room_of(len(x_RC))
        got = wait_tensor(all_to_all_single(load_E, None, None, self.group)).view(self.ranks, -1)
        sent_G = load_E.view(self.ranks, -1).sum(1)
        rows, places = places_in_messages(sent_G, len(x_RC), room)
        x_PC = moved(x_RC, rows, places)
        x_PC = all_to_all_single_autograd(x_PC, None, None, self.group)
        # Rows arrive by rank, then by expert.
        place_S, lengths_E = places_by_expert(got, room)
        order_S = inverse_of(place_S)
        out_SC = experts(permute(x_PC, order_S, place_S), lengths_E)
        out_PC = permute(out_SC, place_S, order_S)
        out_PC = all_to_all_single_autograd(out_PC, None, None, self.group)
        return moved(out_PC, places, rows)

    def capacity_needed(self, load_E: Tensor, rows: int) -> Tensor:
        """The capacity with which all of this rank's rows have room, in thousandths [1]; 0 if they have."""
        most = load_E.view(self.ranks, -1).sum(1).amax(0, keepdim=True)
        needed = (most * (self.ranks * THOUSANDTHS) + rows - 1) // rows
        return needed.masked_fill(most <= self.layout.room_of(rows), 0)


class Sources(NamedTuple):
    """The row that each place gets."""

    row_P: Tensor
    """Number of the row; any one where the place stays empty."""
    is_empty_P1: Tensor


def places_in_messages(length_G: Tensor, rows: int, room: int) -> tuple[Sources, Sources]:
    """Which rows are in messages of ``room`` places, and, the other way round, in which places rows are.

    Args:
        length_G: number of rows for each rank; rows are in this order, and the rest is padding.

    Returns:
        The row of each place; the place of each row, none for padding and for rows without room.
    """
    end_G = length_G.cumsum(0)
    start_G = end_G - length_G
    inside_P = torch.arange(room, device=end_G.device)
    row_GP = start_G.unsqueeze(1) + inside_P
    is_empty_GP = row_GP >= end_G.unsqueeze(1)
    row_R = torch.arange(rows, device=end_G.device)
    rank_R = torch.searchsorted(end_G, row_R, right=True)
    inside_R = row_R - F.pad(start_G, (0, 1), value=-room)[rank_R]
    last = len(end_G) * room - 1
    place_R = (rank_R * room + inside_R).clamp(max=last)
    return (
        Sources(row_GP.flatten().clamp(max=rows - 1), is_empty_GP.view(-1, 1)),
        Sources(place_R, (inside_R >= room).unsqueeze(1)),
    )


def places_by_expert(got_GE: Tensor, room: int) -> tuple[Tensor, Tensor]:
    """Where rows of messages are when they are sorted by expert, empty places last.

    Args:
        got_GE: number of rows from each rank for each of this rank's experts; those that a message had no
            room for are the last ones.

    Returns:
        The new place of each place [P], a permutation; the number of rows for each expert [E].
    """
    # The empty places of a message are those of one more expert.
    end_GE = F.pad(got_GE.cumsum(1).clamp(max=room), (0, 1), value=room)
    length_GE = torch.diff(end_GE, prepend=end_GE.new_zeros(len(end_GE), 1))
    sorted_end_EG = length_GE.T.flatten().cumsum(0).view(length_GE.T.shape)
    shift_GE = sorted_end_EG.T - end_GE
    inside_GP = torch.arange(room, device=end_GE.device).repeat(len(end_GE), 1)
    expert_GP = torch.searchsorted(end_GE, inside_GP, right=True)
    place_GP = inside_GP + shift_GE.gather(1, expert_GP)
    return place_GP.flatten(), length_GE[:, :-1].sum(0)


class _Move(torch.autograd.Function):
    """Copy rows to other places; empty places are zeros, and rows without a place get no gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        x_RC: Tensor,
        row_P: Tensor,
        is_empty_P1: Tensor,
        place_R: Tensor,
        is_left_out_R1: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(place_R, is_left_out_R1)
        return _taken(x_RC, row_P, is_empty_P1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PC: Tensor) -> tuple[Tensor | None, ...]:
        place_R, is_left_out_R1 = ctx.saved_tensors
        return _taken(grad_PC, place_R, is_left_out_R1), None, None, None, None


def _taken(x_RC: Tensor, row_P: Tensor, is_empty_P1: Tensor) -> Tensor:
    return x_RC.index_select(0, row_P).masked_fill_(is_empty_P1, 0)


def moved(x_RC: Tensor, rows: Sources, places: Sources) -> Tensor:
    """Rows in their places: ``rows`` are those of the places, and ``places`` those of the rows."""
    return _Move.apply(x_RC, *rows, *places)  # type: ignore[no-any-return]
