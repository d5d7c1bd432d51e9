"""Data parallelism by FSDP2: sharded (FSDP), replicated (DDP), or both (HSDP), one mechanism for all.

A replicated axis is the outer dimension of FSDP's two-dimensional mesh, so DDP is the mesh (N, 1): each
block's gradients are all-reduced while the next block's are computed, it composes with tensor and
pipeline parallelism, and mixed precision is the same policy whatever is sharded. Gradients are *summed*:
the loss is already divided by the global number of tokens. Parameters are sharded over context-parallel ranks
too, since each has only the gradients of its positions.
"""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from harness.model.decoder import Decoder
from harness.parallelism.config import ParallelismConfig
from harness.parallelism.mesh import SHARD, Mesh
from harness.precision.config import PrecisionConfig


def needs_fsdp(layout: ParallelismConfig, precision: PrecisionConfig) -> bool:
    """Whether anything is sharded, replicated, cast or offloaded."""
    replicas = layout.dp_replicate * layout.parameter_shards
    return replicas > 1 or precision.needs_fsdp or layout.cpu_offload


def apply_fsdp(
    part: Decoder, mesh: Mesh, layout: ParallelismConfig, precision: PrecisionConfig, device: torch.device
) -> None:
    """Wraps every block of a model part, and the part itself, in place."""
    axes = ("dp_replicate", SHARD) if mesh.size("dp_replicate") > 1 else (SHARD,)
    reshard, always = reshards_after_forward(layout), layout.reshard_after_forward == "always"
    # Inputs are left as they are: activations already have the parameters' format, and casting would
    # round the rotation table, which stays in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.param_dtype),
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if layout.cpu_offload else OffloadPolicy()

    def shard(module: nn.Module | list[nn.Module], reshard_after_forward: bool) -> None:
        fully_shard(
            module,  # type: ignore[arg-type]
            mesh=mesh.axis(*axes),
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=offload,
        )

    for block in part.layers.values():
        shard(block, reshard)
    # A tied table serves both ends, so its users must share one group: the root's, which stays gathered.
    if not part.config.tied_embeddings:
        if part.tok_embeddings is not None:
            shard(part.tok_embeddings, reshard)
        if part.norm is not None and part.output is not None:
            # Backward starts with these: freeing them after forward would only gather them again.
            shard([part.norm, part.output], reshard and always)
    shard(part, reshard and always)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, a factor asks for NCCL's pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def reshards_after_forward(layout: ParallelismConfig) -> bool:
    """Whether blocks free their gathered parameters after forward.

    Under a pipeline that would gather them again for every microbatch.
    """
    if layout.parameter_shards == 1:
        return False
    if layout.reshard_after_forward == "default":
        return layout.pp == 1
    return layout.reshard_after_forward == "always"


def sync_gradients(part: nn.Module, layout: ParallelismConfig, last: bool) -> None:
    """Says before a backward pass whether it reduces gradients.

    Gradients are scattered to their shards every pass, which keeps their memory bounded; between replicas
    they are summed once a step.
    """
    if not isinstance(part, FSDPModule):
        return
    if layout.parameter_shards == 1:
        part.set_requires_gradient_sync(last)
    elif layout.dp_replicate > 1:
        part.set_requires_all_reduce(last)
