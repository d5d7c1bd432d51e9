"""How a module computes on its shard: the styles that tensor parallelism gives to modules.

Modules pass plain local tensors to each other, so that pipeline, checkpointing and compile see
nothing of it; parameters are DTensors. Where torch's own styles lack a rule or cost a copy, these
are ours.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ParallelStyle, RowwiseParallel

from harness.model.grouped import local_shard
from harness.model.norm import Norm
from harness.model.spec import ModuleSpec, Split

SEQUENCE_DIM = 1


def _placed(
    tensor: Tensor, mesh: DeviceMesh, placement: Placement, gradient: Placement | None = None
) -> DTensor:
    gradients = None if gradient is None else (gradient,)
    return DTensor.from_local(
        tensor, mesh, (placement,), run_check=False, grad_placements=gradients
    )


def into_stream(partial_sum: Tensor, mesh: DeviceMesh, stream: Placement | None) -> Tensor:
    """Sum over the ranks, into the residual stream; None: in place, without gradients."""
    if stream is None:
        dist.all_reduce(partial_sum, group=mesh.get_group())
        return partial_sum
    return _placed(partial_sum, mesh, Partial()).redistribute(placements=(stream,)).to_local()


@dataclass
class Distributed(ParallelStyle):
    """A module that computes on DTensors, between plain tensors.

    Parameters are split by rows or replicated: the optimizer could not update plain parameters and
    DTensors in one foreach call.
    """

    takes: Placement
    """Placement of the first input, as it arrives."""
    gradient: Placement | None = None
    """Placement of that input's gradient; None: the same."""
    uses: Placement | None = None
    """Placement of the input that the module computes on; None: the same."""
    gives: Placement | None = None
    """Placement of the output, as it leaves; None: that of the module's result."""
    output_gradient: Placement | None = None
    """Placement of the output's gradient; None: that of the output."""
    by_rows: bool = False
    """Whether the module's own parameters are split by rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = split_rows if self.by_rows else None
        hooks: Any = self._enter, self._leave
        return distribute_module(module, device_mesh, split, *hooks)

    def _enter(
        self, _module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh
    ) -> tuple[Tensor, ...]:
        x = _placed(inputs[0], mesh, self.takes, self.gradient)
        if self.uses is not None:
            x = x.redistribute(placements=(self.uses,))
        return (x, *inputs[1:])

    def _leave(self, _module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
        if self.gives is not None:
            output = output.redistribute(placements=(self.gives,))
        gradient = self.output_gradient
        return output.to_local(grad_placements=None if gradient is None else (gradient,))


@dataclass
class RegionParallel(ParallelStyle):
    """A module whose first input is gathered along the sequence if the stream is split.

    Backward sums the ranks' contributions: a reduce-scatter if forward gathered, else an
    all-reduce.
    """

    stream: Placement
    cast: Callable[[DTensor], DTensor] | None = None
    """Applied to the input before it is gathered; the module then takes a DTensor."""
    by_rows: bool = False
    """Whether the module's own parameters are split by rows."""

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            local = _placed(inputs[0], device_mesh, self.stream)
            if self.cast is not None:
                return (self.cast(local).redistribute(placements=(Replicate(),)), *inputs[1:])
            whole = local.redistribute(placements=(Replicate(),))
            # Every rank has a summand of its gradient.
            return (whole.to_local(grad_placements=(Partial(),)), *inputs[1:])

        module.register_forward_pre_hook(gather)
        if self.by_rows:
            distribute_module(module, device_mesh, split_rows)
        return module


@dataclass
class Plain(ParallelStyle):
    """A linear or norm that computes on plain tensors and this rank's shards.

    DTensor's dispatch takes longer than small products, and blocks are not always compiled.
    """

    spec: ModuleSpec
    stream: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = self.spec.split
        on_parts = split in (Split.ROW, Split.NORM, Split.STREAM) and not self.stream.is_replicate()
        if on_parts or split in (Split.WHOLE, Split.HEAD_NORM):
            whole = [tensor for tensor in self.spec.tensors if tensor.split_dim is None]
            gradients = {tensor.name.rpartition(".")[2]: [Partial()] for tensor in whole}
            module.partial_gradients = gradients  # type: ignore[assignment]
        for tensor in self.spec.tensors:
            place(module, tensor.name, device_mesh, tensor.split_dim)
        compute_plainly(module, split, device_mesh, self.stream)
        return module


def compute_plainly(
    module: nn.Module, split: Split, mesh: DeviceMesh, stream: Placement | None
) -> None:
    """Make a linear or a norm compute on plain tensors, in its shard."""
    # Equal blocks share compiled code if their modules are alike; functions of their own are not.
    module.__class__ = PlainLinear if isinstance(module, nn.Linear) else PlainNorm
    module.split = split  # type: ignore[assignment]
    module.mesh = mesh  # type: ignore[assignment]
    module.stream = stream  # type: ignore[assignment]


def converted_linear(split: Split, stream: Placement) -> ParallelStyle:
    """Style of a linear in another format, which scales DTensors by maxima over all their shards."""
    if split is Split.ROW:
        return RowwiseParallel(output_layouts=stream)
    placement = stream if split is Split.STREAM else Replicate()
    return Distributed(
        placement,
        Partial() if split in (Split.COLUMN, Split.WHOLE) else None,
        output_gradient=Partial() if split is Split.WHOLE else None,
        by_rows=split is Split.COLUMN,
    )


@dataclass
class VocabularyParallel(ParallelStyle):
    """An embedding table split by rows: every rank looks up its rows, and the results are summed.

    It uses plain local tensors. torch's RowwiseParallel has no rule for the gradient of a table
    split by rows (torch/distributed/tensor/_ops/_embedding_ops.py), so every rank would compute
    that of the full table: 2.1 GB for Llama 3 70B in bfloat16, instead of 0.26 GB on eight ranks.
    """

    stream: Placement

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding), f"{type(module).__name__} is not an embedding"
        module.forward = partial(look_up, module, device_mesh, self.stream)  # type: ignore[method-assign]
        return distribute_module(module, device_mesh, split_rows)


def look_up(
    table: nn.Embedding, mesh: DeviceMesh, stream: Placement | None, tokens_BT: Tensor
) -> Tensor:
    """Look up tokens in a table that is split by rows; the ranks' results are summed into the stream."""
    table_VC = local_shard(table, "weight")
    rows_BT = tokens_BT - -(-table.num_embeddings // mesh.size()) * mesh.get_local_rank()
    elsewhere_BT = (rows_BT < 0) | (rows_BT >= len(table_VC))
    own_BTC = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), table_VC)
    own_BTC = own_BTC.masked_fill(elsewhere_BT.unsqueeze(-1), 0)
    return into_stream(own_BTC, mesh, stream)


def split_rows(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        place(module, name, mesh, 0)


def place(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """Make a parameter a DTensor, split along a dimension or replicated."""
    name = name.rpartition(".")[2]
    placement = Replicate() if dim is None else Shard(dim)
    module.register_parameter(
        name, nn.Parameter(distribute_tensor(getattr(module, name), mesh, [placement]))
    )


class PlainLinear(nn.Linear):
    """A linear on this rank's shard; the ranks' results are summed or gathered as ``split`` says."""

    split: Split
    mesh: DeviceMesh
    stream: Placement | None

    def forward(self, x: Tensor) -> Tensor:
        weight = local_shard(self, "weight")
        bias = None if self.bias is None else local_shard(self, "bias")
        if self.split is Split.ROW:
            out = into_stream(F.linear(x, weight), self.mesh, self.stream)
            return out if bias is None else out + bias
        out = F.linear(x, weight, bias)
        ranks = self.mesh.size()
        if self.split is Split.COLUMN or self.stream is not None:
            return out
        missing = -(-self.out_features // ranks) - out.shape[-1]
        out = F.pad(out, (0, missing)) if missing else out
        gathered = out.new_empty(ranks * len(out), *out.shape[1:])
        dist.all_gather_single(gathered, out, self.mesh.get_group())
        return (
            gathered.unflatten(0, (ranks, -1)).movedim(0, -2).flatten(-2)[..., : self.out_features]
        )


class PlainNorm(Norm):
    """A norm of the values that this rank has, or of all ranks' values as ``split`` says."""

    split: Split
    mesh: DeviceMesh
    stream: Placement | None

    def forward(self, x: Tensor) -> Tensor:
        weight = local_shard(self, "weight")
        if self.split is not Split.HEADS_NORM:
            return self.scaled(x, weight)
        factor = weight.float() + 1 if self.zero_centred else weight
        return _NormOverRanks.apply(x, factor, self.normalized_shape[0], self.eps, self._over_ranks)  # type: ignore[no-any-return]

    def _over_ranks(self, partial_sum: Tensor) -> Tensor:
        stream = None if self.stream is None else Replicate()
        return into_stream(partial_sum, self.mesh, stream)


class _NormOverRanks(torch.autograd.Function):
    """RMSNorm of values that are split over the ranks; it saves what torch's norm saves.

    Args of ``forward``:
        width: number of values of all ranks.
        over_ranks: sums over the ranks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        width: int,
        eps: float,
        over_ranks: Callable[[Tensor], Tensor],
    ) -> Tensor:
        squares = x.float().square().sum(-1, keepdim=True)
        rstd = torch.rsqrt(over_ranks(squares) / width + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.width = width
        ctx.over_ranks = over_ranks
        return (x.float() * rstd * weight.float()).type_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd = ctx.saved_tensors
        normed = x.float() * rstd
        weighted = grad.float() * weight.float()
        shared = ctx.over_ranks((weighted * normed).sum(-1, keepdim=True)) / ctx.width
        grad_x = (weighted - normed * shared) * rstd
        grad_weight = (grad.float() * normed).flatten(0, -2).sum(0)
        return grad_x.type_as(x), grad_weight.type_as(weight), None, None, None
