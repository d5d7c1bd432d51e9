"""Pipeline parallelism: torch's stages and schedules over this rank's model parts."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining._backward import _get_grad_fn_or_grad_acc
from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    _Action,
    _PipelineScheduleRuntime,
    get_schedule_class,
)

from harness.config.job import Job
from harness.config.pipeline import num_stages, read_csv_schedule, stages_of_rank
from harness.model.part import ModelPart
from harness.parallelism.fsdp import parameter_groups
from harness.parallelism.mesh import Mesh
from harness.util.annotation import annotated
from harness.util.errors import LostGradientError, UserError


class Stage(PipelineStage):
    """A stage whose split backward pass works with parameters that FSDP frees after forward.

    torch looks up the module's parameters in the autograd graph. If FSDP has freed the gathered
    parameters after forward, the module has their shards, which are in no graph, and gradients are
    lost without an error. So the parameters are gathered before either half of the backward pass.
    """

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with annotated("forward.blocks", self.stage_index):
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with annotated("backward.head" if self.is_last else "backward.blocks", self.stage_index):
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with annotated("backward.blocks", self.stage_index):
            return super().backward_weight_one_chunk(*args, **kwargs)

    def backward_maybe_with_nosync(
        self, backward_type: str, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type in ("input", "weight"):
            for module in self._fsdp_modules():
                module.unshard()
        result = super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        if backward_type == "input":
            # The weight pass must give every parameter a gradient.
            found = set().union(*(group["params"] for group in result[1] or []))
            named = [(name, p) for name, p in self.submod.named_parameters() if p.requires_grad]
            if len(found) < len(named):
                raise LostGradientError(
                    name
                    for name, parameter in named
                    if _get_grad_fn_or_grad_acc(parameter) not in found
                )
        return result

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        # After the weight pass, some gradients of a group are in reduce_dtype and others still in
        # param_dtype, and FSDP refuses to reduce them together. Its post_backward without
        # synchronization converts all of them to reduce_dtype.
        for module in self._fsdp_modules():
            module.set_requires_gradient_sync(False, recurse=False)
            module.set_reshard_after_backward(False, recurse=False)
            for group in parameter_groups(module):
                group.post_backward()
        super().perform_reduce_grad(grad_scale_factor)

    def _fsdp_modules(self) -> list[FSDPModule]:
        return [module for module in self.submod.modules() if isinstance(module, FSDPModule)]


def build_schedule(
    job: Job,
    mesh: Mesh,
    parts: Sequence[ModelPart],
    loss: Callable[[Tensor, Tensor], Tensor],
    device: torch.device,
) -> Any:
    """Make torch's schedule object for this rank.

    Args:
        mesh: has the pp axis.
        parts: this rank's model parts, in the order of ``stages_of_rank``.
        loss: maps the last stage's output and the labels to the loss.
    """
    layout = job.parallelism
    n_layers = job.model.n_layers
    total = num_stages(layout, n_layers)
    stages = [
        Stage(
            part,
            index,
            total,
            device,
            input_args=boundary(job, mesh, part, entering=True),
            output_args=boundary(job, mesh, part, entering=False),
            group=mesh.group("pp"),
        )
        for index, part in zip(
            stages_of_rank(layout, n_layers, mesh.rank("pp")), parts, strict=True
        )
    ]

    def loss_of(output: Tensor, labels: Tensor) -> Tensor:
        if job.training.loss_in_head:
            return output  # already the loss
        with annotated("forward.head", total - 1):
            return loss(output, labels)

    # The loss is a sum over the global number of tokens: microbatches must add up, not average.
    common: dict[str, Any] = {
        "n_microbatches": job.microbatches,
        "loss_fn": loss_of,
        "scale_grads": False,
    }
    if layout.pp_schedule_csv is not None:
        schedule = _PipelineScheduleRuntime(stages, **common)
        if (
            read_csv_schedule(layout.pp_schedule_csv, layout.pp).digest
            != layout.pp_schedule_csv_digest
        ):
            raise UserError(
                f"parallelism.pp_schedule_csv={layout.pp_schedule_csv}: the file changed after the job was "
                "composed; would work: the original file, or composing the job again"
            )
        schedule._load_csv(layout.pp_schedule_csv)
        return schedule
    schedule_class = get_schedule_class(layout.pp_schedule)
    return schedule_class(
        stages[0] if issubclass(schedule_class, PipelineScheduleSingle) else stages, **common
    )


# By name: waits for sends are actions of their own since torch 2.15.
_FORWARD_TYPES = {"FORWARD", "SEND_F", "WAIT_SEND_F", "RECV_F", "UNSHARD", "RESHARD"}


@contextmanager
def forward_only(schedule: Any) -> Iterator[None]:
    """Context manager that removes the backward actions from a schedule.

    torch's ``eval`` processes backward actions too, and where neighbouring stages are on one rank
    (ZBVZeroBubble, DualPipeV) it reads gradients that do not exist.
    """
    if not isinstance(schedule, _PipelineScheduleRuntime):
        yield
        return
    original = schedule.pipeline_order_with_comms
    schedule.pipeline_order_with_comms = {
        rank: [forward for action in actions for forward in _forward_of(action)]
        for rank, actions in original.items()
    }
    try:
        yield
    finally:
        schedule.pipeline_order_with_comms = original


def _forward_of(action: _Action) -> list[_Action]:
    """Forward part of an action: the action, nothing, or the forward half of an overlapped pair."""
    parts = action.sub_actions or (action,)
    return [part for part in parts if part.computation_type.name in _FORWARD_TYPES]


def boundary(job: Job, mesh: Mesh, part: ModelPart, *, entering: bool) -> Tensor:
    """Meta tensor with the shape and dtype of a stage's input or output on this rank, for one microbatch.

    With it torch needs no trial forward and backward pass to infer shapes. ``requires_grad`` marks
    the tensors whose gradients are sent back.
    """
    layout = job.parallelism
    batch = layout.pp_microbatch_size
    seq_len = job.training.seq_len // layout.cp
    if entering and part.tok_embeddings is not None:
        return torch.empty(batch, seq_len, dtype=torch.int64, device="meta")
    dtype = getattr(torch, job.precision.param_dtype)
    width = job.model.dim
    if not entering and part.output is not None:
        if job.training.loss_in_head:
            return torch.empty((), device="meta", requires_grad=True)
        width = job.model.vocab_size
        if layout.tp > 1 and layout.loss_parallel:
            rows = -(-width // layout.tp)
            width = max(0, min(rows, width - rows * mesh.rank("tp")))
    elif layout.uses_sequence_parallel:
        seq_len //= layout.tp
    return torch.empty(batch, seq_len, width, dtype=dtype, device="meta", requires_grad=True)
