"""Output projection and cross entropy together, a few rows at a time: logits never stand whole.

At a vocabulary of 128,256 the logits of 8192 tokens are 4.2 GB in float32, and a plain loss has three of them
at once. Here a chunk's gradient is computed as soon as its logits are, as Liger Kernel does it
(arXiv:2410.10989, section 3.2), so nothing of a chunk has to be kept or computed again. What is kept instead
is the gradient of the projection, in float32: chunks are added to it, and a sum in bfloat16 would be rounded
each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.parallelism.loss import TokenLoss

# N: rows (tokens) of a chunk or of all, C: residual width, V: vocabulary (of this rank, when it is split)


class ChunkedLoss:
    """What a Head's ``loss`` is: the same sum over valid tokens as TokenLoss, divided alike.

    Args:
        loss: has the denominator.
        chunks: into how many pieces the rows are cut.
        mesh: the tp axis when the vocabulary is split over it, else None.
        compiled: the compiler's backend, or None.
    """

    def __init__(self, loss: TokenLoss, chunks: int, mesh: DeviceMesh | None, compiled: str | None) -> None:
        self.loss, self.chunks, self.mesh = loss, chunks, mesh
        # Between the pieces of a split vocabulary ranks talk, which a compiled function could not.
        self.entropy = torch.compile(_entropy, backend=compiled) if compiled and mesh is None else _entropy

    def __call__(self, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> Tensor:
        """Maps the normed stream [B, T, C], the projection's weight and labels [B, T] to a float32 scalar."""
        group, first_row = None, 0
        if isinstance(weight_VC, DTensor):
            assert self.mesh is not None, "a split vocabulary has ranks to split it over"
            rows_per_rank = -(-weight_VC.shape[0] // self.mesh.size())
            group, first_row = self.mesh.get_group(), rows_per_rank * self.mesh.get_local_rank()
            weight_VC = weight_VC.to_local()
        # Filled in on the device; a number that is copied there makes the host wait.
        scale = torch.full((), 1 / self.loss.denominator, device=x_BTC.device)
        total: Tensor = _ChunkedCrossEntropy.apply(
            x_BTC.flatten(0, 1),
            weight_VC,
            labels_BT.flatten() - first_row,
            scale,
            _Chunks(self.chunks, group, self.entropy, with_gradients=torch.is_grad_enabled()),
        )
        return total


class _Chunks:
    """How the chunks are computed."""

    def __init__(
        self,
        number: int,
        group: dist.ProcessGroup | None,
        entropy: Callable[..., tuple[Tensor, Tensor]],
        *,
        with_gradients: bool,
    ) -> None:
        self.number, self.group, self.entropy, self.with_gradients = number, group, entropy, with_gradients


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, scale: Tensor, how: _Chunks
    ) -> Tensor:
        """Labels count from this rank's first row; negative ones below it are other ranks', or ignored."""
        total = torch.zeros((), device=x_NC.device)
        grad_x_NC = torch.empty_like(x_NC) if how.with_gradients else None
        grad_weight_VC = torch.zeros_like(weight_VC, dtype=torch.float32) if how.with_gradients else None
        rows = max(1, -(-len(x_NC) // how.number))
        for start in range(0, len(x_NC), rows):
            piece = slice(start, start + rows)
            logits_NV = x_NC[piece] @ weight_VC.T
            loss, grad_NV = how.entropy(logits_NV, labels_N[piece], scale, how.group)
            del logits_NV
            total += loss
            if grad_x_NC is None or grad_weight_VC is None:
                continue
            grad_NV = grad_NV.to(x_NC.dtype)
            torch.mm(grad_NV, weight_VC, out=grad_x_NC[piece])
            if x_NC.dtype == torch.float32:
                grad_weight_VC.addmm_(grad_NV.T, x_NC[piece])
            else:
                grad_weight_VC += grad_NV.T @ x_NC[piece]
        if how.with_gradients:
            ctx.save_for_backward(grad_x_NC, grad_weight_VC)
            ctx.weight_dtype = weight_VC.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NC, grad_weight_VC = ctx.saved_tensors
        # A zero-bubble schedule comes twice, for the one and for the other. In bfloat16 a loss's weight of
        # 0.3 would be 0.3008: a factor, and not noise.
        return (
            (grad_x_NC.float() * grad).to(grad_x_NC.dtype) if ctx.needs_input_grad[0] else None,
            (grad_weight_VC * grad).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


def _entropy(
    logits_NV: Tensor, labels_N: Tensor, scale: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Sum of the rows' cross entropies, times ``scale``, and its gradient by the logits, both float32.

    With a group, the vocabulary is split over its ranks: row maxima, sums and the labels' own logits are
    settled between them (Megatron-LM's vocabulary-parallel cross entropy, arXiv:1909.08053, section 3).
    """
    logits_NV = logits_NV.float()  # in place from here on: a chunk stands in memory once
    here = (labels_N >= 0) & (labels_N < logits_NV.shape[1])
    column_N1 = labels_N.clamp(0, logits_NV.shape[1] - 1).unsqueeze(1)
    peak_N = logits_NV.amax(1)
    if group is not None:
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
    shifted_NV = logits_NV.sub_(peak_N.unsqueeze(1))
    own_N = shifted_NV.gather(1, column_N1).squeeze(1) * here
    weights_NV = shifted_NV.exp_()
    sum_N = weights_NV.sum(1)
    valid = here
    if group is not None:
        sums = torch.stack([sum_N, own_N, here.float()])
        dist.all_reduce(sums, group=group)
        sum_N, own_N, valid = sums[0], sums[1], sums[2] > 0
    scale_N = valid * scale
    loss = ((sum_N.log() - own_N) * scale_N).sum()
    grad_NV = weights_NV.mul_((scale_N / sum_N).unsqueeze(1))
    return loss, grad_NV.scatter_add_(1, column_N1, -(scale_N * here).unsqueeze(1))
