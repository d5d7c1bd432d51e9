"""What our own optimizers share, and several kinds of optimizers as one."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

SETTINGS = "settings"
"""Key of a parameter group: its settings as the job made them, without ``params``."""


def keep_settings(optimizer: torch.optim.Optimizer) -> None:
    """Note the settings of an optimizer's groups: what differs from them later is state (checkpoints)."""
    for group in optimizer.param_groups:
        group[SETTINGS] = {key: value for key, value in group.items() if key != "params"}


class OwnOptimizer(torch.optim.Optimizer):
    """Base of our optimizers: they compute in float32, and a device can drop their update.

    Attributes:
        found_inf: device scalar; if it is 1, a step changes nothing, without the host knowing. The
            name is that of torch's fused optimizers. None: every step is applied.

    Args:
        groups: parameter groups, with all settings but those of ``defaults``.
        lr: learning rate of groups without one.
        state_dtype: dtype of the state tensors of a parameter's shape.
        defaults: settings of groups without them.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], lr: float, state_dtype: torch.dtype, **defaults: Any
    ) -> None:
        self.state_dtype = state_dtype
        self.found_inf: Tensor | None = None
        super().__init__(groups, {"lr": lr, **defaults})

    @property
    def applied(self) -> Tensor | None:
        """Scalar in float64: 1 if the step is applied, 0 if not. If it is for certain, None on CPUs.

        On GPUs it is then one of the host, because numbers would be constants of the compiled
        update.
        """
        if self.found_inf is not None:
            return 1 - self.found_inf.double()
        on_gpu = self.param_groups[0]["params"][0].is_cuda
        return torch.ones((), dtype=torch.float64) if on_gpu else None


class CombinedOptimizer(torch.optim.Optimizer):
    """Several optimizers as one, with one state and the parameter groups of all.

    Each updates the groups of its ``kind``. Checkpoints and schedules see one optimizer.

    Args:
        optimizers: an optimizer for each kind; every parameter group has the key ``kind``.
    """

    def __init__(self, optimizers: dict[str, torch.optim.Optimizer]) -> None:
        groups: list[dict[str, Any]] = []
        for optimizer in optimizers.values():
            groups += optimizer.param_groups
        super().__init__(groups, {})
        self.optimizers = optimizers
        for optimizer in optimizers.values():
            optimizer.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every optimizer that has groups."""
        for kind, optimizer in self.optimizers.items():
            optimizer.param_groups = [group for group in self.param_groups if group["kind"] == kind]
            if optimizer.param_groups:
                optimizer.step()


def parts_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the optimizers that an optimizer consists of."""
    return (
        list(optimizer.optimizers.values())
        if isinstance(optimizer, CombinedOptimizer)
        else [optimizer]
    )


def drops_on_device(optimizer: torch.optim.Optimizer, device: torch.device) -> bool:
    """Whether a device can drop the update of every parameter (``found_inf``), without the host."""
    return all(
        device.type != "cpu" if isinstance(part, OwnOptimizer) else bool(part.defaults.get("fused"))
        for part in parts_of(optimizer)
    )


def local(tensor: Tensor) -> Tensor:
    """Return the local shard of a DTensor, and a plain tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
