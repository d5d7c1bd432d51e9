"""Tensor parallelism of float8 linears that all-gathers in float8: half the bytes.

A tensorwise scale is the largest magnitude over all shards, so casting before the gather gives the same
result as casting after it. CPUs and the other recipes gather in param_dtype with the plain styles, which
compute the same: gloo cannot send float8, and rowwise scales would have to be sent too.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle

from harness.config.parallelism import ParallelismConfig
from harness.config.precision import PrecisionConfig
from harness.model.spec import Split

if TYPE_CHECKING:
    from torchao.float8.float8_linear import Float8Linear


def gathers_float8(precision: PrecisionConfig, layout: ParallelismConfig, device: torch.device) -> bool:
    """Whether tensor parallelism all-gathers in float8."""
    return precision.linear == "float8_tensorwise" and layout.uses_sequence_parallel and device.type == "cuda"


def float8_style(module: nn.Module, split: Split, stream: Placement) -> ParallelStyle | None:
    """Parallel style of a float8 linear, or None for another module or split."""
    from torchao.float8.float8_linear import Float8Linear
    from torchao.float8.float8_tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel

    if not isinstance(module, Float8Linear):
        return None
    if split is Split.COLUMN:
        return Float8ColwiseParallel()
    # Its gradient arrives split along the sequence and is gathered.
    return Float8RowwiseParallel(output_layouts=stream) if split is Split.ROW else None


class Float8Cast:
    """Casts a region's input to float8 before it is gathered, once for all linears that take it.

    Args:
        linear: one of these linears.
    """

    def __init__(self, linear: Float8Linear) -> None:
        self.config, self.linear_mm_config = linear.config, linear.linear_mm_config

    def __call__(self, tensor: DTensor) -> DTensor:
        from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
        from torchao.float8.float8_training_tensor import GemmInputRole

        return hp_tensor_to_float8_dynamic(
            tensor,
            self.config.cast_config_input.target_dtype,
            self.linear_mm_config,
            gemm_input_role=GemmInputRole.INPUT,
        )


def region_cast(inner: Iterable[tuple[Split, nn.Module]]) -> Float8Cast | None:
    """Return the float8 cast of a region's input; None unless all linears that take the input are float8.

    Args:
        inner: the modules inside the region, and how each is split.
    """
    from torchao.float8.float8_linear import Float8Linear

    inner = list(inner)
    if any(split is Split.WHOLE for split, _ in inner):
        return None  # latents: some column linears have another input
    users = [module for split, module in inner if split is Split.COLUMN]
    return Float8Cast(users[0]) if all(isinstance(user, Float8Linear) for user in users) else None
