"""Optimizer updates during backward: each gradient is applied as soon as it is computed, then freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from harness.parallelism.clip import copy_async, local_squares, reduce_partial_gradients
from harness.parallelism.mesh import Mesh


class UpdateInBackward:
    """Steps an optimizer parameter by parameter, from torch's post-accumulate-grad hooks.

    FSDP2 calls the hooks when the gradient of a shard has been reduced. There is a single optimizer, with one
    state and one learning rate, so checkpoints and schedules see no difference.

    Attributes:
        updated: indices of the parameters that have been updated since the start.

    Args:
        optimizer: the optimizer.
        parameters: all its parameters, in the order of ``take_squares``.
        mesh: the layout, for the norm.
        device: device of the result of ``take_squares``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, parameters: list[Tensor], mesh: Mesh, device: torch.device
    ) -> None:
        self.optimizer, self.mesh, self.device = optimizer, mesh, device
        # On the parameters' device: with offloading, all squares are copied at once.
        self.squares = torch.zeros(len(parameters), dtype=torch.float64, device=parameters[0].device)
        self.updated: set[int] = set()
        indices = {id(parameter): index for index, parameter in enumerate(parameters)}
        for group_index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._hook(group_index, indices[id(parameter)]))

    def take_squares(self) -> Tensor:
        """Return this rank's contribution to every gradient's squared norm since the last call."""
        taken, self.squares = self.squares, torch.zeros_like(self.squares)
        return copy_async(taken, self.device)

    def _hook(self, group_index: int, index: int) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            reduce_partial_gradients([parameter])
            self.squares[index] = local_squares([parameter], self.mesh, self.squares.device)[0]
            self._step([parameter], group_index)
            parameter.grad = None
            self.updated.add(index)

        return update

    def _step(self, parameters: Iterable[Tensor], group_index: int) -> None:
        """Step the optimizer for these parameters only."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        self.optimizer.param_groups = [{**groups[group_index], "params": list(parameters)}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
