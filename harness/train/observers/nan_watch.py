"""debug=nan: name the first module whose output, or the gradient of its output, is not finite.

Every check waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.train.observer import Observer, Run
from harness.util.errors import NonFiniteError


class NanWatch(Observer):
    """Hooks on every module of a rank's model parts.

    Gradients are checked by hooks on outputs, because backward hooks on modules break torch's split backward
    passes (zero-bubble schedules).
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._step = 0
        self._last_finite = "the loss"
        self._hooks = [
            module.register_forward_hook(self._hook(name))
            for part in run.engine.parts
            for name, module in part.named_modules()
            if name
        ]

    def begin_step(self, step: int) -> Sequence[float]:
        self._step = step
        return ()

    def close(self, error: BaseException | None) -> None:
        for hook in self._hooks:
            hook.remove()

    def _hook(self, name: str) -> Any:
        def check_gradient(gradient: Tensor) -> None:
            if wrong := _not_finite(gradient):
                self._raise(
                    f"the gradient of the output of {name} is not finite ({wrong}); "
                    f"it was computed from the gradient of {self._last_finite}, which is finite"
                )
            self._last_finite = f"the output of {name}"

        def check_output(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if not isinstance(tensor, Tensor):
                    continue
                if wrong := _not_finite(tensor):
                    parameters = [own for own, value in module.named_parameters() if _not_finite(value)]
                    names = ", ".join(f"{name}.{own}" for own in parameters)
                    source = f"; neither are the parameters {names}" if parameters else ""
                    self._raise(f"the output of {name} is not finite ({wrong}){source}")
                if tensor.requires_grad:
                    tensor.register_hook(check_gradient)
            self._last_finite = "the loss"

        return check_output

    def _raise(self, what: str) -> None:
        raise NonFiniteError(f"step {self._step}: {what}")


def _not_finite(tensor: Tensor) -> str:
    """Describe how many elements are not finite; empty if all are finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wrong = int((~torch.isfinite(local.detach())).sum())
    return f"{wrong} of {local.numel()} numbers on this rank" if wrong else ""
