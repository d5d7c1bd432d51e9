"""Checks of overrides: groups, options, fields and settings of Hydra; one line for each mistake."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

from harness.compose.override import SETTING, Override, parse
from harness.compose.paths import config_folders
from harness.config.elsewhere import answer
from harness.config.fields import no_such_field, type_hints
from harness.config.job import Job
from harness.config.texts import refuse_secrets
from harness.util.errors import ConfigError, UserError
from harness.util.words import MOST_NAMES, listed, meant

LISTED = ("experiment",)
"""Groups that allow a list of options; later options override earlier ones."""
AXES = "hydra.sweeper.params"
"""The setting of Hydra that has the axes of a sweep."""
HONOURED = (SETTING, AXES)
"""The settings of Hydra that have an effect, each with the settings below it."""

FROM_CONFIG = "from_config"
"""The option of group ``model`` that is not a file of conf/: it is read from a config.json."""


def check_setting(key: str, value: str | None, shown: str) -> None:
    """Refuse a setting of Hydra that has no effect here."""
    if not any(f"{key}.".startswith(f"{setting}.") for setting in HONOURED):
        raise UserError(f"{shown}: {answer(key, value, Job)}")


def groups() -> dict[str, tuple[Path, ...]]:
    """The groups and their folders, in ``conf/`` and on the search path."""
    return config_folders().groups


def checked(texts: Iterable[str], schema: type = Job) -> list[Override]:
    """Parse overrides; refuse unknown groups, options or fields, before Hydra is imported."""
    overrides = [parse(text) for text in texts]
    # Before any error that repeats an override.
    typed = (override.source.partition("=") for override in overrides)
    refuse_secrets((name, value.strip("'\" ")) for name, _, value in typed)
    for override, after in itertools.zip_longest(overrides, overrides[1:]):
        if not override.key or (override.value is None and override.sign != "~"):
            works = "field=value or group=option, in quotes if it has spaces"
            is_name = override.key.partition(".")[0] in (*fields_of(schema), *groups())
            if is_name and after is not None and after.value is None:
                works = f"{override.source}={after.source}"
            raise UserError(f"{override.source}: not an override; would work: {works}")
        _check(override, schema)
    return overrides


def _check(override: Override, schema: type) -> None:
    sign = override.sign
    value = override.value
    source = override.source
    key, _, place = override.key.partition("@")
    if place and not (key == "data" and place.startswith("data.sources.")):
        works = "data@data.sources.NAME=OPTION"
        raise UserError(
            f"{source}: an option of a group has one place; would work: {key}=OPTION, {works}"
        )
    if key.startswith("sweep."):
        raise UserError(f"{source}: is for several jobs, chosen by results; would work: -m")
    if key == "hydra" or key.startswith(("hydra.", "hydra/")):
        check_setting(key, value, source)
        return
    # A verb without a training job has fields only.
    known_groups = groups() if issubclass(schema, Job) else {}
    if key not in known_groups:
        check_field(key, value, schema, list(known_groups), sign)
    elif value is not None and "{" not in value:
        _check_options(key, value)
        if sign == "++":
            raise UserError(f"{source}: a group has no ++; would work: {key}={value}")
    elif sign == "~" and key in fields_of(schema):
        options = " or ".join(options_of(key))
        raise UserError(f"{source}: every job needs an option of it; would work: {key}={options}")


def options_of(group: str) -> list[str]:
    options = set()
    for folder in groups()[group]:
        for path in folder.rglob("*.yaml"):
            option = path.relative_to(folder).with_suffix("")
            # Packages in experiments/extensions have configurations of their own.
            if "conf" not in option.parts:
                options.add(str(option))
    return sorted(options)


def named_options(group: str) -> list[str]:
    """Every option of a group that can be typed; not all are files."""
    return [*options_of(group), *([FROM_CONFIG] if group == "model" else [])]


def _check_options(group: str, value: str) -> None:
    options = named_options(group)
    if value.strip().startswith("[") and group not in LISTED:
        rule = f"a group takes one option; would work: {group}=OPTION, -m for several"
        raise UserError(f"{group}={value}: {rule}")
    if "(" in value or value.strip() == "[]":
        return
    for option in (o.strip().removesuffix(".yaml") for o in value.strip("[]'\" ").split(",")):
        if option not in options:
            raise UserError(f"{group}={option}: {no_such_option(group, option)}")


def no_such_option(group: str, option: str) -> str:
    """Say which option was meant, or which there are."""
    if found := answer(group, option, Job, is_field=True):
        return found
    options = options_of(group)
    close = meant(option, options, inside=True)
    rule = f"no such option; did you mean {', '.join(close)}?" if close else "no such option;"
    if close and len(options) > MOST_NAMES:
        return rule
    return f"{rule} options: {listed(option, options, f'--help {group}')}"


def check_field(
    key: str, value: str | None, schema: type, groups: list[str], sign: str = ""
) -> None:
    prefix = ""
    current = schema
    names = key.split(".")
    for depth, name in enumerate(names):
        fields = fields_of(current)
        if name not in fields:
            known = {**fields, **(dict.fromkeys(groups) if depth == 0 else {})}
            shown = "" if value is None else f"={value}"
            found = namesakes(schema, names[-1])
            rule = answer(key, value, schema, is_field=bool(found))
            rule = rule or no_such_field(name, known, prefix, found)
            raise UserError(f"{key}{shown}: {rule}")
        inner = fields[name]
        if depth + 1 < len(names):
            if get_origin(type_hints(current)[name]) is dict:
                return  # its keys are the user's own
            if inner is None:
                works = f"{prefix}{name}={value}"
                raise ConfigError(key, value, f"{prefix}{name} has no fields", works)
            prefix = f"{prefix}{name}."
            current = inner
    if sign == "~":
        works = "" if fields_of(current)[names[-1]] else f"; would work: {key}=value"
        raise UserError(f"~{key}: a field cannot be removed{works}")
    if sign == "+":
        raise UserError(f"+{key}={value}: the field exists already; would work: {key}={value}")


def namesakes(schema: type, name: str) -> list[str]:
    return [each for each, _ in all_fields(schema) if each.rpartition(".")[2] == name]


def all_fields(schema: type, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ``(dotted name, dataclass)`` of all fields and parts; None for the class of a value."""
    for name, inner in fields_of(schema).items():
        yield f"{prefix}{name}", inner
        if inner is not None:
            yield from all_fields(inner, f"{prefix}{name}.")


@functools.cache
def fields_of(schema: type) -> dict[str, Any]:
    """Field names of a dataclass, each with its own dataclass, or None for a plain value or a mapping."""
    return {
        field.name: _inner(type_hints(schema)[field.name]) for field in dataclasses.fields(schema)
    }


def _inner(hint: Any) -> Any:
    kinds = () if get_origin(hint) is dict else (hint, *get_args(hint))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
