"""Loss and gradient norm of a step, which the device may not have computed yet."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

HOST = torch.device("cpu")


class HostCopy:
    """A copy of a tensor in host memory, which the device may not have made yet."""

    def __init__(self, values: Tensor) -> None:
        self._values = values.to(HOST, non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if values.is_cuda else None

    def read(self) -> Tensor:
        """Return the copy; waits for it, but not for work queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._values


class StepOutcome:
    """Loss and gradient norm of one step; the same on every rank, except ``local_loss``.

    The device may not have computed the values yet. The first access to one of them waits until they are
    copied to the host, but not for work queued later.

    Args:
        sums: summed over the world, on the device: square of the gradient norm, loss, the loss of
            multi-token prediction if the model has it, and of a mixture each source's share of the loss.
        loss: this rank's share of the loss.
        squares: this rank's share of each gradient's squared norm.
        valid_tokens: tokens of the global batch that the loss counts.
        source_tokens: the same for each source of a mixture.
        local_weight: factor from ``loss`` to the mean loss of this rank's tokens; None on ranks that compute
            no loss.
        stop_requested: whether any rank was asked to stop.
        beside: sums of the values that were summed beside these.
    """

    def __init__(
        self,
        sums: Tensor,
        loss: Tensor,
        squares: Tensor,
        *,
        valid_tokens: int,
        source_tokens: Sequence[int],
        local_weight: float | None,
        stop_requested: bool,
        beside: Sequence[float] = (),
    ) -> None:
        self.valid_tokens, self.stop_requested, self.beside = valid_tokens, stop_requested, beside
        self.source_tokens = source_tokens
        self.squares, self._local_weight = squares, local_weight
        square_sum, *loss_sums = sums.unbind()
        # The one number that decides about the update: it is not finite if a loss is not finite.
        self.norm = (square_sum + 0 * sum(loss_sums)).sqrt()
        values = torch.stack([square_sum.sqrt(), loss.double(), *loss_sums])
        self._num_values, self._values = len(values), HostCopy(values)

    @property
    def loss(self) -> float:
        """Mean loss per valid token of the global batch, nats."""
        return self._value(2)

    @property
    def mtp_loss(self) -> float | None:
        """Loss of multi-token prediction per valid token; None if the model has none."""
        return self._value(3) if self._num_values > 3 + len(self.source_tokens) else None

    @property
    def source_losses(self) -> list[float | None]:
        """Mean loss per valid token of each source of a mixture; None for a source without one."""
        first = self._num_values - len(self.source_tokens)
        return [
            self._value(first + index) * self.valid_tokens / tokens if tokens else None
            for index, tokens in enumerate(self.source_tokens)
        ]

    @property
    def grad_norm(self) -> float:
        """Global 2-norm of the gradients before clipping."""
        return self._value(0)

    @property
    def local_loss(self) -> float | None:
        """Mean loss per valid token of this rank's rows; None on ranks that compute no loss."""
        return None if self._local_weight is None else self._value(1) * self._local_weight

    @property
    def is_finite(self) -> bool:
        """Whether losses and norm are finite; the same on every rank, because they are global sums."""
        return all(abs(value) < float("inf") for value in (self.loss, self.grad_norm, self.mtp_loss or 0.0))

    def _value(self, index: int) -> float:
        return float(self._values.read()[index])
