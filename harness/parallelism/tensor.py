"""Tensor parallelism: applies the ``Split`` of every module in ``model/spec.py``.

Megatron's column-row pairs (arXiv:1909.08053) with the residual stream split along the sequence
between them (arXiv:2205.05198) or, with sequence_parallel=false, replicated. ``tensor_styles.py``
has the styles.
"""

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module

from harness.config.parallelism import ParallelismConfig
from harness.model.norm import Norm
from harness.model.part import ModelPart
from harness.model.spec import Split, modules
from harness.parallelism.async_tp import avoid_copies
from harness.parallelism.tensor_styles import (
    SEQUENCE_DIM,
    Distributed,
    Plain,
    RegionParallel,
    VocabularyParallel,
    compute_plainly,
    converted_linear,
    look_up,
    place,
)
from harness.precision.swap import float8_style, region_cast


def apply_tensor_parallel(
    part: ModelPart,
    mesh: DeviceMesh,
    layout: ParallelismConfig,
    *,
    loss_in_head: bool,
    gather_float8: bool,
) -> None:
    """Split every module of a model part as its spec says, in place.

    Args:
        mesh: the tp axis.
        layout: whether the residual stream is split, and whether the loss takes split logits.
    """
    avoid_copies(layout.async_tp)
    stream: Placement = Shard(SEQUENCE_DIM) if layout.sequence_parallel else Replicate()
    logits: Placement = Shard(-1) if layout.loss_parallel else Replicate()
    # Linears and norms of other kinds compute on plain tensors, or were converted to another
    # format.
    region = RegionParallel(stream)
    styles: dict[Split, ParallelStyle | None] = {
        Split.VOCABULARY: VocabularyParallel(stream),
        # Every rank has its input.
        Split.ENTRY: Distributed(Replicate(), uses=stream),
        # If the stream is split, each rank has the gradient of its positions only.
        Split.MODULATION: Distributed(
            Replicate(),
            gives=Replicate(),
            output_gradient=Partial() if layout.sequence_parallel else None,
            by_rows=True,
        ),
        Split.OUTPUT: ColwiseParallel(input_layouts=stream, output_layouts=Replicate()),
        Split.REGION: region,
        # Experts that are split take the full stream; else each rank routes its part of it.
        Split.MIXTURE: region if layout.splits_experts else None,
        Split.SHARED_EXPERTS: None if layout.splits_experts else region,
        # expert.py lays these out.
        Split.ROUTER: None,
        Split.EXPERTS: None,
        # Pipeline stages and losses use plain tensors: local logits, or the loss of local logits.
        Split.HEAD: RegionParallel(stream, by_rows=True)
        if loss_in_head
        else ColwiseParallel(input_layouts=stream, output_layouts=logits),
    }
    specs = list(modules(part.config))
    built = dict(part.named_modules())
    casts: dict[str, Any] = {}
    for spec in specs:
        module = built.get(spec.name)
        if module is None:
            continue
        if spec.split in styles:
            style = styles[spec.split]
        else:
            is_plain = type(module) in (nn.Linear, nn.RMSNorm, Norm)
            style = Plain(spec, stream) if is_plain else converted_linear(spec.split, stream)
        if gather_float8:
            if style is region and spec.split is not Split.MIXTURE:
                inner = [
                    (s.split, built[s.name]) for s in specs if s.name.startswith(f"{spec.name}.")
                ]
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


_COLLECTIVE = (
    Split.COLUMN,
    Split.ROW,
    Split.HEAD,
    Split.HEADS_NORM,
    Split.OUTPUT,
    Split.MODULATION,
)
"""Modules that compute on this rank's shard, or with those of others."""


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
            module.forward = partial(look_up, module, mesh, None)  # type: ignore[method-assign]
        elif spec.split in _COLLECTIVE:
            compute_plainly(module, spec.split, mesh, None)
    part.tie_embeddings()


def to_plain(part: ModelPart) -> None:
    """Replace the DTensors of ``apply_for_passes`` by their shards, but for FSDP's."""
    for module in part.modules() if not isinstance(part, FSDPModule) else ():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if isinstance(parameter, DTensor):
                module.register_parameter(
                    name, nn.Parameter(parameter.to_local(), requires_grad=False)
                )
    part.tie_embeddings()
