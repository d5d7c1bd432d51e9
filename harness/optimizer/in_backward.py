"""Updates in the middle of backward: a gradient is used as soon as it is there, and freed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from harness.parallelism.clip import local_square_sum, settle_gradients
from harness.parallelism.mesh import Mesh


class UpdateInBackward:
    """Steps an optimizer parameter by parameter, from torch's hooks on accumulated gradients.

    FSDP2 calls the hooks when the gradient of its shard has been reduced. The optimizer stays one, with one
    state and one learning rate, so that checkpoints and schedules see no difference.

    Args:
        optimizer: what updates.
        mesh: the layout, for the norm.
        device: where the norm is added up.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, mesh: Mesh, device: torch.device) -> None:
        self.optimizer, self.mesh, self.device = optimizer, mesh, device
        self.square_sum = torch.zeros((), dtype=torch.float64, device=device)
        for index, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                parameter.register_post_accumulate_grad_hook(self._hook(index))

    def take_square_sum(self) -> Tensor:
        """This rank's share of the squared norm of the gradients since the last call."""
        taken, self.square_sum = self.square_sum, torch.zeros_like(self.square_sum)
        return taken

    def _hook(self, index: int) -> Callable[[Tensor], None]:
        def update(parameter: Tensor) -> None:
            settle_gradients([parameter])
            self.square_sum += local_square_sum([parameter], self.mesh, self.device)
            self._step([parameter], index)
            parameter.grad = None

        return update

    def _step(self, parameters: Iterable[Tensor], index: int) -> None:
        """A step of the optimizer that sees these parameters only."""
        groups: list[dict[str, Any]] = self.optimizer.param_groups
        self.optimizer.param_groups = [{**groups[index], "params": list(parameters)}]
        try:
            self.optimizer.step()
        finally:
            self.optimizer.param_groups = groups
