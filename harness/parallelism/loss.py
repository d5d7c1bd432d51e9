"""The loss: a sum over tokens, divided by the global number of tokens before backward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from harness.data.loader import IGNORE_INDEX


class Loss(Protocol):
    """A sum over tokens, divided by ``denominator``, the number of them in the optimizer step."""

    denominator: float

    def recording(self) -> AbstractContextManager[list[Tensor]]:
        """Context manager in which every call appends each row's share of the loss, [B], to the list."""
        ...


class TokenLoss:
    """Cross entropy summed over valid tokens and divided by ``denominator``.

    The denominator is the number of valid tokens of the optimizer step, over all data-parallel ranks and
    microbatches; it is set before the step's first forward pass. So no layout computes a mean of means, and
    every framework's own averaging is disabled.
    """

    def __init__(self, vocab_size: int, mesh: DeviceMesh | None, compiled: str | None = None) -> None:
        """
        Args:
            vocab_size: size of the full vocabulary.
            mesh: the tp axis when logits are split by vocabulary, else None.
            compiled: the compiler's backend, or None.
        """
        self.vocab_size = vocab_size
        self.mesh = mesh
        self.denominator = 1.0
        self.scores_rows = False
        self.row_losses: list[Tensor] | None = None
        functions = [_sum_of_losses, _losses]
        if compiled:
            functions = [torch.compile(function, backend=compiled) for function in functions]
        self.sum_of_losses, self.losses = functions

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

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Context manager in which every call appends each row's share of the loss, [B], to the list."""
        self.row_losses = []
        try:
            yield self.row_losses
        finally:
            self.row_losses = None

    def record(self, losses_N: Tensor, labels_BT: Tensor) -> None:
        """Record the losses of tokens, inside of ``recording``."""
        assert self.row_losses is not None
        self.row_losses.append(losses_N.detach().unflatten(0, labels_BT.shape).sum(1))

    def __call__(self, logits: Tensor, labels_BT: Tensor) -> Tensor:
        """Map logits [B, T, V] (or this rank's vocabulary shard) and labels [B, T] to a float32 scalar.

        Inside of ``scoring``, return scores of rows, float64 [B, 2].
        """
        logits_NV = logits.flatten(0, 1)
        if self.scores_rows:
            scores_N2 = token_scores(logits_NV, labels_BT.flatten(), self.mesh, self.vocab_size)
            return scores_N2.unflatten(0, labels_BT.shape).sum(1)
        if self.mesh is not None:
            # Shape and stride are given because the last shard may be smaller than the others.
            shape = torch.Size((logits_NV.shape[0], self.vocab_size))
            logits_NV = DTensor.from_local(
                logits_NV, self.mesh, (Shard(1),), run_check=False, shape=shape, stride=(self.vocab_size, 1)
            )
        if self.row_losses is not None:
            losses_N = _to_local(self.losses(logits_NV, labels_BT.flatten())) / self.denominator
            self.record(losses_N, labels_BT)
            return losses_N.sum()
        return _to_local(self.sum_of_losses(logits_NV, labels_BT.flatten())) / self.denominator


def _to_local(loss: Tensor) -> Tensor:
    return loss.to_local() if isinstance(loss, DTensor) else loss


def _losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="none", ignore_index=IGNORE_INDEX)


def _sum_of_losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="sum", ignore_index=IGNORE_INDEX)


def token_scores(
    logits_NV: Tensor, labels_N: Tensor, vocabulary: DeviceMesh | None, vocab_size: int
) -> Tensor:
    """Score each label: its log-probability, and 1 if another token is more probable.

    Args:
        logits_NV: logits, or this rank's vocabulary shard.
        labels_N: labels; IGNORE_INDEX scores 0, 0.
        vocabulary: the tp axis when logits are split by vocabulary.
        vocab_size: size of the full vocabulary.

    Returns:
        float64 [N, 2]. As ``argmax`` does, the first of equally probable tokens counts as the most probable.
    """
    logits_NV = logits_NV.float()
    group, first = None, 0
    if vocabulary is not None:
        group = vocabulary.get_group()
        first = -(-vocab_size // vocabulary.size()) * vocabulary.get_local_rank()
    column_N = labels_N - first
    is_local_N = (column_N >= 0) & (column_N < logits_NV.shape[1])
    peak_N, best_N = logits_NV.max(1)
    own_peak_N, best_N = peak_N, best_N + first
    if group is not None:
        peak_N = peak_N.clone()
        dist.all_reduce(peak_N, dist.ReduceOp.MAX, group)
        best_N = torch.where(own_peak_N == peak_N, best_N, vocab_size)
        dist.all_reduce(best_N, dist.ReduceOp.MIN, group)
    column_N1 = column_N.clamp(0, logits_NV.shape[1] - 1).unsqueeze(1)
    label_N = torch.where(is_local_N, logits_NV.gather(1, column_N1).squeeze(1) - peak_N, 0.0)
    sums_2N = torch.stack([(logits_NV - peak_N.unsqueeze(1)).exp_().sum(1), label_N])
    if group is not None:
        dist.all_reduce(sums_2N, group=group)
    log_probability_N = sums_2N[1] - sums_2N[0].log()
    scores_N2 = torch.stack([log_probability_N.double(), (best_N != labels_N).double()], dim=1)
    return scores_N2 * (labels_N != IGNORE_INDEX).unsqueeze(1)
