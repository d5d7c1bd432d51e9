"""The output projection, which can take the labels and give the loss without ever having all logits."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn


class Head(nn.Linear):
    """The output projection.

    Attributes:
        loss: maps the residual stream [B, T, C], the weight [V, C] and labels [B, T] to the loss; set where
            the logits are not to stand whole.
    """

    loss: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None

    def forward(self, x_BTC: Tensor, labels_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, V]; the loss, a scalar, where there are labels."""
        if labels_BT is None:
            return super().forward(x_BTC)
        assert self.loss is not None, "labels go to a head that has a loss"
        return self.loss(x_BTC, self.weight, labels_BT)
