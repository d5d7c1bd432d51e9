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
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import Shard

from harness.model.decoder import Decoder
from harness.parallelism.config import ParallelismConfig
from harness.parallelism.materialize import local_ranges
from harness.parallelism.mesh import EXPERT_SHARD, SHARD, Mesh
from harness.precision.config import PrecisionConfig


def apply_fsdp(
    part: Decoder, mesh: Mesh, layout: ParallelismConfig, precision: PrecisionConfig, device: torch.device
) -> None:
    """Wraps every block of a model part, and the part itself, in place."""
    axes = ("dp_replicate", SHARD) if mesh.size("dp_replicate") > 1 else (SHARD,)
    reshard, always = layout.reshards_after_forward, layout.reshard_after_forward == "always"
    # Inputs are left as they are: activations already have the parameters' format, and casting would
    # round the rotation table, which stays in float32.
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, precision.param_dtype),
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        cast_forward_inputs=False,
    )
    offload = CPUOffloadPolicy(pin_memory=device.type != "cpu") if layout.cpu_offload else OffloadPolicy()

    placements = _expert_placements(part, layout)

    def shard(module: nn.Module | list[nn.Module], reshard_after_forward: bool, over: DeviceMesh) -> None:
        fully_shard(
            module,  # type: ignore[arg-type]
            mesh=over,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=placements.get,
            mp_policy=policy,
            offload_policy=offload,
        )

    ranks = mesh.axis(*axes)
    for block in part.blocks.values():
        # Experts are a group of their own where their mesh is another: dp_replicate x expert_shard.
        if block.moe is not None and mesh.experts is not None:
            of_experts = (*axes[:-1], EXPERT_SHARD)
            shard(
                block.moe.experts,
                reshard,
                mesh.experts[of_experts if len(of_experts) > 1 else EXPERT_SHARD],
            )
        shard(block, reshard, ranks)
    if part.mtp is not None:
        shard(part.mtp, reshard, ranks)
    # A tied table serves both ends, so its users must share one group: the root's, which stays gathered.
    if not part.config.tied_embeddings:
        if part.tok_embeddings is not None:
            shard(part.tok_embeddings, reshard, ranks)
        if part.norm is not None and part.output is not None:
            # Backward starts with these: freeing them after forward would only gather them again.
            shard([part.norm, part.output], reshard and always, ranks)
    shard(part, reshard and always, ranks)
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # Without this, a factor asks for NCCL's pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)


def _expert_placements(part: Decoder, layout: ParallelismConfig) -> dict[nn.Parameter, Shard]:
    """Along which dimension experts' parameters are sharded.

    Whole experts where there are enough for all ranks, else a dimension of each: some ranks would have
    nothing to hold.
    """
    placements = {}
    for moe in part.mixtures.values():
        own = local_ranges(moe.experts.w1)[0]
        dim = 0 if len(own) % layout.expert_shards == 0 else 1
        placements.update(dict.fromkeys(moe.experts.parameters(), Shard(dim)))
    return placements


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
