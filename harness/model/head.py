"""The output projection, which can compute the loss from labels without materializing all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Head(nn.Linear):
    """The output projection.

    Attributes:
        loss: maps the residual stream [B, T, C], the weight [V, C] and labels [B, T] to the loss; None: the
            head returns logits.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x_BTC: Tensor, *labels_BT: Tensor) -> Tensor:
        """Logits [B, T, V], or the scalar loss if there are labels.

        With L labels, x is L streams concatenated [L * B, T, C], and the result has their losses [L].
        """
        if not labels_BT:
            return super().forward(x_BTC)
        assert self.loss is not None, "labels need a head with a loss"
        streams = x_BTC.chunk(len(labels_BT))
        losses = [self.loss(x, self.weight, labels) for x, labels in zip(streams, labels_BT, strict=True)]
        return losses[0] if len(losses) == 1 else torch.stack(losses)
