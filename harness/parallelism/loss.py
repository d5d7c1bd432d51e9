"""The loss: a sum over tokens, divided by the global number of tokens before backward."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import loss_parallel

from harness.data.loader import IGNORE_INDEX


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
            compiled: the compiler's backend, or None. torch's loss of split logits is never compiled.
        """
        self.vocab_size = vocab_size
        self.mesh = mesh
        self.denominator = 1.0
        self.sum_of_losses = (
            torch.compile(_sum_of_losses, backend=compiled) if compiled and mesh is None else _sum_of_losses
        )

    def context(self) -> AbstractContextManager:
        """Context manager that forward and backward of the loss must run in."""
        return loss_parallel() if self.mesh is not None else nullcontext()

    def __call__(self, logits: Tensor, labels_BT: Tensor) -> Tensor:
        """Map logits [B, T, V] (or this rank's vocabulary shard) and labels [B, T] to a float32 scalar."""
        logits_NV = logits.flatten(0, 1)
        if self.mesh is not None:
            # Shape and stride are given because the last shard may be smaller than the others.
            shape = torch.Size((logits_NV.shape[0], self.vocab_size))
            logits_NV = DTensor.from_local(
                logits_NV, self.mesh, (Shard(1),), run_check=False, shape=shape, stride=(self.vocab_size, 1)
            )
        loss = self.sum_of_losses(logits_NV, labels_BT.flatten())
        if isinstance(loss, DTensor):
            loss = loss.to_local()
        return loss / self.denominator


def _sum_of_losses(logits_NV: Tensor, labels_N: Tensor) -> Tensor:
    return F.cross_entropy(logits_NV.float(), labels_N, reduction="sum", ignore_index=IGNORE_INDEX)
