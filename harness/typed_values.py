"""Check values of a composed job against the types of its fields, where the composition does not."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_origin

from harness.compose_errors import describe_type
from harness.config import type_hints
from harness.errors import ConfigError

LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 3.4e38
"""Maximum of float32, in which a job's numbers are used."""


def check_values(plain: dict[str, Any], schema: type, prefix: str = "") -> None:
    """Check the elements of lists and mappings, and that every number fits into a tensor.

    Args:
        plain: the composed job as containers; its keys are fields.
        schema: its dataclass.
        prefix: dotted name of ``plain``'s parent field, with a trailing dot.

    Raises:
        ConfigError: naming the field.
    """
    hints = type_hints(schema)
    for name, value in plain.items():
        hint, key = hints[name], f"{prefix}{name}"
        inner = next((t for t in (hint, *get_args(hint)) if dataclasses.is_dataclass(t)), None)
        if isinstance(inner, type) and isinstance(value, dict):
            check_values(value, inner, f"{key}.")
            continue
        if not any(_fits(value, kind) for kind in get_args(hint) or (hint,)) and not _fits(value, hint):
            raise ConfigError(key, as_typed(value), f"must be {describe_type(hint, key)}")
        for number in _numbers(value):
            _check_number(key, value, number)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value and its elements have the type."""
    origin, of = get_origin(hint), get_args(hint)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, of[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, of[1]) for each in value.values())
    if hint is Any or value is None:
        return hint in (Any, type(None))
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return (
        isinstance(hint, type) and isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
    )


def _numbers(value: Any) -> list[int | float]:
    """All numbers in a value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for each in value for number in _numbers(each)]
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def _check_number(key: str, value: Any, number: int | float) -> None:
    if isinstance(number, int) and abs(number) > LARGEST_INTEGER:
        raise ConfigError(key, as_typed(value), f"must be an integer of 64 bits, at most {LARGEST_INTEGER}")
    # NaN compares false.
    if isinstance(number, float) and not abs(number) <= LARGEST_NUMBER:
        raise ConfigError(
            key, as_typed(value), f"must be a finite number of float32, at most {LARGEST_NUMBER:g}"
        )


def as_typed(value: Any) -> Any:
    """Format a list or mapping as typed on the command line; return other values unchanged."""
    if isinstance(value, list):
        return f"[{','.join(str(as_typed(each)) for each in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{key}:{as_typed(each)}' for key, each in value.items())}}}"
    return value
