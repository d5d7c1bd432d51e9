"""Fields of the typed job: each says whether it changes the numbers a run computes.

Three roles (law 2 of docs/architecture.md):

* ``numerics``: another value is another experiment (learning rate, model, data order).
* ``execution``: another value computes the same thing another way (degrees of parallelism, prefetch).
* ``label``: names, paths and what is written down; never part of a job's identity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

NUMERICS, EXECUTION, LABEL = "numerics", "execution", "label"


def _field(role: str, default: Any, factory: Callable[[], Any] | None) -> Any:
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata={"role": role})
    return dataclasses.field(default=default, metadata={"role": role})


def numerics(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field that changes what is computed."""
    return _field(NUMERICS, default, factory)


def execution(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field that changes only how it is computed."""
    return _field(EXECUTION, default, factory)


def label(default: Any = dataclasses.MISSING, *, factory: Callable[[], Any] | None = None) -> Any:
    """A field that changes neither: names, paths, verbosity."""
    return _field(LABEL, default, factory)


def part(kind: type) -> Any:
    """A part of a job, whose own fields say what each of them changes."""
    return dataclasses.field(default_factory=kind)


def leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yields ``(dotted name, role, value)`` of every leaf field of a config dataclass, in order.

    Raises:
        TypeError: a leaf field has no role; every field of a job must say which it is.
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
