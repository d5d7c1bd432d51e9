"""Sums of experts' outputs for each token, in float32.

On GPUs each direction is one Triton kernel, which reads and writes rows in their own format and
order. Elsewhere plain operations copy all outputs to float32. Sums may differ in the last bits of
float32.
"""

from typing import Any

import torch
from torch import Tensor

from harness.model.grouped import save_inputs

try:
    import triton
    import triton.language as tl
except ImportError:  # torch without CUDA
    triton = None

# N: tokens, K: experts of a token, R: rows (N times K), C: residual width

BLOCK = 1024
"""Columns that a program reads at once."""


@torch.library.custom_op("harness::combine", mutates_args=())
def combine(out_RC: Tensor, weights_NK: Tensor, order_R: Tensor, place_R: Tensor) -> Tensor:
    """Weighted sum of each token's outputs, [N, C].

    Args:
        out_RC: outputs, sorted by expert.
        weights_NK: float32.
        order_R: for each output the number of its choice, token by token.
        place_R: the inverse of ``order_R``.
    """
    if not out_RC.is_cuda:
        out_NKC = out_RC.index_select(0, place_R).unflatten(0, weights_NK.shape)
        return torch.bmm(weights_NK.unsqueeze(1), out_NKC.float()).squeeze(1).type_as(out_RC)
    N, K = weights_NK.shape
    C = out_RC.shape[1]
    sum_NC = out_RC.new_empty(N, C)
    _sum[N, triton.cdiv(C, BLOCK)](out_RC, weights_NK.contiguous(), place_R, sum_NC, C, K, BLOCK)
    return sum_NC


@combine.register_fake
def _(out_RC: Tensor, weights_NK: Tensor, *_: Tensor) -> Tensor:
    return out_RC.new_empty(weights_NK.shape[0], out_RC.shape[1])


@torch.library.custom_op("harness::combine_backward", mutates_args=())
def _backward(
    grad_NC: Tensor, out_RC: Tensor, weights_NK: Tensor, order_R: Tensor, place_R: Tensor
) -> tuple[Tensor, Tensor]:
    if not out_RC.is_cuda:
        grad_N1C = grad_NC.float().unsqueeze(1)
        grad_NKC = (weights_NK.unsqueeze(2) * grad_N1C).type_as(out_RC)
        out_NKC = out_RC.index_select(0, place_R).unflatten(0, weights_NK.shape)
        return grad_NKC.flatten(0, 1).index_select(0, order_R), (out_NKC.float() * grad_N1C).sum(-1)
    gradients = torch.empty_like(out_RC), torch.empty_like(weights_NK)
    inputs = grad_NC.contiguous(), out_RC, weights_NK.contiguous(), place_R
    _gradients[len(place_R),](*inputs, *gradients, out_RC.shape[1], weights_NK.shape[1], BLOCK)
    return gradients


@_backward.register_fake
def _(grad_NC: Tensor, out_RC: Tensor, weights_NK: Tensor, *_: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(out_RC), torch.empty_like(weights_NK)


def _differentiate(ctx: Any, grad_NC: Tensor) -> tuple[Tensor, Tensor, None, None]:
    return *_backward(grad_NC, *ctx.saved_tensors), None, None


combine.register_autograd(_differentiate, setup_context=save_inputs)

if triton is not None:

    @triton.jit  # type: ignore[untyped-decorator]
    def _sum(out_RC, weights_NK, place_R, sum_NC, C, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        token = tl.program_id(0).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        total = tl.zeros((BLOCK,), tl.float32)
        for k in range(K):
            row = tl.load(place_R + token * K + k)
            weight = tl.load(weights_NK + token * K + k)
            total += weight * tl.load(out_RC + row * C + columns, columns < C, 0.0).to(tl.float32)
        tl.store(sum_NC + token * C + columns, total.to(sum_NC.dtype.element_ty), columns < C)

    @triton.jit  # type: ignore[untyped-decorator]
    def _gradients(  # type: ignore[no-untyped-def]
        grad_NC,
        out_RC,
        weights_NK,
        place_R,
        grad_RC,
        grad_NK,
        C,
        K: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
        choice = tl.program_id(0).to(tl.int64)
        row = tl.load(place_R + choice)
        weight = tl.load(weights_NK + choice)
        total = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, C, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            grad = tl.load(grad_NC + choice // K * C + columns, columns < C, 0.0).to(tl.float32)
            total += grad * tl.load(out_RC + row * C + columns, columns < C, 0.0).to(tl.float32)
            tl.store(
                grad_RC + row * C + columns,
                (weight * grad).to(grad_RC.dtype.element_ty),
                columns < C,
            )
        tl.store(grad_NK + choice, tl.sum(total))
