"""Grouped matrix products in float8 and mxfp8, by torchao, for experts.

Parameters stay plain tensors: torchao's functions replace ``grouped_linear``. They need groups
padded to blocks (``PrecisionConfig.expert_block``), bfloat16, and tensors whose last dimension is
contiguous. torchao 0.18 has two recipes and does not emulate the rowwise float8 one, so that is
emulated here.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.config.precision import PrecisionConfig
from harness.model.grouped import grouped_outer, grouped_product
from harness.util.errors import UserError

# R: rows, I: input width, O: output width, C: either, E: groups

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def build_grouped_product(precision: PrecisionConfig) -> Product:
    """Return the grouped product (groups of rows, a matrix each) in the format ``precision.linear``."""
    if precision.linear == "float8_rowwise" and precision.emulate:
        return _EmulatedRowwise.apply
    if precision.linear == "float8_rowwise":
        from torchao.float8.config import e4m3_dtype
        from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

        return _adapt(_to_fp8_rowwise_then_scaled_grouped_mm, float8_dtype=e4m3_dtype)
    assert precision.linear == "mxfp8", f"no grouped product in {precision.linear}"
    from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    preference = KernelPreference.EMULATED
    if not precision.emulate:
        _require_mxfp8_kernels()
        preference = KernelPreference.AUTO
    return _adapt(_to_mxfp8_then_scaled_grouped_mm, kernel_preference=preference)


def _adapt(product: Callable[..., Tensor], **options: Any) -> Product:
    """Wrap a torchao product in the signature of ``grouped_linear``; groups are padded by the caller."""

    def multiply(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        out_RO = product(
            x_RI.bfloat16(),
            weight_EOI.bfloat16().transpose(1, 2),
            ends_E,
            out_dtype=torch.bfloat16,
            pad_token_groups_for_grouped_mm=False,
            **options,
        )
        return out_RO.type_as(x_RI)

    return multiply


def _require_mxfp8_kernels() -> None:
    """Check for torchao's own kernels, which its wheels do not include for every Python and CUDA."""
    from torchao.prototype.moe_training import mxfp8_grouped_mm
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    for available, problem, works in (
        (
            mxfp8_grouped_mm._SM100_KERNELS_AVAILABLE,
            "torchao's CUDA extension for mxfp8 was not loaded",
            "a torchao built for this Python and CUDA 12.8 or newer",
        ),
        (
            quant._mxfp8_cutedsl_kernels_available,
            "the packages that compile torchao's mxfp8 casts are missing",
            "pip install nvidia-cutlass-dsl apache-tvm-ffi",
        ),
    ):
        if not available:
            raise UserError(
                f"precision.linear=mxfp8: experts cannot multiply, {problem}; would work: {works}, or "
                "precision.filter_fqns with moe.experts, which leaves them in param_dtype"
            )


class _EmulatedRowwise(torch.autograd.Function):
    """``grouped_linear`` of values rounded to float8, with a scale per row of the product.

    Rounds like torchao's float8 grouped product and multiplies in the dtype of its inputs.

    This is exact in bfloat16 too, because the scales are powers of two.
    """

    @staticmethod
    def forward(ctx: Any, x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(x_RI, weight_EOI, ends_E)
        return grouped_product(_rounded(x_RI, 1), _rounded(weight_EOI, 2), ends_E)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
        x_RI, weight_EOI, ends_E = ctx.saved_tensors
        weight_EIO = _rounded(weight_EOI, 1).transpose(1, 2)
        grad_x_RI = grouped_product(_rounded(grad_RO, 1), weight_EIO, ends_E)
        by_group = _rounded_by_group(grad_RO, ends_E), _rounded_by_group(x_RI, ends_E)
        return grad_x_RI, grouped_outer(*by_group, ends_E), None


def _rounded(values: Tensor, dim: int) -> Tensor:
    """Values rounded to float8 with one scale along a dimension."""
    return _rounded_to(values, values.abs().amax(dim, keepdim=True))


def _rounded_by_group(values_RC: Tensor, ends_E: Tensor) -> Tensor:
    """Values rounded to float8 with a scale for each column of each group of rows."""
    rows, columns = values_RC.shape
    row_R = torch.arange(rows, device=values_RC.device, dtype=torch.int32)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    peak_EC = values_RC.new_zeros(ends_E.shape[0], columns)
    peak_EC = peak_EC.scatter_reduce(
        0, expert_R[:, None].expand(-1, columns), values_RC.abs(), "amax"
    )
    return _rounded_to(values_RC, peak_EC[expert_R])


def _rounded_to(values: Tensor, peak: Tensor) -> Tensor:
    """Values rounded to float8; scales map peaks to float8's maximum and are rounded down to powers of 2."""
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    scale = amax_to_scale(peak, e4m3_dtype, round_scales_to_power_of_2=True)
    return (to_fp8_saturated(values.float() * scale, e4m3_dtype).float() / scale).type_as(values)
