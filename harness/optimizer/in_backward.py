"""Updates in the middle of backward: a gradient is used as soon as it is there, and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from harness.parallelism.clip import local_squares, settle_gradients, without_waiting
from harness.parallelism.mesh import Mesh


class UpdateInBackward:
    """Steps an optimizer parameter by parameter, from torch's hooks on accumulated gradients.

    FSDP2 calls the hooks when the gradient of its shard has been reduced. The optimizer stays one, with one
    state and one learning rate, so that checkpoints and schedules see no difference.

    Attributes:
        updated: places of the parameters that have been updated since the start.

    Args:
        optimizer: what updates.
        parameters: all it updates, in the order in which squares are given.
        mesh: the layout, for the norm.
        device: where the squares are wanted.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], mesh: Mesh, device: torch.device
    ) -> None:
        self.optimizer, self.mesh, self.device = optimizer, mesh, device
        # Where the parameters are: those of offloaded ones travel all at once.
        self.squares = torch.zeros(len(parameters), dtype=torch.float64, device=parameters[0].device)
        self.updated: set[int] = set()
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._hook(index, places[id(parameter)]))

    def take_squares(self) -> Tensor:
        """This rank's share of every gradient's squared norm since the last call."""
        taken, self.squares = self.squares, torch.zeros_like(self.squares)
        return without_waiting(taken, self.device)

    def _hook(self, index: int, place: int) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            settle_gradients([parameter])
            self.squares[place] = local_squares([parameter], self.mesh, self.squares.device)[0]
            self._step([parameter], index)
            parameter.grad = None
            self.updated.add(place)

        return update

    def _step(self, parameters: Iterable[Tensor], index: int) -> None:
        """A step of the optimizer that sees these parameters only."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        self.optimizer.param_groups = [{**groups[index], "params": list(parameters)}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
