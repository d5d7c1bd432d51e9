"""The loss: a sum over tokens, divided by the global number of tokens before backward."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from harness.config.job import Job
from harness.data.batch import IGNORE_INDEX
from harness.model.kernels import capped
from harness.model.part import ModelPart
from harness.parallelism.mesh import Mesh


class Loss:
    """A sum over tokens, divided by ``denominator``, the number of them in the optimizer step.

    Attributes:
        row_losses: inside of ``recording``, each row's share of the loss of every call, [B].
    """

    denominator: float | Tensor = 1.0
    row_losses: list[Tensor] | None = None

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Context manager in which every call appends each row's share of the loss, [B], to the list."""
        self.row_losses = []
        try:
            yield self.row_losses
        finally:
            self.row_losses = None


class TokenLoss(Loss):
    """Cross entropy summed over valid tokens and divided by ``denominator``.

    The denominator is the number of valid tokens of the optimizer step, over all data-parallel
    ranks and microbatches; it is set before the step's first forward pass. So no layout computes a
    mean of means, and every framework's own averaging is disabled.
    """

    def __init__(
        self, vocab_size: int, mesh: DeviceMesh | None, compiled: str | None = None
    ) -> None:
        """
        Args:
            mesh: the tp axis when logits are split by vocabulary, else None.
            compiled: the compiler's backend, or None.
        """
        self.vocab_size = vocab_size
        self.mesh = mesh
        self.compiled = compiled
        self.scores_rows = False
        self.losses = torch.compile(_losses, backend=compiled) if compiled else _losses

    def context(self) -> AbstractContextManager:
        """Context manager that forward and backward of the loss must run in."""
        return loss_parallel() if self.mesh is not None else nullcontext()

    @contextmanager
    def scoring(self) -> Iterator[None]:
        """Context manager in which the loss is replaced by scores of each row (see ``token_scores``)."""
        self.scores_rows = True
        try:
            yield
        finally:
            self.scores_rows = False

    @property
    def share(self) -> tuple[dist.ProcessGroup | None, int]:
        """The ranks that split the vocabulary, None if it is not split, and the first token of this one."""
        if self.mesh is None:
            return None, 0
        rows = -(-self.vocab_size // self.mesh.size())
        return self.mesh.get_group(), rows * self.mesh.get_local_rank()

    def record(self, losses: list[Tensor], labels_BT: Tensor) -> None:
        """Record the losses of tokens, in pieces, inside of ``recording``."""
        if self.row_losses is not None:
            losses_N = torch.cat(losses).detach()
            self.row_losses.append(losses_N.unflatten(0, labels_BT.shape).sum(1))

    def __call__(self, logits: Tensor, labels_BT: Tensor) -> Tensor:
        """Map logits [B, T, V] (or this rank's vocabulary shard) and labels [B, T] to a float32 scalar.

        Inside of ``scoring``, return scores of rows, float64 [B, 2].
        """
        logits_NV = logits.flatten(0, 1)
        labels_N = labels_BT.flatten()
        if self.scores_rows:
            return token_scores(logits_NV, labels_N, self).unflatten(0, labels_BT.shape).sum(1)
        if self.mesh is not None:
            # Shape and stride are given because the last shard may be smaller than the others.
            shape = torch.Size((logits_NV.shape[0], self.vocab_size))
            logits_NV = DTensor.from_local(
                logits_NV,
                self.mesh,
                (Shard(1),),
                run_check=False,
                shape=shape,
                stride=(self.vocab_size, 1),
            )
        reduction = "sum" if self.row_losses is None else "none"
        losses = self.losses(logits_NV, labels_N, reduction)
        if isinstance(losses, DTensor):
            losses = losses.to_local()
        losses = losses / self.denominator
        self.record([losses], labels_BT)
        return losses.sum() if losses.ndim else losses


def _losses(logits_NV: Tensor, labels_N: Tensor, reduction: str) -> Tensor:
    return F.cross_entropy(
        logits_NV.float(), labels_N, reduction=reduction, ignore_index=IGNORE_INDEX
    )


def token_scores(logits_NV: Tensor, labels_N: Tensor, loss: TokenLoss) -> Tensor:
    """Score each label: its log-probability, and 1 if another token is more probable.

    Args:
        logits_NV: logits, or this rank's vocabulary shard; overwritten.
        labels_N: labels; IGNORE_INDEX scores 0, 0.

    Returns:
        float64 [N, 2]. As ``argmax`` does, the first of equally probable tokens counts as the most
        probable.
    """
    logits_NV = logits_NV.float()
    group, first = loss.share
    own_peak_N, best_N = logits_NV.max(1)
    best_N = best_N + first
    if group is not None:
        peak_N = own_peak_N.clone()
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
        best_N = torch.where(own_peak_N == peak_N, best_N, loss.vocab_size)
        dist.all_reduce(best_N, dist.ReduceOp.MIN, group)
    scale = torch.ones((), device=logits_NV.device)
    losses_N, _ = _cross_entropy(logits_NV, labels_N - first, scale, group)
    scores_N2 = torch.stack([-losses_N.double(), (best_N != labels_N).double()], dim=1)
    return scores_N2 * (labels_N != IGNORE_INDEX).unsqueeze(1)


# Output projection fused with cross entropy, in chunks of rows: the full logits are never in
# memory.
#
# At a vocabulary of 128,256 the logits of 8192 tokens are 4.2 GB in float32, and a plain loss holds
# three such tensors at once. Here a chunk's gradient is computed right after its logits, as in
# Liger Kernel (arXiv:2410.10989, section 3.2), so nothing of a chunk is saved or recomputed.
# Instead the gradient of the projection is kept, in float32: chunks are added to it, and a bfloat16
# sum would be rounded each time.

# N: rows (tokens) of a chunk or of all, C: residual width, V: vocabulary (of this rank, when it is
# split)


class ChunkedLoss:
    """Loss computed by the Head (its ``loss``): the same sum and denominator as TokenLoss."""

    def __init__(
        self, loss: TokenLoss, chunks: int, z_loss: float = 0.0, cap: float | None = None
    ) -> None:
        self.loss = loss
        self.chunks = chunks
        self.z_loss = z_loss
        self.cap = cap
        self.cross_entropy = _cross_entropy
        # A split vocabulary needs collectives inside, which a compiled function could not call.
        if loss.compiled and loss.mesh is None:
            self.cross_entropy = torch.compile(_cross_entropy, backend=loss.compiled)

    def __call__(self, x_BTC: Tensor, weight_VC: Tensor, labels_BT: Tensor) -> Tensor:
        """Map normed activations [B, T, C], the projection's weight and labels [B, T] to a float32 scalar.

        Inside of ``TokenLoss.scoring``, return scores of rows, float64 [B, 2].
        """
        if isinstance(weight_VC, DTensor):
            weight_VC = weight_VC.to_local()
        x_NC = x_BTC.flatten(0, 1)
        labels_N = labels_BT.flatten()
        if self.loss.scores_rows:
            pieces = zip(x_NC.chunk(self.chunks), labels_N.chunk(self.chunks), strict=True)
            scores = [
                token_scores(self._logits(x, weight_VC), each, self.loss) for x, each in pieces
            ]
            return torch.cat(scores).unflatten(0, labels_BT.shape).sum(1)
        group, first = self.loss.share
        scale = 1 / self.loss.denominator
        if not isinstance(scale, Tensor):
            # full() fills on the device; copying a host value there would make the host wait.
            scale = torch.full((), scale, device=x_BTC.device)
        losses: list[Tensor] = []
        total: Tensor = _ChunkedCrossEntropy.apply(
            x_NC,
            weight_VC,
            labels_N - first,
            self.chunks,
            partial(self.cross_entropy, scale=scale, group=group, z_loss=self.z_loss, cap=self.cap),
            losses,
            torch.is_grad_enabled(),
        )
        self.loss.record(losses, labels_BT)
        return total

    def _logits(self, x_NC: Tensor, weight_VC: Tensor) -> Tensor:
        logits_NV = x_NC @ weight_VC.T
        return logits_NV if self.cap is None else capped(logits_NV, self.cap)


def build_loss(job: Job, mesh: Mesh, parts: Sequence[ModelPart]) -> TokenLoss:
    """Make the loss of a job; with training.loss_chunks, the head computes it."""
    split_logits = job.parallelism.tp > 1 and job.parallelism.loss_parallel
    compiled = job.compile.backend if job.compile.loss else None
    vocabulary = mesh.axis("tp") if split_logits else None
    loss = TokenLoss(job.model.vocab_size, vocabulary, compiled)
    for part in parts:
        if part.output is not None and job.training.loss_in_head:
            part.output.loss = ChunkedLoss(
                loss, job.training.loss_chunks, job.training.z_loss, job.model.logits_cap
            )
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        chunks: int,
        cross_entropy: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        losses: list[Tensor],
        with_gradients: bool,
    ) -> Tensor:
        """Compute the loss and its gradients.

        Args:
            labels_N: relative to this rank's first row; those out of range are other ranks' or
                ignored.
            losses: receives the losses of the rows of every chunk.
        """
        total = torch.zeros((), device=x_NC.device)
        grad_x_NC = torch.empty_like(x_NC) if with_gradients else None
        grad_weight_VC = (
            torch.zeros_like(weight_VC, dtype=torch.float32) if with_gradients else None
        )
        rows = max(1, -(-len(x_NC) // chunks))
        for start in range(0, len(x_NC), rows):
            piece = slice(start, start + rows)
            loss_N, grad_NV = cross_entropy(x_NC[piece] @ weight_VC.T, labels_N[piece])
            total += loss_N.sum()
            losses.append(loss_N)
            if grad_x_NC is None or grad_weight_VC is None:
                continue
            grad_NV = grad_NV.to(x_NC.dtype)
            torch.mm(grad_NV, weight_VC, out=grad_x_NC[piece])
            _add_product(grad_weight_VC, grad_NV.T, x_NC[piece])
        if with_gradients:
            ctx.save_for_backward(grad_x_NC, grad_weight_VC)
            ctx.weight_dtype = weight_VC.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # A zero-bubble schedule calls this twice, once for each gradient. The multiplication is in
        # float32 (a loss weight of 0.3 would be 0.3008 in bfloat16, a systematic factor and not
        # noise), on GPUs without a copy of the gradient in it.
        dtypes = ctx.saved_tensors[0].dtype, ctx.weight_dtype
        scaled = (
            torch.mul(each, grad.view(1, 1), out=torch.empty_like(each, dtype=dtype))
            if needed
            else None
            for each, dtype, needed in zip(
                ctx.saved_tensors, dtypes, ctx.needs_input_grad, strict=False
            )
        )
        return *scaled, None, None, None, None, None


def _add_product(sum_VC: Tensor, grad_VN: Tensor, x_NC: Tensor) -> None:
    """Add a product to a float32 sum, without rounding it to the format of its factors."""
    if x_NC.is_cuda and x_NC.dtype != torch.float32:
        torch.addmm(sum_VC, grad_VN, x_NC, out_dtype=torch.float32, out=sum_VC)
    else:
        sum_VC.addmm_(grad_VN.float(), x_NC.float())


def _cross_entropy(
    logits_NV: Tensor,
    labels_N: Tensor,
    scale: Tensor,
    group: dist.ProcessGroup | None,
    z_loss: float = 0.0,
    cap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """The rows' cross entropies times ``scale``, and the gradient of their sum by the logits, both float32.

    The gradient alone has that of ``z_loss`` times the squared logarithm of the softmax's normalizer.
    With ``cap``, the cross entropies are those of capped logits.

    With a group, the vocabulary is split over its ranks: row maxima, sums and the labels' logits
    are all-reduced (Megatron-LM's vocabulary-parallel cross entropy, arXiv:1909.08053, section 3).
    """
    logits_NV = logits_NV.float()  # in place from here on: one copy of a chunk in memory
    slope_NV = None
    if cap is not None:
        tanh_NV = logits_NV.div_(cap).tanh_()
        slope_NV = tanh_NV.square().neg_().add_(1)
        logits_NV = tanh_NV.mul_(cap)
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
        sum_N = sums[0]
        label_logit_N = sums[1]
        valid_N = sums[2] > 0
    scale_N = valid_N * scale
    log_sum_N = sum_N.log()
    loss_N = (log_sum_N - label_logit_N) * scale_N
    of_weights_N = scale_N / sum_N
    if z_loss:
        of_weights_N = of_weights_N * (1 + 2 * z_loss * (peak_N + log_sum_N))
    grad_NV = weights_NV.mul_(of_weights_N.unsqueeze(1))
    grad_NV = grad_NV.scatter_add_(1, column_N1, -(scale_N * is_local_N).unsqueeze(1))
    return loss_N, grad_NV if slope_NV is None else grad_NV.mul_(slope_NV)
