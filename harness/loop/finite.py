"""debug=nan: which module was the first to put out a number that is not finite, or to send one back.

Every output and every gradient is looked at where it is made, which waits for the device each time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.errors import NonFiniteError

# Of autograd's anomaly mode: Function 'MulBackward0' returned nan values in its 0th output.
_ANOMALY = "returned nan values in its"


class FiniteWatch:
    """Hooks on every module of a rank's model parts.

    Gradients are looked at by hooks on outputs and not on modules, which torch's split backward passes
    (zero-bubble schedules) do not survive.

    Attributes:
        step: the step that is named; to be set before each.
    """

    step = 0

    def __init__(self, parts: Iterable[nn.Module]) -> None:
        self._sound = "the loss"
        for part in parts:
            for name, module in part.named_modules():
                if name:
                    module.register_forward_hook(self._hook(name))

    def _hook(self, name: str) -> Any:
        def look_at_gradient(gradient: Tensor) -> None:
            if wrong := _not_finite(gradient):
                self._raise(
                    f"the gradient of the output of {name} is not finite ({wrong}); "
                    f"that of {self._sound}, from which it comes, was"
                )
            self._sound = f"the output of {name}"

        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            for tensor in output if isinstance(output, tuple) else (output,):
                if not isinstance(tensor, Tensor):
                    continue
                if wrong := _not_finite(tensor):
                    spoilt = [own for own, value in module.named_parameters() if _not_finite(value)]
                    source = f"; so is {', '.join(f'{name}.{own}' for own in spoilt)}" if spoilt else ""
                    self._raise(f"the output of {name} is not finite ({wrong}){source}")
                if tensor.requires_grad:
                    tensor.register_hook(look_at_gradient)
            self._sound = "the loss"

        return look

    def _raise(self, what: str) -> None:
        raise NonFiniteError(f"step {self.step}: {what}")


def _not_finite(tensor: Tensor) -> str:
    """How much of a tensor is not finite; empty where all is."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wrong = int((~torch.isfinite(local.detach())).sum())
    return f"{wrong} of {local.numel()} numbers on this rank" if wrong else ""


@contextmanager
def named_as_such(step: int) -> Iterator[None]:
    """Lets numbers that are not finite come out as what they are.

    torch's pipelines wrap what is raised inside of them, and autograd's anomaly mode has no error of its own.
    """
    try:
        yield
    except RuntimeError as error:
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, NonFiniteError):
                raise cause from None
            if _ANOMALY in str(cause):
                where = "the line of forward stands in this rank's output"
                raise NonFiniteError(f"step {step}: {cause}; {where}") from error
            cause = cause.__cause__
        raise
