"""Grouped products: each group of rows times its own matrix, as experts need.

On GPUs this is torch's grouped product, one kernel for all groups. It takes bfloat16 only, and so
does its meta function. CPUs and other formats have custom operators, which multiply one group after
another and can be traced.

In bfloat16 groups begin at any row. The kernel wants a group's first element at a multiple of 16
bytes and checks it where rows lie along the contiguous dimension only (torch 2.13,
aten/src/ATen/native/cuda/ GroupMMCommon.cuh). They never do: the gradient of the matrices is the
product of a transposed gradient with rows, both of which step by whole rows. torchtitan no longer
pads for bfloat16 either (its pull request 2774). Other formats copy both with rows contiguous and
need whole blocks of them: ``padded_positions``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

# R: rows, P: rows with padding between them, I: input width, O: output width, C: either, E: groups

BLACKWELL = 10
"""Major compute capability of B200 and B300."""


def grouped_linear(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """Multiply each group of rows by its own matrix, [R, O].

    Args:
        x_RI: rows, group after group.
        weight_EOI: a matrix [output width, input width] for each group.
        ends_E: end row of each group (exclusive), int32; the last is R.
    """
    if _has_kernel(x_RI):
        if _leaves_gradients_unwritten(x_RI.device):
            weight_EOI = zero_gradients_where_empty(weight_EOI, ends_E)
        return F.grouped_mm(x_RI, weight_EOI.transpose(1, 2), offs=ends_E)
    return grouped_product(x_RI, weight_EOI, ends_E)


def _has_kernel(x_RI: Tensor) -> bool:
    return x_RI.is_cuda and x_RI.dtype == torch.bfloat16


def ends_for_linear(x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Move ``ends_E`` to where ``grouped_linear`` reads it, once for all products of these rows.

    The kernel reads it on the device. Without the kernel, the host multiplies one group after
    another and reads it: from the device, that would block at every product, forward and backward.
    """
    return on_host(ends_E) if x_RI.device.type != "cpu" and not _has_kernel(x_RI) else ends_E


@torch.library.custom_op("harness::on_host", mutates_args=())
def on_host(tensor: Tensor) -> Tensor:
    """Copy to host memory; blocks the host.

    It is a custom operator so that recomputed blocks can save its result.
    """
    return tensor.to("cpu", copy=True)


@on_host.register_fake
def _(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _leaves_gradients_unwritten(device: torch.device) -> bool:
    """Whether the kernel leaves the gradient of a matrix with an empty group uninitialized.

    On Blackwell it does (github.com/pytorch/pytorch/issues/172439, NVIDIA/cutlass/issues/2674).
    """
    return torch.cuda.get_device_capability(device)[0] >= BLACKWELL


class _ZeroWhereEmpty(torch.autograd.Function):
    """Identity; in backward, gradients of empty groups become zeros."""

    @staticmethod
    def forward(ctx: Any, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
        ctx.save_for_backward(ends_E)
        return weight_EOI.view_as(weight_EOI)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_EOI: Tensor) -> tuple[Tensor, None]:
        (ends_E,) = ctx.saved_tensors
        return grad_EOI.masked_fill((_lengths(ends_E) == 0)[:, None, None], 0.0), None


def zero_gradients_where_empty(weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """The same matrices; gradients of empty groups are zeros, whatever backward computes."""
    return _ZeroWhereEmpty.apply(weight_EOI, ends_E)  # type: ignore[no-any-return]


def padded_positions(ends_E: Tensor, rows: int, block: int) -> tuple[Tensor, Tensor, int]:
    """New positions of rows, so that every group is a positive multiple of ``block`` rows.

    Lengths stay on the device, so the result is sized for the worst case; the last group takes the
    rest.

    Args:
        ends_E: end row of each group (exclusive), int32.
        block: required divisor of each group's length.

    Returns:
        The new position of each row, int64 [R]; the end of each group, int32 [E]; number of
        positions.
    """
    length_E = _lengths(ends_E)
    padded_E = ((length_E + block - 1) // block).clamp_min(1) * block
    places = -(-rows // block) * block + ends_E.shape[0] * block
    padded_ends_E = padded_E.cumsum(0)
    shift_E = (padded_ends_E - padded_E) - (ends_E - length_E)
    row_R = torch.arange(rows, device=ends_E.device)
    place_R = row_R + shift_E[torch.searchsorted(ends_E, row_R.int(), right=True)]
    padded_ends_E = torch.cat((padded_ends_E[:-1], padded_ends_E.new_full((1,), places)))
    return place_R, padded_ends_E.int(), places


def _lengths(ends_E: Tensor) -> Tensor:
    return torch.diff(ends_E, prepend=ends_E.new_zeros(1))


@torch.library.custom_op("harness::grouped_product", mutates_args=())
def grouped_product(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    """``grouped_linear``, one group after another, in any format and on any device."""
    out_RO = x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])
    for expert, (start, end) in enumerate(_groups(ends_E)):
        if end > start:
            torch.mm(x_RI[start:end], weight_EOI[expert].T, out=out_RO[start:end])
    return out_RO


@grouped_product.register_fake
def _(x_RI: Tensor, weight_EOI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(x_RI.shape[0], weight_EOI.shape[1])


@torch.library.custom_op("harness::grouped_outer", mutates_args=())
def grouped_outer(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    """Gradients of the matrices: sums of outer products over each group's rows, [E, O, I]."""
    grad_EOI = x_RI.new_empty(ends_E.shape[0], grad_RO.shape[1], x_RI.shape[1])
    for expert, (start, end) in enumerate(_groups(ends_E)):
        if end > start:
            torch.mm(grad_RO[start:end].T, x_RI[start:end], out=grad_EOI[expert])
        else:
            grad_EOI[expert].zero_()
    return grad_EOI


@grouped_outer.register_fake
def _(grad_RO: Tensor, x_RI: Tensor, ends_E: Tensor) -> Tensor:
    return x_RI.new_empty(ends_E.shape[0], grad_RO.shape[1], x_RI.shape[1])


def _groups(ends_E: Tensor) -> list[tuple[int, int]]:
    ends = ends_E.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def save_inputs(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    """Save what an operator was given, for its backward."""
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad_RO: Tensor) -> tuple[Tensor, Tensor, None]:
    x_RI, weight_EOI, ends_E = ctx.saved_tensors
    grad_RO = grad_RO.contiguous()
    grad_x_RI = grouped_product(grad_RO, weight_EOI.transpose(1, 2), ends_E)
    return grad_x_RI, grouped_outer(grad_RO, x_RI, ends_E), None


grouped_product.register_autograd(_differentiate, setup_context=save_inputs)


def local_shard(module: nn.Module, name: str) -> Tensor:
    """The local shard of a parameter (``to_local``), or the parameter itself when it is no DTensor.

    ``module.partial_gradients`` maps a parameter's name to the placements of its gradient, where
    ranks with the same shard each compute a summand of it.
    """
    parameter = getattr(module, name)
    if not isinstance(parameter, DTensor):
        return parameter  # type: ignore[no-any-return]
    placements = getattr(module, "partial_gradients", {}).get(name)
    return parameter.to_local(grad_placements=placements)
