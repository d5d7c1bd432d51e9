"""From a job to the model parts of this rank: all parallelisms are applied here, in one order."""

from functools import partial

import torch

from harness.config.job import Job
from harness.config.pipeline import split_modules, stages_of_rank
from harness.config.training import ATTENTION
from harness.model.architecture import architecture_of
from harness.model.delta import fla_rule, require_fla
from harness.model.kernels import use_flash
from harness.model.part import ModelPart
from harness.parallelism.activation_checkpoint import (
    apply_activation_checkpoint,
    wraps_compiled_blocks,
)
from harness.parallelism.async_tp import enable_async
from harness.parallelism.compile import apply_compile, prepare_compiler
from harness.parallelism.context import apply_context_parallel
from harness.parallelism.delta import split_scans
from harness.parallelism.expert import apply_expert_parallel
from harness.parallelism.fsdp import apply_fsdp
from harness.parallelism.materialize import materialize
from harness.parallelism.mesh import Mesh
from harness.parallelism.tensor import apply_for_passes, apply_tensor_parallel
from harness.precision.linears import sort_linears
from harness.precision.swap import gathers_float8, swap_linears


def build_model_parts(job: Job, mesh: Mesh, device: torch.device) -> list[ModelPart]:
    """Build, split and initialise this rank's parts of the model (one part without a pipeline).

    Returns:
        The parts in the order of their stages, materialized.
    """
    job.training.check_device(on_cpu=device.type == "cpu")
    parts = build_on_meta(job, mesh, device)
    parameter_device = torch.device("cpu") if job.parallelism.cpu_offload else device
    for part in parts:
        materialize(part, job.training.seed, device, parameter_device)
    return parts


def build_on_meta(
    job: Job, mesh: Mesh, device: torch.device, *, plain: bool = False
) -> list[ModelPart]:
    """Build and split the parts on the meta device: shapes and placements, no values.

    With ``plain`` they are for passes without gradients, of plain tensors under tensor parallel.
    """
    layout = job.parallelism
    lengths = len(job.sizes.lengths)
    prepare_compiler(job, device)
    if layout.async_tp:
        enable_async(mesh.axis("tp"), device)
    if job.training.flash != "default":
        use_flash(job.training.flash, device)
    architecture = architecture_of(job.model)
    modules = split_modules(layout, job.model.n_layers)
    converted = (
        () if job.precision.linear == "none" else sort_linears(job.model, job.precision).converted
    )
    parts = []
    for stage in stages_of_rank(layout, job.model.n_layers, mesh.rank("pp")):
        # Pipeline first: modules of other ranks are never built.
        with torch.device("meta"):
            part = architecture.build_part(job, modules[stage])
        part.to(getattr(torch, job.precision.master_dtype))
        # Precision before tensor parallel, which splits the swapped modules.
        if converted:
            swap_linears(part, converted, job.precision, device)
        # Tensor parallel before FSDP: FSDP shards the tensor-parallel shards, and gathers only up
        # to those.
        if layout.tp > 1 and plain:
            apply_for_passes(part, mesh.axis("tp"))
        elif layout.tp > 1:
            apply_tensor_parallel(
                part,
                mesh.axis("tp"),
                layout,
                loss_in_head=job.training.loss_in_head,
                gather_float8=gathers_float8(job.precision, layout, device),
            )
        # Experts right after tensor parallel, which determines how their input is split.
        apply_expert_parallel(part, mesh, layout, plain=plain)
        part.use_kernel(ATTENTION[job.training.attention])
        if job.training.delta_rule == "fla":
            require_fla()
            for module in part.scans:
                module.inner.rule = fla_rule
        # Context parallel after the kernel is chosen: it replaces or wraps the kernel.
        if layout.cp > 1:
            apply_context_parallel(part, mesh, layout)
            split_scans(part, mesh, layout)
        # Activation checkpointing next: it recomputes the collectives of tensor and context
        # parallel too. Compile after it, so that the partitioner knows what is recomputed.
        recompute = partial(
            apply_activation_checkpoint,
            part,
            job.activation_checkpoint,
            splits_backward=layout.splits_backward,
            in_pieces=job.compile.blocks and layout.compiles_in_pieces,
        )
        outside = wraps_compiled_blocks(job.activation_checkpoint, job.compile, layout)
        if not outside:
            recompute()
        apply_compile(part, job.compile, layout, lengths)
        if outside:
            recompute()
        # FSDP last: it manages the parameters that result from all the others.
        if job.uses_fsdp:
            apply_fsdp(part, mesh, job, device)
        parts.append(part)
    return parts
