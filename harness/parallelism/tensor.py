"""Tensor parallelism: applies the ``Split`` of every module in ``model/spec.py``.

Megatron's column-row pairs (arXiv:1909.08053) with the residual stream split along the sequence between
them (arXiv:2205.05198) or, with sequence_parallel=false, replicated. Modules pass plain local tensors to
each other, so that pipeline, checkpointing and compile see nothing of it; parameters are DTensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import _functional_collectives
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from harness.config.parallelism import ParallelismConfig
from harness.model.grouped import local_shard
from harness.model.part import ModelPart
from harness.model.spec import ModuleSpec, Split, modules
from harness.precision.swap import float8_style, region_cast
from harness.util.errors import ConfigError

SEQUENCE_DIM = 1


def _placed(tensor: Tensor, mesh: DeviceMesh, placement: Placement, gradients: Any = None) -> DTensor:
    return DTensor.from_local(tensor, mesh, (placement,), run_check=False, grad_placements=gradients)


def into_stream(partial_sum: Tensor, mesh: DeviceMesh, stream: Placement | None) -> Tensor:
    """Sum over the ranks, into the residual stream; None: in place, without gradients."""
    if stream is None:
        dist.all_reduce(partial_sum, group=mesh.get_group())
        return partial_sum
    return _placed(partial_sum, mesh, Partial()).redistribute(placements=(stream,)).to_local()


def _replicated(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
    return (_placed(inputs[0], mesh, Replicate()), *inputs[1:])


def _to_local(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
    return output.to_local()


class Distributed(ParallelStyle):
    """A module with DTensors for parameters; the arguments are those of torch's ``distribute_module``.

    Parameters that ``partition`` does not split are replicated: the optimizer could not update plain
    parameters and DTensors in one foreach call.
    """

    def __init__(self, partition: Any = None, enter: Any = None, leave: Any = None) -> None:
        super().__init__()
        self.hooks = partition, enter, leave

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        return distribute_module(module, device_mesh, *self.hooks)


class RegionParallel(ParallelStyle):
    """A module whose first input is gathered along the sequence if the stream is split.

    Backward sums the ranks' contributions: a reduce-scatter if forward gathered, else an all-reduce.

    Args:
        cast: applied to the input before it is gathered; the module then takes a DTensor.
    """

    def __init__(self, stream: Placement, cast: Callable[[DTensor], DTensor] | None = None) -> None:
        super().__init__()
        self.stream, self.cast = stream, cast

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def gather(_module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            local = _placed(inputs[0], device_mesh, self.stream)
            local = local if self.cast is None else self.cast(local)
            whole = local.redistribute(placements=(Replicate(),))
            return (_with_partial_gradient(whole) if self.cast is None else whole, *inputs[1:])

        module.register_forward_pre_hook(gather)
        return module


def _with_partial_gradient(whole: DTensor) -> Tensor:
    """A replicated tensor as a plain one; every rank has a summand of its gradient."""
    return whole.to_local(grad_placements=(Partial(),))


class Plain(ParallelStyle):
    """A linear or norm that computes on plain tensors and this rank's shards.

    DTensor's dispatch takes longer than small products, and blocks are not always compiled.
    """

    def __init__(self, spec: ModuleSpec, stream: Placement) -> None:
        super().__init__()
        self.spec, self.stream = spec, stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        split = self.spec.split
        on_parts = split in (Split.ROW, Split.NORM, Split.STREAM) and not self.stream.is_replicate()
        if on_parts or split in (Split.WHOLE, Split.HEAD_NORM):
            whole = [tensor for tensor in self.spec.tensors if tensor.split_dim is None]
            gradients = {tensor.name.rpartition(".")[2]: [Partial()] for tensor in whole}
            module.partial_gradients = gradients  # type: ignore[assignment]
        for tensor in self.spec.tensors:
            place(module, tensor.name, device_mesh, tensor.split_dim)
        _compute_plainly(module, split, device_mesh, self.stream)
        return module


def _compute_plainly(module: nn.Module, split: Split, mesh: DeviceMesh, stream: Placement | None) -> None:
    # Equal blocks share compiled code if their modules are alike; functions of their own are not.
    module.__class__ = PlainLinear if isinstance(module, nn.Linear) else PlainNorm
    module.split, module.mesh, module.stream = split, mesh, stream  # type: ignore[assignment]


def converted_linear(split: Split, stream: Placement) -> ParallelStyle:
    """Style of a linear in another format, which scales DTensors by maxima over all their shards."""
    if split is Split.ROW:
        return RowwiseParallel(output_layouts=stream)
    placement = stream if split is Split.STREAM else Replicate()
    gradient = Partial() if split in (Split.COLUMN, Split.WHOLE) else placement

    def enter(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return (_placed(inputs[0], mesh, placement, (gradient,)), *inputs[1:])

    def leave(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
        return _with_partial_gradient(output) if split is Split.WHOLE else output.to_local()

    return Distributed(_split_rows if split is Split.COLUMN else None, enter, leave)


def entry(stream: Placement) -> Distributed:
    """Style of a replicated linear whose input every rank has, and whose output is placed as the stream."""

    def split(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        return (_placed(inputs[0], mesh, Replicate()).redistribute(placements=(stream,)), *inputs[1:])

    return Distributed(None, split, _to_local)


def modulation(stream: Placement) -> Distributed:
    """Style of a linear from a replicated row per sample, split by outputs, which are gathered.

    If the stream is split along the sequence, each rank has the gradient of its positions only.
    """
    gradient = Replicate() if stream.is_replicate() else Partial()

    def gather(_module: nn.Module, output: DTensor, _mesh: DeviceMesh) -> Tensor:
        return output.redistribute(placements=(Replicate(),)).to_local(grad_placements=(gradient,))

    return Distributed(_split_rows, _replicated, gather)


def head_with_loss(stream: Placement) -> Distributed:
    """Style of the output projection split by vocabulary, which computes the loss on plain local tensors.

    Every rank has a partial sum of the full stream's gradient, which is reduced to the stream's placement.
    """

    def gather(_module: nn.Module, inputs: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[Tensor, ...]:
        whole = _placed(inputs[0], mesh, stream).redistribute(placements=(Replicate(),))
        return (_with_partial_gradient(whole), *inputs[1:])

    return Distributed(_split_rows, gather)


class VocabularyParallel(ParallelStyle):
    """An embedding table split by rows: every rank looks up its rows, and the results are summed.

    It uses plain local tensors. torch's RowwiseParallel has no rule for the gradient of a table split by rows
    (torch/distributed/tensor/_ops/_embedding_ops.py), so every rank would compute that of the full table:
    2.1 GB for Llama 3 70B in bfloat16, instead of 0.26 GB on eight ranks.
    """

    def __init__(self, stream: Placement) -> None:
        super().__init__()
        self.stream = stream

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        assert isinstance(module, nn.Embedding), f"{type(module).__name__} is not an embedding"
        module.forward = partial(_look_up, module, device_mesh, self.stream)  # type: ignore[method-assign]
        return distribute_module(module, device_mesh, _split_rows)


def _look_up(table: nn.Embedding, mesh: DeviceMesh, stream: Placement | None, tokens_BT: Tensor) -> Tensor:
    table_VC = local_shard(table, "weight")
    rows_BT = tokens_BT - -(-table.num_embeddings // mesh.size()) * mesh.get_local_rank()
    elsewhere_BT = (rows_BT < 0) | (rows_BT >= len(table_VC))
    own_BTC = F.embedding(rows_BT.masked_fill(elsewhere_BT, 0), table_VC)
    own_BTC = own_BTC.masked_fill(elsewhere_BT.unsqueeze(-1), 0)
    return into_stream(own_BTC, mesh, stream)


def _split_rows(_name: str, module: nn.Module, mesh: DeviceMesh) -> None:
    for name, _ in list(module.named_parameters(recurse=False)):
        place(module, name, mesh, 0)


def place(module: nn.Module, name: str, mesh: DeviceMesh, dim: int | None) -> None:
    """Make a parameter a DTensor, split along a dimension or replicated."""
    name = name.rpartition(".")[2]
    placement = Replicate() if dim is None else Shard(dim)
    module.register_parameter(name, nn.Parameter(distribute_tensor(getattr(module, name), mesh, [placement])))


# Functions of torch that run what the compiler has fused, by kind.
_FUSED = {
    "all-gathers": (
        *("_fused_all_gather_matmul_impl", "_fused_all_gather_matmul_native"),
        "_multimem_all_gather_matmul",
    ),
    "reduce-scatters": ("_fused_matmul_reduce_scatter_impl", "_fused_scaled_matmul_reduce_scatter_impl"),
}
fused: Counter[str] = Counter()
"""How often this process has run what the compiler has fused, by kind."""


def enable_async(mesh: DeviceMesh, device: torch.device) -> None:
    """Enable symmetric memory on the tp axis, with which the compiler overlaps products and collectives.

    Without it the compiler's pass would silently do nothing. What it fuses is counted in ``fused``.
    """
    from torch.distributed import _symmetric_memory as symmetric_memory

    works = "parallelism.async_tp=false"
    if device.type != "cuda":
        raise ConfigError("parallelism.async_tp", True, "this rank computes on a CPU", works)
    own = device.index
    others = [i for i in range(torch.cuda.device_count()) if i != own]
    if len(others) + 1 < mesh.size() or not all(torch.cuda.can_device_access_peer(own, i) for i in others):
        raise ConfigError(
            "parallelism.async_tp", True, "the GPUs here have no access to each other's memory", works
        )
    symmetric_memory.enable_symm_mem_for_group(mesh.get_group().group_name)
    for kind, names in _FUSED.items():
        for name in names:
            function = getattr(symmetric_memory, name, None)
            if function is not None and not hasattr(function, "__wrapped__"):
                setattr(symmetric_memory, name, _counting(kind, function))


def _counting(kind: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        fused[kind] += 1
        return function(*args, **options)

    return call


def describe_fused(counts: Mapping[str, int]) -> str:
    """Describe what asynchronous tensor parallel has fused in the first step; warn if a kind is missing."""
    missing = " and ".join(kind for kind in _FUSED if not counts.get(kind))
    if missing:
        return f"WARNING parallelism.async_tp=true: the compiler has fused no {missing} with products"
    found = " and ".join(f"{counts[kind]} {kind}" for kind in _FUSED)
    return f"fused {found} with products, in the first step"


def avoid_copies(async_tp: bool) -> None:
    """Let torch gather and scatter the sequence of a single sample as views, which needs no copies.

    torch 2.13 does so for gathers alone. Its pass for async_tp finds only gathers and scatters with copies.
    """
    for name, function in (("_maybe_view_chunk_cat", _join_chunks), ("_chunk_or_narrow_cat", _stack_chunks)):
        copies = async_tp == (function is _join_chunks)
        setattr(_functional_collectives, name, function if copies else getattr(torch._utils, name))


def _join_chunks(gathered: Tensor, ranks: int, dim: int) -> Tensor:
    return gathered if dim == 0 else torch.cat(gathered.chunk(ranks), dim)


def _stack_chunks(tensor: Tensor, num_chunks: int, narrow_dim: int, cat_dim: int) -> Tensor:
    if narrow_dim == 1 and cat_dim == 0 and len(tensor) == 1:
        return tensor.reshape(num_chunks, -1, *tensor.shape[2:])
    return torch.cat(tensor.chunk(num_chunks, narrow_dim), cat_dim)


def apply_tensor_parallel(
    part: ModelPart, mesh: DeviceMesh, layout: ParallelismConfig, *, loss_in_head: bool, gather_float8: bool
) -> None:
    """Split every module of a model part as its spec says, in place.

    Args:
        mesh: the tp axis.
        layout: whether the residual stream is split, and whether the loss takes split logits.
    """
    avoid_copies(layout.async_tp)
    stream: Placement = Shard(SEQUENCE_DIM) if layout.sequence_parallel else Replicate()
    logits: Placement = Shard(-1) if layout.loss_parallel else Replicate()
    # Linears and norms of other kinds compute on plain tensors, or were converted to another format.
    styles: dict[Split, Callable[[], ParallelStyle | None]] = {
        Split.VOCABULARY: lambda: VocabularyParallel(stream),
        Split.ENTRY: lambda: entry(stream),
        Split.MODULATION: lambda: modulation(stream),
        Split.OUTPUT: lambda: ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
        Split.REGION: lambda: RegionParallel(stream),
        # Experts that are split take the full stream; else each rank routes its part of it.
        Split.MIXTURE: lambda: RegionParallel(stream) if layout.splits_experts else None,
        Split.SHARED_EXPERTS: lambda: None if layout.splits_experts else RegionParallel(stream),
        # expert.py lays these out.
        Split.ROUTER: lambda: None,
        Split.EXPERTS: lambda: None,
        # The head returns local logits: pipeline stages and losses use plain tensors.
        Split.HEAD: lambda: (
            head_with_loss(stream)
            if loss_in_head
            else ColwiseParallel(input_layouts=stream, output_layouts=logits)
        ),
    }
    specs, built = list(modules(part.config)), dict(part.named_modules())
    casts: dict[str, Any] = {}
    for spec in specs:
        module = built.get(spec.name)
        if module is None:
            continue
        if spec.split in styles:
            style = styles[spec.split]()
        else:
            is_plain = type(module) in (nn.Linear, nn.RMSNorm)
            style = Plain(spec, stream) if is_plain else converted_linear(spec.split, stream)
        if gather_float8:
            if isinstance(style, RegionParallel) and spec.split is not Split.MIXTURE:
                inner = [(s.split, built[s.name]) for s in specs if s.name.startswith(f"{spec.name}.")]
                casts[spec.name] = region_cast(inner)
                style = RegionParallel(stream, casts[spec.name])
            if spec.split is Split.ROW or casts.get(spec.name.rpartition(".")[0]) is not None:
                style = float8_style(module, spec.split, stream) or style
        if style is not None:
            parallelize_module(module, mesh, style)
        for tensor in spec.tensors:
            if tensor.split is Split.HEADS:
                place(module, tensor.name, mesh, 0)
    part.tie_embeddings()


def apply_for_passes(part: ModelPart, mesh: DeviceMesh) -> None:
    """Split every module as its spec says, in place, for passes without gradients and a replicated stream.

    One collective ends each pair of linears. Parameters are DTensors until ``to_plain``.
    """
    built = dict(part.named_modules())
    for spec in modules(part.config):
        module = built.get(spec.name)
        if module is None:
            continue
        for tensor in spec.tensors:
            if tensor.split_dim is not None and not tensor.is_expert:
                place(module, tensor.name, mesh, tensor.split_dim)
        if spec.split is Split.VOCABULARY:
            module.forward = partial(_look_up, module, mesh, None)  # type: ignore[method-assign]
        elif spec.split in (Split.COLUMN, Split.ROW, Split.HEAD, Split.OUTPUT, Split.MODULATION):
            _compute_plainly(module, spec.split, mesh, None)
    part.tie_embeddings()


class PlainLinear(nn.Linear):
    """A linear on this rank's shard; the ranks' results are summed or gathered as ``split`` says."""

    split: Split
    mesh: DeviceMesh
    stream: Placement | None

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = local_shard(self, "weight"), None if self.bias is None else local_shard(self, "bias")
        if self.split is Split.ROW:
            out = into_stream(F.linear(x, weight), self.mesh, self.stream)
            return out if bias is None else out + bias
        out, ranks = F.linear(x, weight, bias), self.mesh.size()
        if self.split is Split.COLUMN or self.stream is not None:
            return out
        missing = -(-self.out_features // ranks) - out.shape[-1]
        out = F.pad(out, (0, missing)) if missing else out
        gathered = out.new_empty(ranks * len(out), *out.shape[1:])
        dist.all_gather_single(gathered, out, self.mesh.get_group())
        return gathered.unflatten(0, (ranks, -1)).movedim(0, -2).flatten(-2)[..., : self.out_features]


class PlainNorm(nn.RMSNorm):
    """A norm with a replicated weight, of the values that this rank has."""

    split: Split
    stream: Placement

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, local_shard(self, "weight"), self.eps)


def to_plain(part: ModelPart) -> None:
    """Replace the DTensors of ``apply_for_passes`` by their shards, but for FSDP's."""
    for module in part.modules() if not isinstance(part, FSDPModule) else ():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                module.register_parameter(name, nn.Parameter(parameter.to_local(), requires_grad=False))
    part.tie_embeddings()
