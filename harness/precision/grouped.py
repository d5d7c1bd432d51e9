"""Products of groups of rows in float8 and mxfp8, by torchao: what experts multiply with.

Parameters stay plain tensors: torchao's functions are called in place of ``grouped_linear``. They take groups
of whole blocks (``PrecisionConfig.row_block``), bfloat16, and rows and matrices whose last dimension is
contiguous. torchao 0.18 has two recipes; of float8 by rows it has kernels only, so that one is emulated here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from harness.errors import UserError
from harness.model.grouped import grouped_outer, grouped_product
from harness.precision.config import PrecisionConfig

# R: rows, I: input width, O: output width, C: either, E: groups

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def grouped_in(precision: PrecisionConfig) -> Product:
    """The product of groups of rows with a matrix each, in the format of linears.

    Raises:
        ImportError: torchao is missing or too old.
        UserError: it lacks the kernels for this GPU.
    """
    if precision.linear == "float8_rowwise":
        return emulated_rowwise if precision.emulate else _rowwise()
    assert precision.linear == "mxfp8", f"no product of groups in {precision.linear}"
    return _mxfp8(emulate=precision.emulate)


def _rowwise() -> Product:
    from torchao.float8.config import e4m3_dtype
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm

    return _by_torchao(_to_fp8_rowwise_then_scaled_grouped_mm, float8_dtype=e4m3_dtype)


def _mxfp8(*, emulate: bool) -> Product:
    from torchao.prototype.moe_training import _to_mxfp8_then_scaled_grouped_mm
    from torchao.quantization.quantize_.common import KernelPreference

    if not emulate:
        _require_mxfp8_kernels()
    preference = KernelPreference.EMULATED if emulate else KernelPreference.AUTO
    return _by_torchao(_to_mxfp8_then_scaled_grouped_mm, kernel_preference=preference)


def _by_torchao(product: Callable[..., Tensor], **options: Any) -> Product:
    """One of torchao's products as ``grouped_linear`` is called; groups are padded already."""

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
    """Checks for torchao's own kernels, which its wheels do not have for every Python and CUDA.

    Raises:
        UserError: one is missing.
    """
    from torchao.prototype.moe_training import mxfp8_grouped_mm
    from torchao.prototype.moe_training.kernels.mxfp8 import quant

    for there, lacks, works in (
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
        if not there:
            raise UserError(
                f"precision.linear=mxfp8: experts cannot multiply, {lacks}; would work: {works}, or "
                "precision.filter_fqns with moe.experts, which leaves them in param_dtype"
            )


class _EmulatedRowwise(torch.autograd.Function):
    """Rounds as torchao's float8 grouped product does and multiplies in the format of its inputs.

    Values rounded to float8 with scales that are powers of two are exact in bfloat16 too.
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


def emulated_rowwise(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """As ``grouped_linear``, of values rounded to float8 with a scale for each row that is multiplied."""
    return _EmulatedRowwise.apply(x_RI, weight_EOI, ends_E)  # type: ignore[no-any-return]


def _rounded(values: Tensor, dim: int) -> Tensor:
    """Values as float8 has them, with one scale along a dimension."""
    return _rounded_to(values, values.abs().amax(dim, keepdim=True))


def _rounded_by_group(values_RC: Tensor, ends_E: Tensor) -> Tensor:
    """The same with a scale for each column of each group of rows."""
    rows, columns = values_RC.shape
    row_R = torch.arange(rows, device=values_RC.device, dtype=torch.int32)
    expert_R = torch.searchsorted(ends_E, row_R, right=True)
    peak_EC = values_RC.new_zeros(ends_E.shape[0], columns)
    peak_EC = peak_EC.scatter_reduce(0, expert_R[:, None].expand(-1, columns), values_RC.abs(), "amax")
    return _rounded_to(values_RC, peak_EC[expert_R])


def _rounded_to(values: Tensor, peak: Tensor) -> Tensor:
    """Values rounded with the scales that map peaks onto float8's largest, rounded down to powers of two."""
    from torchao.float8.config import e4m3_dtype
    from torchao.float8.float8_utils import amax_to_scale, to_fp8_saturated

    scale = amax_to_scale(peak, e4m3_dtype, round_scales_to_power_of_2=True)
    return (to_fp8_saturated(values.float() * scale, e4m3_dtype).float() / scale).type_as(values)
