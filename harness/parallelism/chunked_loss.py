"""Output projection fused with cross entropy, in chunks of rows: the full logits are never in memory.

At a vocabulary of 128,256 the logits of 8192 tokens are 4.2 GB in float32, and a plain loss holds three such
tensors at once. Here a chunk's gradient is computed right after its logits, as in Liger Kernel
(arXiv:2410.10989, section 3.2), so nothing of a chunk is saved or recomputed. Instead the gradient of the
projection is kept, in float32: chunks are added to it, and a bfloat16 sum would be rounded each time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from harness.config.job import Job
from harness.model.part import ModelPart
from harness.parallelism.loss import TokenLoss, token_scores
from harness.parallelism.mesh import Mesh

# N: rows (tokens) of a chunk or of all, C: residual width, V: vocabulary (of this rank, when it is split)


class ChunkedLoss:
    """Loss computed by the Head (its ``loss``): the same sum and denominator as TokenLoss.

    Args:
        loss: has the denominator.
        chunks: number of chunks of rows.
        mesh: the tp axis when the vocabulary is split over it, else None.
        compiled: the compiler's backend, or None.
    """

    def __init__(self, loss: TokenLoss, chunks: int, mesh: DeviceMesh | None, compiled: str | None) -> None:
        self.loss, self.chunks, self.mesh = loss, chunks, mesh
        # A split vocabulary needs collectives inside, which a compiled function could not call.
        self.cross_entropy = (
            torch.compile(_cross_entropy, backend=compiled) if compiled and mesh is None else _cross_entropy
        )

    def __call__(self, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> Tensor:
        """Map normed activations [B, T, C], the projection's weight and labels [B, T] to a float32 scalar.

        Inside of ``TokenLoss.scoring``, return scores of rows, float64 [B, 2].
        """
        group, first_row = None, 0
        if isinstance(weight_VC, DTensor):
            assert self.mesh is not None, "a split vocabulary needs the tp axis"
            rows_per_rank = -(-weight_VC.shape[0] // self.mesh.size())
            group, first_row = self.mesh.get_group(), rows_per_rank * self.mesh.get_local_rank()
            weight_VC = weight_VC.to_local()
        if self.loss.scores_rows:
            return self._score(x_BTC, weight_VC, labels_BT)
        # full() fills on the device; copying a host value there would make the host wait.
        scale = torch.full((), 1 / self.loss.denominator, device=x_BTC.device)
        losses: list[Tensor] = []
        total: Tensor = _ChunkedCrossEntropy.apply(
            x_BTC.flatten(0, 1),
            weight_VC,
            labels_BT.flatten() - first_row,
            scale,
            _Options(self.chunks, group, self.cross_entropy, losses, with_gradients=torch.is_grad_enabled()),
        )
        if self.loss.row_losses is not None:
            self.loss.record(torch.cat(losses), labels_BT)
        return total

    def _score(self, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> Tensor:
        pieces = zip(
            x_BTC.flatten(0, 1).chunk(self.chunks), labels_BT.flatten().chunk(self.chunks), strict=True
        )
        scores = [
            token_scores(x_NC @ weight_VC.T, labels_N, self.mesh, self.loss.vocab_size)
            for x_NC, labels_N in pieces
        ]
        return torch.cat(scores).unflatten(0, labels_BT.shape).sum(1)


def build_loss(job: Job, mesh: Mesh, parts: Sequence[ModelPart]) -> TokenLoss:
    """Make the loss of a job; with training.loss_chunks, the head computes it."""
    split_logits = job.parallelism.tp > 1 and job.parallelism.loss_parallel
    compiled = job.compile.backend if job.compile.loss else None
    vocabulary = mesh.axis("tp") if split_logits else None
    loss = TokenLoss(job.model.vocab_size, vocabulary, compiled)
    for part in parts:
        if part.output is not None and job.training.loss_chunks > 1:
            part.output.loss = ChunkedLoss(loss, job.training.loss_chunks, vocabulary, compiled)
    return loss


@dataclass(frozen=True)
class _Options:
    chunks: int
    group: dist.ProcessGroup | None
    cross_entropy: Callable[..., tuple[Tensor, Tensor]]
    losses: list[Tensor]
    """Receives the losses of the rows of every chunk."""
    with_gradients: bool


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, scale: Tensor, options: _Options
    ) -> Tensor:
        """Labels are relative to this rank's first row; those out of range are other ranks' or ignored."""
        total = torch.zeros((), device=x_NC.device)
        grad_x_NC = torch.empty_like(x_NC) if options.with_gradients else None
        grad_weight_VC = torch.zeros_like(weight_VC, dtype=torch.float32) if options.with_gradients else None
        rows = max(1, -(-len(x_NC) // options.chunks))
        for start in range(0, len(x_NC), rows):
            piece = slice(start, start + rows)
            logits_NV = x_NC[piece] @ weight_VC.T
            loss_N, grad_NV = options.cross_entropy(logits_NV, labels_N[piece], scale, options.group)
            del logits_NV
            total += loss_N.sum()
            options.losses.append(loss_N)
            if grad_x_NC is None or grad_weight_VC is None:
                continue
            grad_NV = grad_NV.to(x_NC.dtype)
            torch.mm(grad_NV, weight_VC, out=grad_x_NC[piece])
            _add_product(grad_weight_VC, grad_NV.T, x_NC[piece])
        if options.with_gradients:
            ctx.save_for_backward(grad_x_NC, grad_weight_VC)
            ctx.weight_dtype = weight_VC.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x_NC, grad_weight_VC = ctx.saved_tensors
        # A zero-bubble schedule calls this twice, once for each gradient. The multiplication is in float32:
        # a loss weight of 0.3 would be 0.3008 in bfloat16, a systematic factor and not noise.
        return (
            (grad_x_NC.float() * grad).to(grad_x_NC.dtype) if ctx.needs_input_grad[0] else None,
            (grad_weight_VC * grad).to(ctx.weight_dtype) if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


def _add_product(sum_VC: Tensor, grad_VN: Tensor, x_NC: Tensor) -> None:
    """Add a product to a float32 sum, without rounding it to the format of its factors."""
    if x_NC.is_cuda and x_NC.dtype != torch.float32:
        torch.addmm(sum_VC, grad_VN, x_NC, out_dtype=torch.float32, out=sum_VC)
    else:
        sum_VC.addmm_(grad_VN.float(), x_NC.float())


def _cross_entropy(
    logits_NV: Tensor, labels_N: Tensor, scale: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """The rows' cross entropies times ``scale``, and the gradient of their sum by the logits, both float32.

    With a group, the vocabulary is split over its ranks: row maxima, sums and the labels' logits are
    all-reduced (Megatron-LM's vocabulary-parallel cross entropy, arXiv:1909.08053, section 3).
    """
    logits_NV = logits_NV.float()  # in place from here on: one copy of a chunk in memory
    is_local_N = (labels_N >= 0) & (labels_N < logits_NV.shape[1])
    column_N1 = labels_N.clamp(0, logits_NV.shape[1] - 1).unsqueeze(1)
    peak_N = logits_NV.amax(1)
    if group is not None:
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
    shifted_NV = logits_NV.sub_(peak_N.unsqueeze(1))
    label_logit_N = shifted_NV.gather(1, column_N1).squeeze(1) * is_local_N
    weights_NV = shifted_NV.exp_()
    sum_N = weights_NV.sum(1)
    valid_N = is_local_N
    if group is not None:
        sums = torch.stack([sum_N, label_logit_N, is_local_N.float()])
        dist.all_reduce(sums, group=group)
        sum_N, label_logit_N, valid_N = sums[0], sums[1], sums[2] > 0
    scale_N = valid_N * scale
    loss_N = (sum_N.log() - label_logit_N) * scale_N
    grad_NV = weights_NV.mul_((scale_N / sum_N).unsqueeze(1))
    return loss_N, grad_NV.scatter_add_(1, column_N1, -(scale_N * is_local_N).unsqueeze(1))
