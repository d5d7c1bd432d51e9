"""Rules of `data.kind=mixture`: its sources, and their weights. Imports no torch."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from fractions import Fraction
from typing import TYPE_CHECKING

from harness.config.data_kinds import DATA_KINDS
from harness.util.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.config.data import DataConfig

OWN = ("kind", "sources", "weights", "epochs", "weight_changes")
"""Fields of the mixture itself."""
SHARED = (
    "mask_document_boundary",
    "attend_across_documents",
    "prefetch",
    "cache_dir",
    "tokenize_workers",
    "tokenize_limit_gib",
)
"""Fields that are set once for all sources. Each source has its own values of the others."""
STEP = "step"
"""Key of a change of weights that is not a source."""
_NAME = re.compile(r"[A-Za-z_][\w-]*")
_COMMAND_OR_FIELD = re.compile(
    r"(harness tokenize .*?tokenize\.target=[^\s']+'?)"
    r"|(?<![\w/.@-])data(?:\.([a-z_]+)\b(?![./])|=)"
)
_EXAMPLE = "'data.sources={web: {kind: local, paths: [web/*.txt]}, code: {kind: local, paths: [code/*.py]}}'"


def check_mixture(data: DataConfig) -> None:
    """Raise ConfigError for sources or weights that contradict each other."""
    if not data.sources:
        raise ConfigError("data.sources", "{}", "data.kind=mixture needs named sources", _EXAMPLE)
    for name in data.source_names:
        if not _NAME.fullmatch(name) or name == STEP:
            rule = f"a name has letters, digits, _ and -, begins with a letter, and is not {STEP}"
            raise ConfigError("data.sources", name, rule, "web")
        _check_source(data.sources[name], name)
    default = type(data)()
    for name, value in vars(data).items():
        if name not in (*OWN, *SHARED) and value != getattr(default, name):
            rule = "is a field of each source"
            raise ConfigError(f"data.{name}", value, rule, f"data.sources.NAME.{name}")
    for name in data.source_names:
        with errors_of_source(data, name):
            source_config(data, name).validate()
    _check_weights(data)


def source_config(data: DataConfig, name: str) -> DataConfig:
    """Return the config of a source, with the fields that all sources share."""
    shared = {field: getattr(data, field) for field in SHARED}
    return dataclasses.replace(data.sources[name], **shared)


def sources_of(data: DataConfig) -> list[tuple[DataConfig, AbstractContextManager[None]]]:
    """Return each source, and a context manager that names its fields in errors."""
    if not data.sources:
        return [(data, nullcontext())]
    return [(source_config(data, name), errors_of_source(data, name)) for name in data.source_names]


@contextmanager
def errors_of_source(data: DataConfig, name: str) -> Iterator[None]:
    """Context manager that renames fields in errors: ``data.paths`` to ``data.sources.<name>.paths``.

    Shared fields, file names and the commands of ``harness tokenize`` stay as they are.
    """
    names = {field.name for field in dataclasses.fields(data)} - {*SHARED, *OWN[1:]}

    def replacement(found: re.Match[str]) -> str:
        command, field = found.groups("")
        if command or (field and field not in names):
            return found[0]
        return f"data.sources.{name}.{field or 'kind='}"

    def renamed(text: str) -> str:
        return _COMMAND_OR_FIELD.sub(replacement, text)

    try:
        yield
    except ConfigError as error:
        field, rule, works = map(renamed, (error.field, error.rule, error.works))
        if f"data.sources.{name}" not in field + rule:
            rule = f"data.sources.{name}: {rule}"
        raise ConfigError(field, error.value, rule, works) from error
    except DataError as error:
        text, source = renamed(str(error)), f"data.sources.{name}"
        raise DataError(text if source in text else f"{source}: {text}") from error


def weights_by_step(
    data: DataConfig, samples_per_epoch: Mapping[str, int | None]
) -> list[tuple[int, dict[str, Fraction]]]:
    """Return the first step of each set of weights, from 1, and the share of every source.

    Args:
        samples_per_epoch: samples per epoch of each source; None if unknown.
    """
    if not data.epochs:
        changes = [(int(each[STEP]), _without_step(each)) for each in data.weight_changes]
        return [(step, _shares(data, weights)) for step, weights in [(1, data.weights), *changes]]
    weights = {}
    for name, epochs in data.epochs.items():
        samples = samples_per_epoch[name]
        if samples is None:
            rule = f"the number of samples of data.sources.{name} is unknown"
            raise ConfigError(f"data.epochs.{name}", epochs, rule, "data.weights")
        weights[name] = Fraction(str(epochs)) * samples
    return [(1, _shares(data, weights))]


def _shares(data: DataConfig, weights: Mapping[str, float | Fraction]) -> dict[str, Fraction]:
    # The decimal number that the user typed: 1/10 for 0.1.
    exact = {name: Fraction(str(weights.get(name, 0))) for name in data.source_names}
    return {name: weight / sum(exact.values()) for name, weight in exact.items()}


def _without_step(change: Mapping[str, float]) -> dict[str, float]:
    return {name: weight for name, weight in change.items() if name != STEP}


def _check_source(source: DataConfig, name: str) -> None:
    if source.kind == "mixture":
        rule = "a source is not a mixture itself"
        raise ConfigError(f"data.sources.{name}.kind", "mixture", rule, "its sources beside the others")
    if source.kind in DATA_KINDS and DATA_KINDS[source.kind].batches != "tokens":
        rule = "samples of a mixture are tokens"
        raise ConfigError(f"data.sources.{name}.kind", source.kind, rule, "data.kind without a mixture")
    default = type(source)()
    for field in SHARED:
        value = getattr(source, field)
        if value != getattr(default, field):
            rule = "is set once, for all sources"
            raise ConfigError(f"data.sources.{name}.{field}", value, rule, f"data.{field}")


def _check_weights(data: DataConfig) -> None:
    if bool(data.weights) == bool(data.epochs):
        rule = "data.kind=mixture needs either data.weights or data.epochs"
        works = ", ".join(f"{name}: 1" for name in data.source_names)
        raise ConfigError("data.weights", data.weights or "{}", rule, f"'data.weights={{{works}}}'")
    if data.epochs and data.weight_changes:
        rule = "changes weights, and data.epochs is given instead"
        raise ConfigError("data.weight_changes", data.weight_changes, rule, "data.weights")
    _check_sources_exist(data, "data.weights", data.weights)
    _check_sources_exist(data, "data.epochs", data.epochs)
    for name in data.source_names if data.epochs else ():
        if name not in data.epochs:
            raise ConfigError("data.epochs", data.epochs, f"has no source {name}", f"data.epochs.{name}=1")
        if not DATA_KINDS[data.sources[name].kind].has_vocabulary or data.sources[name].streaming:
            rule = f"the number of samples of data.sources.{name} is unknown"
            raise ConfigError(f"data.epochs.{name}", data.epochs[name], rule, "data.weights")
    _check_changes(data)
    given = [data.epochs or data.weights, *data.weight_changes]
    for weights in given:
        if not any(weight > 0 for name, weight in weights.items() if name != STEP):
            field = "data.weights" if weights is given[0] else "data.weight_changes"
            raise ConfigError(field, weights, "at least one weight must be above 0")
    for name in data.source_names:
        if not any(weights.get(name, 0) > 0 for weights in given):
            rule = f"has no weight above 0 for data.sources.{name}"
            raise ConfigError("data.weights", data.weights, rule, f"data.weights.{name}=0.1")


def _check_changes(data: DataConfig) -> None:
    previous = 1.0
    for change in data.weight_changes:
        step = change.get(STEP, 0.0)
        if not float(step).is_integer() or step <= previous:
            rule = f"each change needs a whole number `{STEP}` above {int(previous)}, the step before it"
            works = "[{step: 9000, web: 1}]"
            raise ConfigError("data.weight_changes", data.weight_changes, rule, works)
        previous = step
        _check_sources_exist(data, "data.weight_changes", _without_step(change))
        for name, weight in change.items():
            if weight < 0:
                raise ConfigError(f"data.weight_changes.{name}", weight, "must be at least 0")


def _check_sources_exist(data: DataConfig, field: str, weights: Mapping[str, float]) -> None:
    for name, weight in weights.items():
        if name not in data.sources:
            close = difflib.get_close_matches(name, data.source_names, n=1)
            works = close[0] if close else ", ".join(data.source_names)
            raise ConfigError(f"{field}.{name}", weight, "data.sources has no such source", works)
