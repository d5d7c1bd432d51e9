"""Muon on any layout: every matrix is orthogonalized once, by one of the ranks that hold pieces of it.

Parameters, gradients and momentum stay sharded. For each matrix the ranks send their pieces of the
update to its owner, which orthogonalizes the complete matrix and sends every rank its piece back.
Each direction is one all-to-all for all matrices of a round. Per step a rank sends about
(1 + 1/replicas) times the size of its shards. With an all-gather to every rank it would send its
shards to each of them. Replicas share the matrices too. The orthogonalized matrix does not depend
on the layout.
"""

from __future__ import annotations

import itertools
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate

from harness.config.optimizer import NEWTON_SCHULZ_STEPS
from harness.optimizer.assignment import Matrices, MatrixGroup, assign
from harness.optimizer.base import OwnOptimizer, local
from harness.parallelism.materialize import shard_ranges
from harness.precision.swap import plain

# Newton-Schulz iteration of Muon (Jordan et al., kellerjordan.github.io/posts/muon).

COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""a, b and c of the polynomial a x + b x^3 + c x^5 (github.com/KellerJordan/Muon, muon.py). Singular values
come close to 1 and do not reach it: about 0.7 to 1.2 after five steps."""
EPS = 1e-7
"""Smallest norm that a matrix is divided by (torch.optim.Muon)."""

# B: matrices, O: outputs, I: inputs, M: the smaller of these, N: the larger


def orthogonalize(x_BOI: Tensor) -> Tensor:
    """Replace the singular values of each matrix by values near 1, in the dtype of the matrices.

    Besides the matrices it allocates a tensor of their size and two of [B, M, M].

    Args:
        x_BOI: matrices; overwritten.
    """
    if len(x_BOI) > 1 and x_BOI.device.type == "cpu":
        # On CPUs batched products of bfloat16 are slower than single ones by orders of magnitude.
        for x_1OI in x_BOI.split(1):
            x_1OI.copy_(orthogonalize(x_1OI))
        return x_BOI
    a, b, c = COEFFICIENTS
    tall = x_BOI.shape[1] > x_BOI.shape[2]
    x = x_BOI
    other = torch.empty_like(x_BOI)
    if tall:
        x = x.mT
        other = other.mT
    # The 2-norm of the elements is at least the largest singular value.
    x.div_(torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp_(min=EPS))
    gram = x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    polynomial = torch.empty_like(gram)
    multiply = torch.bmm
    add_product = torch.baddbmm
    if len(x) == 1:
        multiply = torch.mm
        add_product = torch.addmm  # type: ignore[assignment]
        x, other, gram, polynomial = (each[0] for each in (x, other, gram, polynomial))
    for _ in range(NEWTON_SCHULZ_STEPS):
        multiply(x, x.mT, out=gram)
        add_product(gram, gram, gram, beta=b, alpha=c, out=polynomial)
        add_product(x, polynomial, x, beta=a, out=other)
        x, other = other, x
    x = x if x.ndim == 3 else x.unsqueeze(0)
    return x.mT if tall else x


MOMENTUM = "momentum_buffer"


class Muon(OwnOptimizer):
    """Muon with Nesterov's momentum, for matrices and for stacks of matrices.

    One process computes what torch.optim.Muon does. Momentum and parameters are updated in float32
    and rounded to their dtypes.

    Args:
        momentum: decay of the running mean of gradients.
        dtype: dtype of the iterations, and of the pieces that ranks send.
        scale: factor of the learning rate, from the shape of a matrix (``lr_scale``).
        group: the ranks that hold pieces of these parameters; None for one rank. All of them
            construct the optimizer, and call ``step``, together.
    """

    def __init__(
        self,
        groups: Iterable[dict[str, Any]],
        lr: float,
        state_dtype: torch.dtype,
        *,
        momentum: float,
        dtype: torch.dtype,
        scale: Callable[[int, int], float],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(groups, lr, state_dtype)
        self.momentum = momentum
        self.dtype = dtype
        self.group = group
        self.ranks = 1 if group is None else group.size()
        self.rank = 0 if group is None else group.rank()
        find = cache(partial(_find_holders, group))
        self.tensors: list[_Held] = []
        for index, settings in enumerate(self.param_groups):
            self.tensors += [
                _Held(parameter, index, scale, find) for parameter in settings["params"]
            ]
        self.rounds: list[_Round] = []
        self.local_rounds: list[list[MatrixGroup]] = []
        for units in assign([held.matrices for held in self.tensors]):
            if self.tensors[units[0].tensor].matrices.holders == 1:
                self.local_rounds.append(units)
            else:
                self.rounds.append(_Round(units, self))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters; all of them must have gradients."""
        for held in self.tensors:
            if MOMENTUM not in self.state[held.parameter]:
                zeros = torch.zeros_like(plain(held.parameter), dtype=self.state_dtype)
                self.state[held.parameter][MOMENTUM] = zeros
        applied = None if self.found_inf is None else self.applied.float()  # type: ignore[union-attr]
        # While one round computes, the exchanges of the rounds before and after it run. So a round
        # is applied after the next one has computed.
        # Slices of the rounds hold one round, or none if there is no such.
        arriving = [first.gather(applied) for first in self.rounds[:1]]
        for units in self.local_rounds:
            found = self.nesterov(units, applied)
            updates = {
                unit: found.pop(unit).to(self.tensors[unit.tensor].device, self.dtype)
                for unit in units
            }
            self.add(self.orthogonalized(updates), applied)
        returning: list[_Exchange] = []
        for number, current in enumerate(self.rounds):
            arriving += [later.gather(applied) for later in self.rounds[number + 1 : number + 2]]
            returning.append(current.orthogonalize(arriving))
            if number:
                self._apply(returning, applied)
        if returning:
            self._apply(returning, applied)

    def _apply(self, returning: list[_Exchange], applied: Tensor | None) -> None:
        """Apply the orthogonalized updates of the first exchange to this rank's shards."""
        self.add({piece.unit: update for piece, update in returning.pop(0).wait()}, applied)

    def orthogonalized(self, updates: dict[MatrixGroup, Tensor]) -> dict[MatrixGroup, Tensor]:
        """Orthogonalize complete matrices, on GPUs those of equal shapes at once; uses up ``updates``."""
        together: dict[Any, list[MatrixGroup]] = defaultdict(list)
        for unit in updates:
            on_cpu = updates[unit].device.type == "cpu"
            key: Any = unit if on_cpu else updates[unit].shape[1:]
            together[key].append(unit)
        done: dict[MatrixGroup, Tensor] = {}
        for units in together.values():
            # A single matrix is not copied.
            parts = [updates.pop(unit) for unit in units]
            x_BOI = parts[0] if len(parts) == 1 else torch.cat(parts)
            x_BOI = orthogonalize(x_BOI)
            done |= dict(zip(units, x_BOI.split([unit.count for unit in units]), strict=True))
        return done

    def nesterov(
        self, units: list[MatrixGroup], applied: Tensor | None
    ) -> dict[MatrixGroup, Tensor]:
        """Update the momentum of units' local shards; return the shards' updates.

        Gradients in float32 are overwritten.
        """
        stored = []
        gradients = []
        for unit in units:
            held = self.tensors[unit.tensor]
            matrices = slice(unit.first, unit.stop)
            stored.append(held.stacked(self.state[held.parameter][MOMENTUM])[matrices])
            gradients.append(held.stacked(held.parameter.grad)[matrices].float())
        means = [momentum.float() for momentum in stored]
        weight: Any = 1 - self.momentum
        if applied is not None:
            weight = weight * applied
            # Multiply the bits by 0 or 1, because NaN times 0 is NaN.
            torch._foreach_mul_([x.view(torch.int32) for x in gradients], applied.int())
        for mean, gradient in zip(means, gradients, strict=True):
            mean.lerp_(gradient, weight)
        if self.state_dtype != torch.float32:
            torch._foreach_copy_(stored, means)
        torch._foreach_lerp_(gradients, means, self.momentum)
        return dict(zip(units, gradients, strict=True))

    def add(self, updates: dict[MatrixGroup, Tensor], applied: Tensor | None) -> None:
        """Apply orthogonalized updates to units' local shards."""
        for index, group in enumerate(self.param_groups):
            pairs = [(unit, self.tensors[unit.tensor]) for unit in updates]
            pairs = [(unit, held) for unit, held in pairs if held.group_index == index]
            stored = [held.stacked(held.parameter)[unit.first : unit.stop] for unit, held in pairs]
            values = [each.float() for each in stored]
            rate: Any = group["lr"] if applied is None else group["lr"] * applied
            rates = {scale: rate * scale for scale in {held.scale for _, held in pairs}}
            if values:
                torch._foreach_mul_(values, 1 - rate * group["weight_decay"])
            for target, value, (unit, held) in zip(stored, values, pairs, strict=True):
                update = updates[unit].to(value.device)
                if applied is None:
                    value.add_(update, alpha=-rates[held.scale])
                else:
                    value.addcmul_(update, rates[held.scale], value=-1)
                if target.dtype != torch.float32:
                    target.copy_(value)


class _Holder(NamedTuple):
    """A rank that holds a piece of the same matrices."""

    rank: int
    """Its rank in the optimizer's group."""
    replica: tuple[int, ...]
    """Its coordinates on the axes that replicate the tensor."""
    rows: range
    columns: range


class _Held:
    """A parameter: its local shard as a stack of matrices' pieces, and the holders of the other pieces.

    Args:
        find: ``_find_holders`` of the optimizer's group.
    """

    def __init__(
        self,
        parameter: Tensor,
        group_index: int,
        scale: Callable[[int, int], float],
        find: Callable[..., tuple[int, list[_Holder]]],
    ) -> None:
        self.parameter = parameter
        self.group_index = group_index
        outputs, inputs = parameter.shape[-2:]
        self.scale = scale(outputs, inputs)
        self.device = parameter.device
        if isinstance(parameter, DTensor):
            count, self.holders = find(parameter.shape, parameter.device_mesh, parameter.placements)
            # A shard may be offloaded to the host. Matrices are exchanged and orthogonalized where
            # the model computes.
            kind = parameter.device_mesh.device_type
            if self.device.type != kind:
                self.device = torch.empty((), device=kind).device
        else:
            count, self.holders = find(parameter.shape)
        self.matrices = Matrices(count, outputs, inputs, len(self.holders))

    def stacked(self, tensor: Tensor | None) -> Tensor:
        """Return the local shard of the parameter, its gradient or its state as [matrices, rows, columns]."""
        assert tensor is not None, "a parameter of Muon has no gradient"
        shard = local(plain(tensor))
        return shard.unsqueeze(0) if shard.ndim == 2 else shard


def _find_holders(
    group: dist.ProcessGroup | None,
    shape: torch.Size,
    mesh: DeviceMesh | None = None,
    placements: tuple[Placement, ...] = (),
) -> tuple[int, list[_Holder]]:
    """Return how many matrices of a stack this rank has a piece of, and all their holders by rank."""
    # A tensor of two dimensions is a stack of one matrix: its range of matrices is put first.
    if group is None or mesh is None:
        stack, *whole = [range(1), *map(range, shape)][-3:]
        return len(stack), [_Holder(0 if group is None else group.rank(), (), *whole)]
    here = mesh.get_coordinate()
    assert here is not None, "this rank is outside the parameter's mesh"
    mine = [range(1), *shard_ranges(shape, mesh, placements, here)][-3]
    replicated = [axis for axis, each in enumerate(placements) if isinstance(each, Replicate)]
    holders = []
    coordinates = itertools.product(*map(range, mesh.mesh.shape))
    for rank, coordinate in zip(mesh.mesh.flatten().tolist(), coordinates, strict=True):
        stack, *piece = [range(1), *shard_ranges(shape, mesh, placements, coordinate)][-3:]
        if stack == mine:
            replica = tuple(coordinate[axis] for axis in replicated)
            holders.append(_Holder(dist.get_group_rank(group, rank), replica, *piece))
    return len(mine), sorted(holders, key=lambda holder: holder.rank)


class _Piece(NamedTuple):
    """A piece of a unit's matrices, on its way."""

    unit: MatrixGroup
    holder: _Holder
    sender: int
    receiver: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Matrices, rows and columns."""
        return self.unit.count, len(self.holder.rows), len(self.holder.columns)

    def of(self, x_BOI: Tensor) -> Tensor:
        """This piece of the complete matrices."""
        rows = self.holder.rows
        columns = self.holder.columns
        return x_BOI[:, rows.start : rows.stop, columns.start : columns.stop]


class _Route:
    """The pieces that a rank sends and receives in one all-to-all, in the order of the other ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.sent: list[_Piece] = []
        self.received: list[_Piece] = []

    def add(self, piece: _Piece) -> None:
        """Add a piece if this rank sends or receives it."""
        if piece.sender == self.rank:
            insort(self.sent, piece, key=lambda each: each.receiver)
        if piece.receiver == self.rank:
            insort(self.received, piece, key=lambda each: each.sender)


class _Exchange(NamedTuple):
    """An all-to-all in flight. The buffer that is sent must live until everything has arrived."""

    pieces: list[_Piece]
    received: Tensor
    sent: Tensor
    work: dist.Work

    def wait(self) -> list[tuple[_Piece, Tensor]]:
        """Return the pieces that have arrived. The device waits for them, the host does not."""
        self.work.wait()
        parts = self.received.split([prod(piece.shape) for piece in self.pieces])
        return [
            (piece, part.view(piece.shape)) for piece, part in zip(self.pieces, parts, strict=True)
        ]


class _Round:
    """Units that are exchanged together: from one replica to their owners, from these to all holders."""

    def __init__(self, units: list[MatrixGroup], muon: Muon) -> None:
        self.muon = muon
        self.units = units
        self.to_owners = _Route(muon.rank)
        self.to_holders = _Route(muon.rank)
        self.owned: list[MatrixGroup] = []
        for unit in units:
            holders = muon.tensors[unit.tensor].holders
            owner = holders[unit.owner]
            if owner.rank == muon.rank:
                self.owned.append(unit)
            for holder in holders:
                if holder.replica == owner.replica:
                    self.to_owners.add(_Piece(unit, holder, holder.rank, owner.rank))
                self.to_holders.add(_Piece(unit, holder, owner.rank, holder.rank))

    def gather(self, applied: Tensor | None) -> _Exchange:
        """Update the momentum of the round's matrices, and send its pieces to their owners."""
        # If another replica sends a piece, this one updates its momentum too.
        updates = self.muon.nesterov(self.units, applied)
        return self._exchange(
            self.to_owners, [updates[piece.unit] for piece in self.to_owners.sent]
        )

    def orthogonalize(self, arriving: list[_Exchange]) -> _Exchange:
        """Orthogonalize the matrices that this rank owns, and send the pieces to all holders.

        Args:
            arriving: exchanges, of which the first one is this round's. It is removed here, because
                an argument can live until this returns: TorchDynamo's evaluator of frames keeps it.
        """
        exchange = arriving.pop(0)
        updates: dict[MatrixGroup, Tensor] = {}
        for unit in self.owned:
            matrices = self.muon.tensors[unit.tensor].matrices
            updates[unit] = exchange.received.new_empty(unit.count, matrices.rows, matrices.columns)
        pieces = exchange.wait()
        _copy([piece.of(updates[piece.unit]) for piece, _ in pieces], [x for _, x in pieces])
        del exchange, pieces  # before the iterations allocate
        done = self.muon.orthogonalized(updates)
        return self._exchange(
            self.to_holders, [piece.of(done[piece.unit]) for piece in self.to_holders.sent]
        )

    def _exchange(self, route: _Route, values: list[Tensor]) -> _Exchange:
        to_ranks = [0] * self.muon.ranks
        from_ranks = [0] * self.muon.ranks
        for piece in route.sent:
            to_ranks[piece.receiver] += prod(piece.shape)
        for piece in route.received:
            from_ranks[piece.sender] += prod(piece.shape)
        empty = partial(
            torch.empty,
            dtype=self.muon.dtype,
            device=self.muon.tensors[self.units[0].tensor].device,
        )
        sent = empty(sum(to_ranks))
        received = empty(sum(from_ranks))
        parts = sent.split([x.numel() for x in values])
        _copy([part.view(x.shape) for part, x in zip(parts, values, strict=True)], values)
        work = dist.all_to_all_single(
            received, sent, from_ranks, to_ranks, group=self.muon.group, async_op=True
        )
        return _Exchange(route.received, received, sent, work)


def _copy(targets: list[Tensor], values: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, values)
