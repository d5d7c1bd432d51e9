"""Tables of the names that a field may have. Other packages add names by entry points.

A package adds ``sgd`` to ``optimizer.kind`` in its pyproject.toml (docs/howto/extend.md)::

    [project.entry-points."harness.optimizer"]
    sgd = "my_package.sgd:SGD"

Some fields also take a name in a file, ``my_conf/sgd.py:SGD`` (``harness/config/component.py``).
Values are imported when they are used, so a table may name modules that import torch and be read
without it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from harness.config.component import WORKS, Component
from harness.config.fields import check_rules, default_of, from_dict
from harness.util.errors import ConfigError, MissingPackageError, UserError

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

Value = TypeVar("Value")


class Registry(Generic[Value]):
    """The values of one kind by name: built-in ones, and those of installed packages.

    It is a collection of names, so that it can be the ``choices`` of a field. Entry points are read
    when a name is not built in, or when names are listed.

    Args:
        kind: entry points of the group ``harness.KIND`` add names.
        builtins: values by name, or where they are: ``module:attribute``.
        field: the field that chooses a name, for errors.
        expects: where the class is (``module:attribute``) that a plugin's value is an instance or
            subclass of; None: any value.
        has_files: whether a name may be that of a component in a file.
    """

    def __init__(
        self,
        kind: str,
        builtins: Mapping[str, Value | str],
        *,
        field: str,
        expects: str | None = None,
        has_files: bool = False,
    ) -> None:
        self.kind = kind
        self.field = field
        self._builtins = dict(builtins)
        self._expects = expects
        self._has_files = has_files
        self._loaded: dict[str, Value] = {}

    def __contains__(self, name: object) -> bool:
        if not isinstance(name, str):
            return False
        return name in self._builtins or self.file(name) is not None or name in self.plugins

    def __iter__(self) -> Iterator[str]:
        yield from self._builtins
        yield from self.plugins

    def __getitem__(self, name: str) -> Value:
        """Return the value of a name.

        Raises:
            MissingPackageError: no installed package adds the name, or its file is not as it was.
            UserError: two packages have the name, or the package that has it cannot be imported.
        """
        name = self.recorded(name)  # or a file that has changed would stay as it was
        if name not in self._loaded:
            self._loaded[name] = self._load(name)
        return self._loaded[name]

    def values(self) -> Iterator[Value]:
        return (self[name] for name in self)

    def resolve_options(self, name: str, options: dict[str, Any]) -> dict[str, Any]:
        """Check the options of one name, in the field ``options`` beside the one that chooses it."""
        value: Any = self[name]
        field = f"{self.field.rpartition('.')[0]}.options"
        return resolve_options(options, value.options, field, f"{self.field}={name}")

    def recorded(self, name: str) -> str:
        """Return a name as a job records it: that of a component in a file with the file's digest.

        Raises:
            MissingPackageError: the file cannot be used.
        """
        component = self.file(name)
        return name if component is None else component.recorded()

    @property
    def more(self) -> list[str]:
        """What would work besides the names, for errors."""
        works = f"or install the package that adds it (entry points of group harness.{self.kind})"
        return [works, f"or {WORKS}"] if self._has_files else [works]

    @functools.cached_property
    def plugins(self) -> dict[str, EntryPoint]:
        """Names that other packages add, sorted."""
        # Takes 20 ms to import, which jobs of built-in names do not wait for.
        from importlib.metadata import entry_points

        found: dict[str, EntryPoint] = {}
        entries = entry_points(group=f"harness.{self.kind}")
        for entry in sorted(entries, key=lambda entry: (entry.name, _package(entry))):
            if entry.name in self._builtins or entry.name in found:
                other = _package(found[entry.name]) if entry.name in found else "harness"
                raise UserError(
                    f"{self.field}={entry.name}: the packages {other} and {_package(entry)} both have this "
                    f"name in group harness.{self.kind}; would work: uninstall {_package(entry, '')}"
                )
            found[entry.name] = entry
        return found

    def _load(self, name: str) -> Value:
        if name in self._builtins:
            value = self._builtins[name]
            return load_attribute(value) if isinstance(value, str) else value
        component = self.file(name)
        if component is not None:
            loaded = component.load()
            if problem := self._misfit(loaded):
                raise component.refusal(problem)
            return cast("Value", loaded)
        if name not in self.plugins:
            rule = (
                f"no installed package adds this name (entry points of group harness.{self.kind})"
            )
            raise MissingPackageError(
                self.field, name, rule, [*self, "or install the package that adds it"]
            )
        entry = self.plugins[name]
        try:
            loaded = entry.load()
        except Exception as error:  # a package may raise anything when it is imported
            raise self._broken(
                entry, f"cannot be imported: {type(error).__name__}: {error}"
            ) from error
        if problem := self._misfit(loaded):
            raise self._broken(entry, f"has {entry.value}, which {problem}")
        return cast("Value", loaded)

    def file(self, name: object) -> Component | None:
        """Return the component that a name stands for; None if it is no name in a file."""
        return Component.of(self.field, name) if self._has_files else None

    def _misfit(self, loaded: Any) -> str:
        """Why a value is not of the expected class; empty if it is."""
        if self._expects is None:
            return ""
        kind = load_attribute(self._expects)
        fits = issubclass(loaded, kind) if isinstance(loaded, type) else isinstance(loaded, kind)
        return "" if fits else f"is no {kind.__module__}.{kind.__qualname__}"

    def _broken(self, entry: EntryPoint, problem: str) -> UserError:
        return UserError(f"{self.field}={entry.name}: the package {_package(entry)} {problem}")


@dataclasses.dataclass(frozen=True)
class Choices:
    """Names that are computed when they are needed, so that those of registries can be part of them.

    Args:
        names: returns them, the most used ones first: a name that is found ends the search.
    """

    names: Callable[[], Iterable[str]]

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _package(entry: EntryPoint, separator: str = " ") -> str:
    """Name of the distribution of an entry point; with a separator, also its version."""
    if entry.dist is None:
        return entry.value
    return f"{entry.dist.name}{separator}{entry.dist.version}" if separator else entry.dist.name


def load_attribute(location: str) -> Any:
    module, _, name = location.partition(":")
    return functools.reduce(getattr, name.split("."), importlib.import_module(module))


def resolve_options(
    options: dict[str, Any], schema: type | None, field: str, owner: str
) -> dict[str, Any]:
    """Check the options that a field has for one choice of another field, and add the defaults.

    Args:
        options: plain values by name.
        schema: dataclass of the options, with rules beside its fields; None: the choice has no
            options. A default is left out if its field says ``id_omits_default``.
        field: the field that holds the options, such as ``optimizer.options``.
        owner: the choice that they belong to, such as ``optimizer.kind=sgd``, for errors.
    """
    if schema is None:
        if options:
            name = min(options)
            raise ConfigError(
                f"{field}.{name}", options[name], f"{owner} has no options", "leave it out"
            )
        return {}
    typed = from_dict(schema, options, f"{field}.")
    check_rules(typed, f"{field}.")
    resolved = {}
    for option in dataclasses.fields(schema):
        value = getattr(typed, option.name)
        if not (option.metadata.get("id_omits_default") and value == default_of(option)):
            resolved[option.name] = value
    return resolved


TOKEN_FORMATS: Registry[Any] = Registry(
    "token_format",
    dict.fromkeys(("auto", "corpus")),
    field="data.format",
    expects="harness.data.tokens:TokenFormat",
)
"""Formats of ``data.kind=tokens``."""

WEIGHT_FORMATS: Registry[Any] = Registry(
    "weight_format",
    dict.fromkeys(("dcp", "hf", "torch")),
    field="convert.format",
    expects="harness.weights.format:WeightFormat",
)
"""Formats of weights that are read or written."""
