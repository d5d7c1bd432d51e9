"""The state of the optimizer as named tensors, which are resharded as the parameters are.

    optimizer.state.<parameter>.<key>   tensors and numbers of that parameter (exp_avg, exp_avg_sq, step)
    optimizer.group.<parameter>.<key>   numbers that the optimizer keeps in the group of that parameter

torch's optimizers count steps for each parameter. Others count them in their parameter groups, or
estimate a rate there. Groups differ between pipeline stages, so their numbers are saved for each
parameter.

Settings that come from the job (learning rates, betas, weight decay) are not state. What an
optimizer keeps and nothing here names would be lost in a resume, so ``require_owned`` refuses it.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from harness.checkpoint.state import OPTIMIZER, Trained
from harness.config.optimizer import KINDS
from harness.optimizer.base import SETTINGS
from harness.optimizer.build import EMA
from harness.util.errors import UserError

STATE = f"{OPTIMIZER}state."
GROUP = f"{OPTIMIZER}group."
FROM_JOB = ("params", "kind", "lr", "initial_lr", SETTINGS)
"""Keys of a parameter group that are never state: the schedule sets the rates."""


def optimizer_state(engine: Trained) -> dict[str, Tensor]:
    """The optimizer's tensors and numbers for this rank's parameters; empty before its first step."""
    if not engine.optimizer.state:
        return {}
    group_of = _groups(engine)
    state = {}
    for name, parameter in engine.named_parameters():
        for key, value in engine.optimizer.state.get(parameter, {}).items():
            state[f"{STATE}{name}.{key}"] = _as_tensor(value)
        for key, value in _group_numbers(group_of[parameter]).items():
            state[f"{GROUP}{name}.{key}"] = _as_tensor(value)
    return state


def tensors_to_load(engine: Trained, dtypes: Mapping[str, torch.dtype]) -> dict[str, Tensor]:
    """The optimizer's tensors, and new ones for its numbers, which ``set_numbers`` takes.

    Args:
        engine: its optimizer has been allocated.
        dtypes: dtypes in the checkpoint, by name. A group of a new optimizer may lack numbers that
            it has after some steps, so the checkpoint says which there are.

    Raises:
        UserError: the checkpoint lacks a number of the groups, so the optimizer would not go on as
            it was.
    """
    group_of = _groups(engine)
    wanted = {}
    missing = set()
    for name, parameter in engine.named_parameters():
        for key, value in engine.optimizer.state[parameter].items():
            full_name = f"{STATE}{name}.{key}"
            wanted[full_name] = _target(value, dtypes.get(full_name))
        group = group_of[parameter]
        prefix = f"{GROUP}{name}."
        saved = _below(prefix, dtypes)
        for key, dtype in saved.items():
            wanted[prefix + key] = _target(group.get(key), dtype)
        missing |= _group_numbers(group).keys() - saved.keys()
    if missing:
        names = ", ".join(sorted(missing))
        raise UserError(
            f"the optimizer keeps {names} in its parameter groups, and the checkpoint does not have it; "
            "would work: checkpoint.exclude_from_loading=[optimizer]"
        )
    return wanted


def set_numbers(engine: Trained, loaded: Mapping[str, Tensor]) -> None:
    """Give the optimizer the numbers that were loaded; its tensors were loaded in place."""
    group_of = _groups(engine)
    for name, parameter in engine.named_parameters():
        _set_numbers(engine.optimizer.state[parameter], _below(f"{STATE}{name}.", loaded))
        _set_numbers(group_of[parameter], _below(f"{GROUP}{name}.", loaded))


def _set_numbers(owner: dict[str, Any], loaded: Mapping[str, Tensor]) -> None:
    for key, value in loaded.items():
        if not isinstance(owner.get(key), Tensor):
            owner[key] = value.item()


def _target(value: Any, dtype: torch.dtype | None) -> Tensor:
    return value if isinstance(value, Tensor) else torch.zeros((), dtype=dtype)


def _groups(engine: Trained) -> dict[Tensor, dict[str, Any]]:
    """The parameter group of each parameter."""
    group_of = {}
    for group in engine.optimizer.param_groups:
        for parameter in group["params"]:
            group_of[parameter] = group
    return group_of


def allocate_optimizer_state(engine: Trained) -> None:
    """Make the optimizer create its state tensors, if it has none, so that they can be loaded.

    Optimizers create them in ``step``; a step with learning rate 0 and zero gradients changes no
    weight. What it counts is replaced by the numbers that are loaded.
    """
    optimizer = engine.optimizer
    if optimizer.state:
        return
    rates = [group["lr"] for group in optimizer.param_groups]
    for parameter in engine.parameters:
        parameter.grad = torch.zeros_like(parameter)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    optimizer.zero_grad()
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


def clear_optimizer_state(engine: Trained) -> None:
    """Undo what a damaged checkpoint, tried before, has left in the optimizer."""
    engine.optimizer.state.clear()
    for group in engine.optimizer.param_groups:
        for key in _group_numbers(group):
            if key in group[SETTINGS]:
                group[key] = group[SETTINGS][key]
            else:
                del group[key]


def require_owned(engine: Trained) -> None:
    """Refuse what the optimizer keeps and a checkpoint would lose, or the plan does not count.

    Raises:
        UserError: a tensor that ``Kind.state`` does not name, or something in a group that is not a
            number.
    """
    for group in engine.optimizer.param_groups:
        kind = group["kind"]
        for key, value in _group_numbers(group).items():
            if not _is_number(value):
                raise UserError(
                    f"optimizer.kind={kind}: keeps {key}={type(value).__name__} in its parameter groups, and "
                    "only numbers there are saved; would work: a tensor in the state of each parameter"
                )
        named = (*KINDS[kind].state, EMA)
        for parameter in group["params"]:
            for key, value in engine.optimizer.state.get(parameter, {}).items():
                # 8-bit state has a scale beside each tensor.
                if key.removesuffix("_scale") not in named and not _is_number(value):
                    names = ", ".join(KINDS[kind].state)
                    raise UserError(
                        f"optimizer.kind={kind}: keeps {key!r} for each parameter, and its Kind.state names "
                        f"only {names}; would work: {key!r} in Kind.state"
                    )


def _group_numbers(group: dict[str, Any]) -> dict[str, Any]:
    """What an optimizer itself keeps in a group: all that is not as the job has set it."""
    settings = group[SETTINGS]
    numbers = {}
    for key, value in group.items():
        if key in FROM_JOB:
            continue
        # A tensor may have been changed in place.
        if key not in settings or isinstance(value, Tensor) or value != settings[key]:
            numbers[key] = value
    return numbers


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float)


def _as_tensor(value: Any) -> Any:
    """Return a Python number as a tensor of its own type; float64 and int64 have all its digits."""
    if isinstance(value, float):
        return torch.tensor(value, dtype=torch.float64)
    return torch.tensor(value) if isinstance(value, int) else value


def _below(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Values whose name is the prefix and a key."""
    return {
        name.removeprefix(prefix): value
        for name, value in values.items()
        if name.startswith(prefix)
    }
