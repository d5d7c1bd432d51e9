"""Stop or skip when a step is not finite, save its batch, and name where it began."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from harness.config.training import DebugConfig
from harness.train.engine import Engine
from harness.train.observer import Observer, Run
from harness.train.step import Step
from harness.util.errors import NonFiniteError

# Part of the error of autograd's anomaly mode: Function 'MulBackward0' returned nan values in its
# 0th output.
_ANOMALY = "returned nan values in its"

MOST_SKIPPED = 10
"""Updates in a row that ``debug.non_finite=skip`` skips before the run stops."""


class NonFinitePolicy:
    """What ``debug.non_finite`` does with a step whose loss or gradients are not finite: stop or skip.

    Every rank has the same sums and does the same. The evidence is saved in the run folder, as is that
    of spikes (``debug.spikes``).
    """

    def __init__(self, debug: DebugConfig, folder: Path, engine: Engine) -> None:
        self._debug = debug
        self._folder = folder / "evidence"
        self._engine = engine
        self._in_a_row = 0

    def check(self, step: Step) -> str | None:
        """Return None if the step is finite; else save the evidence and describe the skipped update.

        The update was not applied (see ``Engine.update``).

        Raises:
            NonFiniteError: the policy is to stop, or too many updates in a row were skipped.
            CapacityError: rows of experts had no room. The policy is not asked: skipped updates
                would be another result.
        """
        if not step.outcome.has_room:
            self._engine.require_room(step.outcome.needed, f"step {step.number}")
        if step.outcome.is_finite:
            self._in_a_row = 0
            return None
        self._in_a_row += 1
        loss = step.outcome.loss
        norm = step.outcome.grad_norm
        text = f"step {step.number}: loss {loss}, gradient norm {norm}; {self.save_evidence(step)}"
        if self._debug.non_finite == "stop":
            raise NonFiniteError(text)
        if self._in_a_row > MOST_SKIPPED:
            raise NonFiniteError(f"{text}; {self._in_a_row} updates in a row skipped")
        return f"skipped the update of {text}"

    def save_evidence(self, step: Step) -> str:
        """Write ``step<n>-rank<r>.pt`` (this rank's rows) and ``.json`` (which gradients are not finite).

        The gradients themselves may be freed by now; this rank's share of each norm is still known.

        Returns:
            A message: where the files are, or why they could not be written. A full disk must not
            hide the reason.
        """
        rank = dist.get_rank()
        outcome = step.outcome
        squares = zip(self._engine.named_parameters(), outcome.squares.tolist(), strict=True)
        row = {
            "step": step.number,
            "rank": rank,
            "loss": str(outcome.loss),
            "grad_norm": str(outcome.grad_norm),
            "gradients": [
                {"parameter": name, "norm": str(square**0.5)}
                for (name, _), square in squares
                if not math.isfinite(square)
            ],
        }
        stem = self._folder / f"step{step.number}-rank{rank}"
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            stem.with_suffix(".json").write_text(json.dumps(row, indent=2) + "\n")
            tensors = {
                name.rpartition("_")[0]: tensor.cpu()
                for name, tensor in step.batch._asdict().items()
                if tensor is not None
            }
            torch.save(tensors, stem.with_suffix(".pt"))
        except (OSError, RuntimeError) as error:  # torch.save reports a full disk as a RuntimeError
            return f"evidence could not be saved: {error}"
        return f"evidence in {self._folder}"


@contextmanager
def unwrap_non_finite(step: int) -> Iterator[None]:
    """Raise NonFiniteError for errors that wrap one, and for errors of autograd's anomaly mode.

    torch's pipelines wrap the errors of their stages, and the anomaly mode raises a plain
    RuntimeError.
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


class NanWatch(Observer):
    """debug=nan: name the first module whose output, or the gradient of its output, is not finite.

    It has hooks on every module of a rank's model parts; every check waits for the device.
    Gradients are checked by hooks on outputs, because backward hooks on modules break torch's split
    backward passes (zero-bubble schedules).
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._last_finite = "the loss"
        self._hooks = [
            module.register_forward_hook(self._hook(name))
            for part in run.engine.parts
            for name, module in part.named_modules()
            if name
        ]

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
                    parameters = [
                        own for own, value in module.named_parameters() if _not_finite(value)
                    ]
                    names = ", ".join(f"{name}.{own}" for own in parameters)
                    source = f"; neither are the parameters {names}" if parameters else ""
                    self._raise(f"the output of {name} is not finite ({wrong}){source}")
                if tensor.requires_grad:
                    tensor.register_hook(check_gradient)
            self._last_finite = "the loss"

        return check_output

    def _raise(self, what: str) -> None:
        raise NonFiniteError(f"step {self.run.progress.running}: {what}")


def _not_finite(tensor: Tensor) -> str:
    """Describe how many elements are not finite; empty if all are finite."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    wrong = int((~torch.isfinite(local.detach())).sum())
    return f"{wrong} of {local.numel()} numbers on this rank" if wrong else ""
