"""Data parallelism by FSDP2: sharded (FSDP), replicated (DDP), or both (HSDP), in one mechanism.

A replicated axis is the outer dimension of FSDP's two-dimensional mesh, so DDP is the mesh (N, 1):
each block's gradients are all-reduced while the next block's are computed, it composes with tensor
and pipeline parallelism, and all use the same mixed precision policy. Gradients are *summed*: the
loss is already divided by the global number of tokens. Parameters are also sharded over
context-parallel ranks, because each has only the gradients of its positions.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.tensor import Shard

from harness.config.job import Job
from harness.config.parallelism import ParallelismConfig
from harness.model.architecture import architecture_of
from harness.model.moe import Experts
from harness.model.part import ModelPart
from harness.parallelism.fused import lay_gathered
from harness.parallelism.mesh import EXPERT_SHARD, SHARD, Mesh
from harness.util.errors import ConfigError


def apply_fsdp(part: ModelPart, mesh: Mesh, job: Job, device: torch.device) -> None:
    """Wrap every FSDP group of a model part (``Architecture.fsdp_groups``), in place."""
    layout = job.parallelism
    precision = job.precision
    axes = ("dp_replicate", SHARD) if mesh.size("dp_replicate") > 1 else (SHARD,)
    # Inputs are not cast: activations already have param_dtype, and the rotation table must stay
    # float32.
    dtype: torch.dtype = getattr(torch, precision.param_dtype)
    policy = MixedPrecisionPolicy(
        param_dtype=dtype,
        reduce_dtype=getattr(torch, precision.reduce_dtype),
        cast_forward_inputs=False,
    )
    offload = (
        CPUOffloadPolicy(pin_memory=device.type != "cpu") if layout.cpu_offload else OffloadPolicy()
    )

    expert_parameters = (p for moe in part.mixtures.values() for p in moe.experts.parameters())
    dim = layout.expert_shard_dim(part.config.moe.num_experts)
    placements: dict[nn.Parameter, Shard] = dict.fromkeys(expert_parameters, Shard(dim))
    built = dict(part.named_modules())
    groups = defaultdict[str, list[nn.Module]](list)
    architecture = architecture_of(part.config)
    for name, group in architecture.fsdp_groups(part.config, mesh.experts is not None).items():
        if name in built:
            groups[group].append(built[name])
    in_place = InPlace()
    gathered: dict[Tensor, Any] = {}
    for group, modules in groups.items():
        on = mesh.axis(*axes)
        if isinstance(modules[0], Experts):
            assert mesh.experts is not None
            on = mesh.experts[*axes[:-1], EXPERT_SHARD]
        casts = on.size(-1) == 1 and not precision.enable_fsdp_float8_all_gather
        wrapped = fully_shard(
            modules,
            mesh=on,
            # Backward starts with the head: freeing it after forward would only gather it again.
            reshard_after_forward=layout.frees(group),
            shard_placement_fn=placements.get,
            mp_policy=replace(policy, param_dtype=None) if casts else policy,
            offload_policy=offload,
        )
        # A group on one rank gets gathered tensors of a dtype: torch copies its shards to them,
        # which casts.
        for parameters in parameter_groups(wrapped[0]):
            for each in parameters.fsdp_params:
                gathered[each.sharded_param] = each
                if not casts:
                    continue
                each.init_all_gather_outputs([each.sharded_size.numel()], [dtype], 1, each.device)
                each.free_unsharded_param()
        for module in wrapped:
            # Otherwise a divide factor uses NCCL's pre-multiplied sum, which gloo does not have.
            module.set_force_sum_reduction_for_comms(True)
            if on.size() > 1:
                module.set_gradient_divide_factor(1.0)
            if job.fsdp_ranks == 1:
                module.set_custom_reduce_scatter(in_place)
            if on.size(-1) > 1 and layout.fsdp_buffers == "registered":
                if (
                    not on.get_group(-1)._get_backend(device).supports_tensor_alloc(device)
                ):  # torch 2.13
                    rule = "torch registers memory only where GPUs have multicast (NVSwitch, since Hopper)"
                    raise ConfigError("parallelism.fsdp_buffers", "registered", rule, "default")
                module.set_allocate_memory_from_process_group_for_comm(True)
            elif on.size(-1) > 1 and layout.fsdp_buffers == "symmetric":
                module.set_symm_mem_for_comm()
    lay_gathered(part, gathered, layout.parameter_shards, dtype)
    if layout.fixes_messages and job.compile.blocks:
        for layer, moe in part.mixtures.items():
            _gather_with(part.blocks[layer], moe.experts)
    ahead = layout.fsdp_prefetch
    made = (*part.entries, *part.blocks.values(), part.output)
    order: list[Any] = [module for module in made if isinstance(module, FSDPModule)]
    inside = [
        [each for each in module.modules() if isinstance(each, FSDPModule)] for module in order
    ]
    for i, module in enumerate(order):
        # Experts make the host wait, so what comes after them is gathered before. Backward has no
        # waits.
        if layout.ep > 1 or ahead > 1:
            module.set_modules_to_forward_prefetch([*chain(*inside[i + 1 : i + 1 + ahead])])
        if ahead > 1:
            module.set_modules_to_backward_prefetch(
                [*chain(*reversed(inside[max(0, i - ahead) : i]))]
            )


def _gather_with(block: nn.Module, experts: Any) -> None:
    """Gather experts' parameters before their block, and reduce their gradients after it.

    Otherwise FSDP's hooks would be inside of the block, which then could not be one graph.
    """
    state = experts._get_fsdp_state()
    # Private, read in torch 2.13.
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    block.register_forward_pre_hook(state._pre_forward, with_kwargs=True)
    block.register_forward_hook(state._post_forward, prepend=True)


def parameter_groups(module: FSDPModule) -> list[Any]:
    """Return FSDP's parameter groups of a module."""
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    # torch 2.11 has at most one.
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


class InPlace(ReduceScatter):
    """The reduction of a rank that is alone: torch's input and output are one tensor, so nothing is copied.

    torch asks for the input on the stream of backward, which writes it, then for the output on its
    own stream, where it adds gradients and calls hooks. It frees the input when the next group is
    reduced.
    """

    buffer: Tensor | None = None
    stream: Any = None
    captured = False

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        stream = torch.get_device_module(device).current_stream()
        buffer = self.buffer
        if buffer is not None:
            self.buffer = None
            self.stream = stream
            return buffer
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        if self.stream is not None and self.captured == captured:
            stream.wait_stream(
                self.stream
            )  # which may still read what was freed, but not from before a capture
        self.captured = captured
        self.buffer = torch.empty(*size, dtype=dtype, device=device)
        return self.buffer

    def __call__(self, *_: Any, **__: Any) -> None:
        raise AssertionError("torch calls no collective over one rank")


def reshard(part: nn.Module) -> None:
    """Free all gathered parameters of a model part, after a forward pass without a backward pass.

    FSDP also forgets the order of that pass: by it the next backward pass would gather the head
    once more, for nothing, and torch 2.13 would not wait for it.
    """
    if not isinstance(part, FSDPModule):
        return
    if hasattr(part, "reset_iter_state"):
        part.reset_iter_state()
        return
    # Before torch 2.13 there is no such method.
    for module in part.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
            for group in parameter_groups(module):
                group.comm_ctx.post_forward_order.clear()
                group._post_forward_indices.clear()


def sync_gradients(part: nn.Module, layout: ParallelismConfig, last: bool) -> None:
    """Set whether the next backward pass reduces gradients.

    Gradients are reduce-scattered every pass, which bounds their memory; between replicas they are
    summed once per step.
    """
    if not isinstance(part, FSDPModule):
        return
    if layout.parameter_shards == 1:
        part.set_requires_gradient_sync(last)
    elif layout.dp_replicate > 1:
        part.set_requires_all_reduce(last)
