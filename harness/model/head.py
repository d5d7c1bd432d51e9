"""The output projection, which can take the labels and give the loss without ever having all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Head(nn.Linear):
    """The output projection.

    Attributes:
        loss: maps the residual stream [B, T, C], the weight [V, C] and labels [B, T] to the loss; set where
            the logits are not to stand whole.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x_BTC: Tensor, *labels_BT: Tensor) -> Tensor:
        """Logits [B, T, V]; the loss, a scalar, where there are labels.

        Where there are several labels, x has as many streams behind each other [L * B, T, C], and there is a
        loss of each [L].
        """
        if not labels_BT:
            return super().forward(x_BTC)
        assert self.loss is not None, "labels go to a head that has a loss"
        streams = x_BTC.chunk(len(labels_BT))
        losses = [self.loss(x, self.weight, labels) for x, labels in zip(streams, labels_BT, strict=True)]
        return losses[0] if len(losses) == 1 else torch.stack(losses)
