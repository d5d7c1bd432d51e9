"""Fields of the typed job: each declares its rule, and whether it changes the numbers that a run computes.

A rule is a range or a list of choices. Rules between fields are code, in the ``validate`` of a
dataclass. Three roles (law 2 of docs/architecture.md):

* ``numerics``: another value is another experiment (learning rate, model, data order).
* ``execution``: another value computes the same in another way (degrees of parallelism, prefetch).
* ``label``: names, paths and output; never part of a job's identity.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import functools
import inspect
import itertools
import operator
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import (
    TYPE_CHECKING,
    Any,
    NamedTuple,
    TypedDict,
    TypeVar,
    Unpack,
    cast,
    get_origin,
)

from harness.config.types import (
    fits,
    inner_classes,
    rule_in_words,
    sizes_of,
    type_hints,
    type_in_words,
    with_types,
)
from harness.util.errors import ConfigError, as_typed
from harness.util.words import MOST_NAMES, listed, meant

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


Part = TypeVar("Part", bound="DataclassInstance")
NUMERICS = "numerics"
EXECUTION = "execution"
LABEL = "label"
LARGEST_INTEGER = 2**63 - 1
LARGEST_NUMBER = 3.4e38
"""Maximum of float32, in which a job's numbers are used."""
NO_FIELD = "no such field"
TYPED = "the job"
"""What has the fields that a command line or a file of conf/ gives, for which there is ``--help``."""
LONGEST_NAME = 255
"""Most bytes of a name in a file system of Linux."""


@dataclasses.dataclass(frozen=True)
class Switch:
    """A field without which others have no effect."""

    field: str
    """Its dotted name in the job."""
    works: str = ""
    """Override that switches it on, if it is not the field with the value ``on``."""
    is_on: Callable[[Any], bool] | None = None
    """Whether a value is on; None: if it is ``on``, or without that true."""
    reads: str = ""
    """Attribute of the job with this value, if it is not the field."""
    on: str | None = None
    """The value that is on."""

    def error(self, job: Any, name: str, value: Any) -> ConfigError | None:
        """The error of a value that the off switch leaves without effect; None if it is on."""
        state = operator.attrgetter(self.reads or self.field)(job)
        is_on = self.is_on or (bool if self.on is None else self.on.__eq__)
        if is_on(state):
            return None
        shown = as_typed(operator.attrgetter(self.field)(job))
        works = self.works or f"{self.field}={self.on or 'true'}"
        rule = f"has no effect with {self.field}={shown}"
        return ConfigError(name, value, rule, f"{works} {name}={as_typed(value)}, or leave it out")


class Rule(TypedDict, total=False):
    """Values that a field may have, besides null if its type allows that. ``check_rules`` checks them."""

    least: float
    """Smallest value."""
    most: float
    """Largest value."""
    above: float
    """The value is larger than this."""
    below: float
    """The value is smaller than this."""
    also: int
    """A value that is allowed outside the range."""
    choices: Iterable[object]
    """The allowed values; of a list, the allowed elements."""
    nonempty: bool
    """An empty text is not allowed; the default would work."""
    needs: Switch | tuple[Switch, ...]
    """Switches without which the field has no effect (``without_effect``)."""
    written: str
    """The harness writes this path of the disk: a ``file``, a ``folder``, or a ``path`` of either
    kind."""
    works: str
    """What would work, for the error, if the rule does not say it."""
    verbatim: bool
    """A text that is as it is typed: signs of Hydra's grammar mean nothing in it. A verb's own
    field."""
    id_omits_default: bool
    """For fields added since jobs were published: the default is not part of a job's id, which so
    stays."""
    id_of_null: str
    """What stands for null in a job's id: the default of jobs that were published before null was."""


def _field(
    role: str,
    default: Any = dataclasses.MISSING,
    *,
    factory: Callable[[], Any] | None = None,
    **rule: Unpack[Rule],
) -> Any:
    metadata = {"role": role, **rule}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


numerics = functools.partial(_field, NUMERICS)
"""A field that changes the results."""
execution = functools.partial(_field, EXECUTION)
"""A field that changes only how the results are computed."""
added_numerics = functools.partial(numerics, id_omits_default=True)
"""A field that changes the results, added since jobs were published."""
added_execution = functools.partial(execution, id_omits_default=True)
"""The same of a field that changes only how the results are computed."""
label = functools.partial(_field, LABEL)
"""A field that changes neither: names, paths, verbosity."""


def part(kind: type) -> Any:
    """A part of a job: a dataclass whose fields have roles."""
    return dataclasses.field(default_factory=kind)


def with_value(config: Part, name: str, value: Any) -> Part:
    """Return a copy of a config dataclass in which the field with this dotted name has another value.

    The last part of the name can be a key of a mapping.
    """
    first, _, rest = name.partition(".")
    if isinstance(config, dict):
        return cast("Part", {**config, name: value})
    changed = with_value(getattr(config, first), rest, value) if rest else value
    return dataclasses.replace(config, **{first: changed})


def leaves(config: Any) -> Iterator[tuple[str, str, Any]]:
    """Yield ``(dotted name, role, value)`` of every leaf field of a config dataclass, in order."""
    for name, field, value in leaf_fields(config):
        if "role" not in field.metadata:
            raise TypeError(f"config field {name} has no role (numerics, execution or label)")
        yield name, field.metadata["role"], value


def identity(config: Any, roles: Collection[str]) -> list[tuple[str, Any]]:
    """Return ``(dotted name, value)`` of the leaf fields with these roles that a job's id covers."""
    covered = []
    for name, field, value in leaf_fields(config):
        is_omitted = field.metadata.get("id_omits_default") and value == default_of(field)
        if value is None:
            value = field.metadata.get("id_of_null")
        if field.metadata["role"] in roles and not is_omitted:
            covered.append((name, value))
        for removed in REMOVED_AFTER.get(_of_any_source(name), ()):
            if removed.role in roles:
                group = name.rpartition(".")[0]
                covered.append((f"{group}.{removed.name.rpartition('.')[2]}", removed.value))
    return covered


def docstrings(cls: type) -> dict[str, str]:
    """The string below each field of a dataclass and its bases; empty where its code cannot be read."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if not dataclasses.is_dataclass(base):
            continue
        try:
            tree = ast.parse(inspect.cleandoc(inspect.getsource(base)))
        except (OSError, SyntaxError):
            continue
        body = tree.body[0].body  # type: ignore[attr-defined]
        for statement, after in itertools.pairwise(body):
            if isinstance(statement, ast.AnnAssign) and isinstance(after, ast.Expr):
                found[ast.unparse(statement.target)] = ast.literal_eval(after.value)
    return found


def default_of(field: dataclasses.Field[Any]) -> Any:
    return (
        field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    )


def leaf_fields(config: Any, prefix: str = "") -> list[tuple[str, dataclasses.Field[Any], Any]]:
    """Return ``(dotted name, field, value)`` of every leaf field of a config dataclass, in order.

    Dataclasses in a mapping come in the order of their names. In a mapping that is a label, all
    fields are labels, with its ``needs``.
    """
    found: list[tuple[str, dataclasses.Field[Any], Any]] = []
    owner: type = type(config)
    for field in _fields_of(owner):
        value = getattr(config, field.name)
        name = prefix + field.name
        kind: type = type(value)
        if _is_part(kind):
            found += leaf_fields(value, name + ".")
        elif isinstance(value, dict) and inner_classes(owner)[field.name] is not None:
            for key in sorted(value):
                inner = leaf_fields(value[key], f"{name}.{key}.")
                if field.metadata["role"] == LABEL:
                    inner = [(leaf, _with_rule(of, field), each) for leaf, of, each in inner]
                found += inner
        else:
            found.append((name, field, value))
    return found


def _with_rule(field: dataclasses.Field[Any], of: dataclasses.Field[Any]) -> dataclasses.Field[Any]:
    """Return a field with the role of another one, and with both rules."""
    changed = copy.copy(field)
    changed.metadata = MappingProxyType({**field.metadata, **of.metadata})
    return changed


# Cached: a search checks thousands of jobs.
_fields_of = functools.cache(dataclasses.fields)
_is_part = functools.cache(dataclasses.is_dataclass)


def check_rules(config: Any, prefix: str = "") -> None:
    """Check the declared rule of every field, and that every number fits into a tensor.

    Raises:
        ConfigError: naming the field.
    """
    for name, field, value in leaf_fields(config, prefix):
        if value is None or isinstance(value, bool):
            continue
        for number in _numbers(value):
            if isinstance(number, int) and abs(number) > LARGEST_INTEGER:
                only = f"must be an integer of 64 bits, at most {LARGEST_INTEGER}"
                raise ConfigError(name, value, only)
            # NaN compares false.
            if isinstance(number, float) and not abs(number) <= LARGEST_NUMBER:
                only = f"must be a finite number of float32, at most {LARGEST_NUMBER:g}"
                raise ConfigError(name, value, only)
        rule = field.metadata
        has_default = "nonempty" in rule or "written" in rule
        works = rule.get("works", as_typed(field.default) if has_default else "")
        if "written" in rule:
            check_written(name, value, rule["written"], works)
        elements = list(value.values()) if isinstance(value, dict) else value
        for element in elements if isinstance(elements, list) else [elements]:
            if not _breaks(element, rule):
                continue
            shown = "''" if element == "" else element
            if "choices" not in rule:
                raise ConfigError(name, shown, f"must be {rule_in_words(field)}", works)
            null = ["null"] if str(field.type).endswith("None") else []
            # A table that packages extend says so: the job may be that of another machine.
            more = getattr(rule["choices"], "more", [])
            choices = [*map(as_typed, rule["choices"]), *null]
            if len(choices) > MOST_NAMES:
                choices = [listed(str(shown), map(str, choices), f"--help {name}")]
            raise ConfigError(name, shown, "no such choice", [*choices, *more])


def without_effect(job: Any) -> Iterator[tuple[str, str, ConfigError]]:
    """Yield ``(role, switch, error)`` for each value that an off switch leaves without effect.

    The default of a field is no such value. Nor may be one that nobody has given for this job,
    which only the caller knows.
    """
    for name, field, value in leaf_fields(job):
        needs = field.metadata.get("needs", ())
        for switch in needs if isinstance(needs, tuple) else (needs,):
            if value != default_of(field) and (error := switch.error(job, name, value)):
                yield field.metadata["role"], switch.field, error
                break


def check_written(name: str, value: str, kind: str, works: str) -> None:
    """Check a path that will be written, as far as that is possible without writing.

    Args:
        kind: ``file``, ``folder``, or ``path`` for either.
    """
    path = Path(os.path.expanduser(value))
    problem = ""
    if not value:
        problem = "must be non-empty"
    elif "://" in value:
        problem = "is not a local path"
    elif file := next(filter(_is_file, path.parents), None):
        problem = f"{file} is not a folder"
    elif kind == "folder" and _is_file(path):
        problem = "is a file"
    elif kind == "file" and os.path.isdir(path):
        problem = "is a folder"
    if problem:
        raise ConfigError(name, value or "''", problem, works)


def _is_file(path: Path) -> bool:
    # Unlike Path.exists, a folder that cannot be entered is no error.
    return os.path.exists(path) and not os.path.isdir(path)


def _breaks(value: Any, rule: Any) -> bool:
    if "choices" in rule:
        return value not in rule["choices"]
    if isinstance(value, str):
        return not value and "nonempty" in rule
    if "also" in rule and value == rule["also"]:
        return False
    # NaN compares false.
    return (
        ("least" in rule and not value >= rule["least"])
        or ("above" in rule and not value > rule["above"])
        or ("most" in rule and not value <= rule["most"])
        or ("below" in rule and not value < rule["below"])
    )


def _numbers(value: Any) -> list[int | float]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return list(itertools.chain.from_iterable(map(_numbers, value)))
    return [value] if isinstance(value, int | float) and not isinstance(value, bool) else []


def from_dict(
    cls: type, plain: dict[str, Any], prefix: str = "", *, unset: str | None = None
) -> Any:
    """Build a (nested) config dataclass from plain containers.

    Args:
        plain: its fields; missing ones get their defaults.
        prefix: prefix of the fields' dotted names, for errors.
        unset: what stands for a value of any type that the caller will ask for.

    Raises:
        ConfigError: an unknown key, a value of the wrong type, or a missing field without a
            default.
    """
    hints = type_hints(cls)
    inners = inner_classes(cls)
    known = {field.name for field in dataclasses.fields(cls)}
    if unset is None:  # read from a file
        plain = {
            name: value
            for name, value in plain.items()
            if not _is_removed(f"{prefix}{name}", value)
        }
    if unknown := set(plain) - known:
        name = sorted(unknown, key=str)[0]
        whole = TYPED if unset else cls.__name__
        rule = no_such_field(str(name), hints, prefix, whole=whole)
        raise ConfigError(f"{prefix}{name}", plain[name], rule)
    for field in dataclasses.fields(cls):
        if field.name not in plain and default_of(field) is dataclasses.MISSING:
            raise ConfigError(f"{prefix}{field.name}", None, "must be given")

    def built(kind: Any, value: Any, name: str) -> Any:
        if not isinstance(value, dict):
            return value
        return from_dict(kind, value, f"{prefix}{name}.", unset=unset)

    values = {}
    for name, value in plain.items():
        hint = hints[name]
        if (unset is None or value != unset) and not fits(value, hint):
            key = f"{prefix}{name}"
            works = sizes_of(value) if fits(1, hint) else []
            raise ConfigError(key, value, f"must be {type_in_words(hint, key)}", works)
        inner = inners[name]
        if inner is not None and get_origin(hint) is dict:
            value = {key: built(inner, each, f"{name}.{key}") for key, each in value.items()}
        elif inner is not None:
            value = built(inner, value, name)
        values[name] = value
    return cls(**values)


class Removed(NamedTuple):
    """A field of an earlier version that was no label.

    Files written then may hold it with its default. Ids still cover that default.
    """

    name: str
    after: str
    """The leaf field that stood before it, in the same group: an id depends on the order. Rows that
    share it stand together."""
    role: str
    """Its role; empty if no id has covered its default."""
    value: Any
    """Its default."""


REMOVED = (
    Removed("data.tokens_field", "data.text_field", "", "input_ids"),
    Removed("optimizer.newton_schulz_steps", "optimizer.momentum", "", 5),
    Removed("optimizer.newton_schulz_half", "optimizer.newton_schulz_dtype", "", False),
    Removed("optimizer.in_backward", "optimizer.implementation", EXECUTION, False),
    Removed("optimizer.decay_vectors", "optimizer.weight_decay", NUMERICS, False),
    Removed("optimizer.decay_embeddings", "optimizer.weight_decay", NUMERICS, True),
    Removed("debug.max_skipped_steps", "debug.non_finite", NUMERICS, 10),
    Removed("compile.fullgraph", "compile.backend", EXECUTION, True),
    Removed("data.long_conversations", "data.train_on", "", "drop"),
    Removed("scale.lr_exponent", "scale.hyperparameters", "", 0.0),
    Removed("data.encoding_errors", "data.format", NUMERICS, "strict"),
)
REMOVED_LABELS = (
    "checkpoint.max_failed_saves",
    "cluster.hardware.tf32_tflops",
    "cluster.hardware.mxfp8_tflops",
    "cluster.hardware.link",
    "cluster.hardware.power_w",
    "cluster.hardware.achieved_half",
    "cluster.hardware.achieved_float8",
    "cluster.hardware.achieved_attention",
    "cluster.leaf_nodes",
    "cluster.network_adapters",
    "cluster.oversubscription",
    "cluster.pue",
    "cluster.stop_timeout_seconds",
    "evaluation.tasks",
    "metrics.wandb_entity",
    "metrics.wandb_mode",
    "profiling.with_stack",
    "profiling.record_shapes",
)
"""Labels of an earlier version. Files written then may hold them with any value."""
REMOVED_AFTER = {
    after: list(removed)
    for after, removed in itertools.groupby(REMOVED, key=lambda removed: removed.after)
}
_REMOVED_BY_NAME = {removed.name: removed for removed in REMOVED}
REMOVED_VALUES = {"metrics.console": ("auto", "rich")}
"""Values of labels that older files may give: the default takes their place."""


def _of_any_source(name: str) -> str:
    """The name of a field of ``data.sources.NAME`` among those of ``data``."""
    return re.sub(r"^data\.sources\.[^.]+\.", "data.", name)


def _is_removed(name: str, value: Any) -> bool:
    """Whether an older file may give this field, or this value of it, that is no more."""
    if value in REMOVED_VALUES.get(name, ()):
        return True
    removed = _REMOVED_BY_NAME.get(_of_any_source(name))
    return name in REMOVED_LABELS or (removed is not None and removed.value == value)


def no_such_field(
    name: str,
    known: Iterable[str],
    prefix: str,
    namesakes: Iterable[str] = (),
    whole: str = TYPED,
) -> str:
    """Say which of the ``known`` fields below ``prefix``, or of its ``namesakes`` elsewhere, was meant."""
    if _of_any_source(prefix + name) in (*_REMOVED_BY_NAME, *REMOVED_LABELS):
        return "was removed; CHANGELOG.md says what takes its place"
    # First the namesakes: steps is no sweep.
    close = [namesake for namesake in namesakes if not prefix and namesake.endswith(f".{name}")]
    close = close or [prefix + each for each in meant(name, known)] or list(namesakes)
    if close:
        return f"{NO_FIELD}; did you mean {' or '.join(close)}?"
    part = prefix.rstrip(".")
    names = ", ".join(sorted(known))
    if whole == TYPED:
        names = listed(name, known, f"--help {part}".strip())
    return f"{NO_FIELD}; {part or whole} has: {names}"


def allows(cls: type, name: str, value: Any) -> bool:
    """Whether a field's type and rule allow a value, also as it is typed; a name of no field allows all."""
    *parts, last = name.split(".")
    for part in parts:
        cls = inner_classes(cls).get(part) or object
    if last not in getattr(cls, "__dataclass_fields__", {}):
        return True
    hint = type_hints(cls)[last]
    value = with_types(None if value == "null" else value, hint)
    rule = cls.__dataclass_fields__[last].metadata  # type: ignore[attr-defined]
    return fits(value, hint) and (value is None or not _breaks(value, rule))
