"""debug=nan: name the first module whose output, or the gradient of its output, is not finite.

Every check waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.util.errors import NonFiniteError

# Part of the error of autograd's anomaly mode: Function 'MulBackward0' returned nan values in its 0th output.
_ANOMALY = "returned nan values in its"


class FiniteWatch:
    """Hooks on every module of a rank's model parts.

    Gradients are checked by hooks on outputs, because backward hooks on modules break torch's split backward
    passes (zero-bubble schedules).

    Attributes:
        step: step to name in errors; set it before each step.
    """

    step = 0

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._last_finite = "the loss"
        for part in parts:
            for name, module in part.named_modules():
                if name:
                    module.register_forward_hook(self._hook(name))

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
        raise NonFiniteError(f"step {self.step}: {what}")


def _not_finite(tensor: Tensor) -> str:
    """Describe how many elements are not finite; empty if all are finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wrong = int((~torch.isfinite(local.detach())).sum())
    return f"{wrong} of {local.numel()} numbers on this rank" if wrong else ""


@contextmanager
def unwrap_non_finite(step: int) -> Iterator[None]:
    """Raise NonFiniteError for errors that wrap one, and for errors of autograd's anomaly mode.

    torch's pipelines wrap the errors of their stages, and the anomaly mode raises a plain RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, NonFiniteError):
                raise cause from None
            if _ANOMALY in str(cause):
                where = "this rank's output shows the line of the forward pass"
                raise NonFiniteError(f"step {step}: {cause}; {where}") from error
            cause = cause.__cause__
        raise
