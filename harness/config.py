"""Fields of the typed job: each declares whether it changes the numbers that a run computes.

Three roles (law 2 of docs/architecture.md):

* ``numerics``: another value is another experiment (learning rate, model, data order).
* ``execution``: another value computes the same in another way (degrees of parallelism, prefetch).
* ``label``: names, paths and output; never part of a job's identity.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from harness.errors import ConfigError

NUMERICS, EXECUTION, LABEL = "numerics", "execution", "label"


def _field(role: str, default: Any, factory: Callable[[], Any] | None) -> Any:
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={"role": role})
    return dataclasses.field(default=default, metadata={"role": role})


def numerics(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field that changes the results."""
    return _field(NUMERICS, default, factory)


def execution(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field that changes only how the results are computed."""
    return _field(EXECUTION, default, factory)


def label(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field that changes neither: names, paths, verbosity."""
    return _field(LABEL, default, factory)


def part(kind: type) -> Any:
    """A part of a job: a dataclass whose fields have roles."""
    return dataclasses.field(default_factory=kind)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield ``(dotted name, role, value)`` of every leaf field of a config dataclass, in order.

    Raises:
        TypeError: a leaf field has no role.
    """
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        name = prefix + field.name
        if dataclasses.is_dataclass(value):
            yield from leaves(value, name + ".")
        elif "role" not in field.metadata:
            raise TypeError(f"config field {name} has no role (numerics, execution or label)")
        else:
            yield name, field.metadata["role"], value


def from_dict(cls: type, plain: dict[str, Any], prefix: str = "") -> Any:
    """Build a (nested) config dataclass from plain containers.

    Args:
        cls: the dataclass.
        plain: its fields; missing ones get their defaults.
        prefix: prefix of the fields' dotted names, for errors.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a missing field without a default.
    """
    hints = type_hints(cls)
    unknown = set(plain) - {field.name for field in dataclasses.fields(cls)}
    if unknown:
        name = sorted(unknown)[0]
        raise ConfigError(f"{prefix}{name}", plain[name], f"{cls.__name__} has no such field")
    required = [field.name for field in dataclasses.fields(cls) if _has_no_default(field)]
    if missing := [name for name in required if name not in plain]:
        raise ConfigError(f"{prefix}{missing[0]}", None, "must be given")
    values = {}
    for name, value in plain.items():
        hint = hints[name]
        if not _fits(value, hint):
            raise ConfigError(f"{prefix}{name}", value, f"must be of type {getattr(hint, '__name__', hint)}")
        inner = next((each for each in (hint, *get_args(hint)) if dataclasses.is_dataclass(each)), None)
        if inner is not None and isinstance(value, dict):
            value = from_dict(cast("type", inner), value, f"{prefix}{name}.")
        values[name] = value
    return cls(**values)


def _has_no_default(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


@functools.cache
def type_hints(cls: type) -> dict[str, Any]:
    """Types of a dataclass's fields, cached because they are slow to compute."""
    return get_type_hints(cls)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value has the annotated type of its field."""
    kind, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if kind in (Union, UnionType):
        return any(_fits(value, each) for each in arguments)
    if kind is list:
        return isinstance(value, list | tuple) and all(_fits(each, arguments[0]) for each in value)
    if kind is dict:
        return isinstance(value, dict) and all(_fits(each, arguments[1]) for each in value.values())
    if dataclasses.is_dataclass(hint):
        return isinstance(value, dict | cast("type", hint))
    if hint is float:
        # JSON has no number for infinity; harness/metrics/encoding.py writes it as a string.
        hint = int | float | str if value in ("nan", "inf", "-inf") else int | float
    return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))
