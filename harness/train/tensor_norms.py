"""Norms of every tensor of the model, exact on every layout."""

import torch
import torch.distributed as dist
from torch import Tensor

from harness.model.spec import parameter_shapes
from harness.optimizer.base import local
from harness.parallelism.clip import holders_of, share_of_squares
from harness.precision.swap import plain
from harness.train.engine import Engine
from harness.util.annotation import SUMS, annotated

NORMS = ("gradient", "weight", "update")
"""What has a norm: the gradient before clipping, the weight before the update, and the update's change of
it."""


class TensorNorms:
    """2-norms of the tensors of all ranks, pipeline stages and experts, in the model's order.

    Each rank adds the squares of its shards, divided by the number of ranks that hold the same ones, so
    one sum over the world is exact on any layout. All ranks call the methods together.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.names = list(parameter_shapes(engine.job.model))
        place_of = {name: place for place, name in enumerate(self.names)}
        own = [place_of[name] for name, _ in engine.named_parameters()]
        self._places = torch.tensor(own, device=engine.device)
        self._holders = holders_of(engine.parameters, engine.mesh)
        self._before: list[Tensor] = []

    def before_update(self) -> None:
        """Copy this rank's weights; after the backward pass, when activations take no memory."""
        self._before = [shard.clone() for shard in self._shards()]

    def after_update(self, gradient_squares: Tensor) -> Tensor:
        """Return the norms without a wait of the host: float64 [one of NORMS, tensor] on the device.

        Args:
            gradient_squares: ``StepOutcome.squares`` of the step.
        """
        device = self._engine.device
        before = self._before
        self._before = []
        weight_squares = share_of_squares(before, self._holders, device)
        torch._foreach_sub_(before, self._shards())
        update_squares = share_of_squares(before, self._holders, device)
        squares = torch.zeros(len(NORMS), len(self.names), dtype=torch.float64, device=device)
        own = torch.stack([gradient_squares, weight_squares, update_squares])
        squares.index_copy_(1, self._places, own)
        with annotated(SUMS):
            if self._engine.job.world_size > 1:
                dist.all_reduce(squares)
        return squares.sqrt()

    def _shards(self) -> list[Tensor]:
        return [local(plain(parameter.detach())) for parameter in self._engine.parameters]
