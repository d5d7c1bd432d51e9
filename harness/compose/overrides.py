"""Overrides: their groups, options, fields and settings of Hydra; one line for each mistake in them."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, get_args, get_origin

from harness.compose.paths import config_folders
from harness.config.fields import no_such_field, type_hints
from harness.config.job import Job
from harness.config.texts import refuse_secrets
from harness.util.errors import ConfigError, UserError

OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@:-]*)(?:=(?P<value>.*))?$", re.DOTALL)

LISTED = ("experiment",)
"""Groups that allow a list of options; later options override earlier ones."""
AXES = "hydra.sweeper.params"
"""The setting of Hydra that has the axes of a sweep."""
SETTING = "hydra.searchpath"
HONOURED = (SETTING, AXES)
"""The settings of Hydra that have an effect, each with the settings below it."""

LENGTHS = {
    "training.steps": "steps",
    "training.tokens": "tokens",
    "scale.tokens_per_parameter": "scale",
    "scale.flops": "scale",
}
"""Fields that give the length of a run. Only those of one kind can be combined."""

FROM_CONFIG = "from_config"
"""The option of group ``model`` that is not a file of conf/: it is read from a config.json."""

MOST_SIMILAR, MOST_OPTIONS = 3, 20
"""Options that an error suggests, and that it lists beside a suggestion."""

_NUMBER = re.compile(r"^\s*(nan|inf)\s*$", re.IGNORECASE)


_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|"
# A quoted text, or an unquoted element of a list, mapping or sweep with characters that are not ASCII.
_NON_ASCII = re.compile(
    _QUOTED + r"(?<![^,\[:{])[^\s,\[\]{}()'\":=$\\]*[^\x00-\x7f][^,\[\]{}()'\":=$\\]*(?![^,\]}])"
)

# A number or switch that Hydra would write in another way: 12.10 as 12.1, true as True. Not integers.
_NUMBER_ALONE = (
    r"\s*(?!(?:0|-?[1-9]\d*)\s*(?:$|[,\])}]))"
    r"(?P<number>[+-]?(?:[\d.][\w.+-]*|(?i:true|false|nan|inf)))"
    r"\s*(?![^,\])}])"
)
# It is an element of a list or sweep, or one of a mapping, which follows its key.
_OF_LIST = re.compile(_QUOTED + r"(?P<key>(?<![^,\[(]))" + _NUMBER_ALONE)
_OF_MAPPING = re.compile(_QUOTED + r"(?P<key>(?<![^,{])\s*[\w.-]+\s*:)" + _NUMBER_ALONE)


def check_setting(key: str, shown: str) -> None:
    if not any(f"{key}.".startswith(f"{each}.") for each in HONOURED):
        works = f"{', '.join(HONOURED)}, sweep=optuna, and the fields and flags that --help lists"
        raise UserError(f"{shown}: has no effect, because Hydra only composes here; would work: {works}")


def groups() -> dict[str, tuple[Path, ...]]:
    """The groups and their folders, in ``conf/`` and on the search path."""
    return config_folders().groups


def check_overrides(overrides: Iterable[str], schema: type = Job) -> None:
    """Reject overrides of unknown groups, options or fields, before Hydra is imported."""
    # A verb without a training job has fields only.
    known_groups = groups() if issubclass(schema, Job) else {}
    overrides = list(overrides)
    # Before any error that repeats an override.
    typed = (override.partition("=") for override in overrides)
    refuse_secrets((name, value.strip("'\" ")) for name, _, value in typed)
    for override in overrides:
        match = OVERRIDE.match(override)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            raise UserError(f"{override}: not an override; would work: field=value or group=option")
        sign, value = match["sign"], match["value"]
        key, _, place = match["key"].partition("@")
        if place and not (key == "data" and place.startswith("data.sources.")):
            works = "data@data.sources.NAME=OPTION"
            raise UserError(
                f"{override}: an option of a group has one place; would work: {key}=OPTION, {works}"
            )
        if key.startswith("sweep."):
            raise UserError(f"{override}: is for several jobs, chosen by results; would work: -m")
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            check_setting(key, override)
            continue
        if key not in known_groups:
            check_field(key, value, schema, list(known_groups), sign)
        elif value is not None and "{" not in value:
            if sign in ("+", "++") and match["key"] == key and key not in own_groups():
                raise UserError(f"{override}: a group is chosen without {sign}; would work: {key}={value}")
            _check_options(key, value)
        elif sign == "~" and key in fields_of(schema):
            options = " or ".join(options_of(key))
            raise UserError(f"{override}: every job needs an option of it; would work: {key}={options}")


def with_quotes(override: str, schema: type = Job) -> str:
    """Add the quotes that Hydra needs: around options that look like numbers (debug=nan), around numbers in
    fields of texts, and around characters that are not ASCII.
    """
    match = OVERRIDE.match(override)
    if match is None or match["value"] is None:
        return override
    value = match["value"]
    if match["key"] in groups():
        options = [f"'{option}'" if _NUMBER.match(option) else option for option in value.split(",")]
        value = ",".join(options)
    elif "${" not in value:
        if ("(" not in value or value.startswith("choice(")) and _has_texts(match["key"], schema):
            element = _OF_MAPPING if "{" in value else _OF_LIST
            value = element.sub(_with_quoted_number, value)
        if not value.isascii():
            value = _NON_ASCII.sub(lambda text: text[0] if text[0][0] in "'\"" else f"'{text[0]}'", value)
    return f"{match['sign'] or ''}{match['key']}={value}"


def _has_texts(key: str, schema: Any) -> bool:
    """Whether a field is a text, or a list or mapping of texts."""
    hint = schema
    for name in key.split("."):
        if dataclasses.is_dataclass(hint):
            hint = without_null(type_hints(hint).get(name))  # type: ignore[arg-type]
        else:  # of a list or mapping
            hint = (get_args(hint) or (None,))[-1]
    while get_origin(hint) in (dict, list):
        hint = get_args(hint)[-1]
    return hint is str


def without_null(hint: Any) -> Any:
    """Return the type of an optional value; any other type as it is."""
    kinds = [each for each in get_args(hint) if each is not NoneType]
    return kinds[0] if get_origin(hint) is UnionType and len(kinds) == 1 else hint


def _with_quoted_number(found: re.Match[str]) -> str:
    return f"{found['key']}'{found['number']}'" if found["number"] else found[0]


def with_quoted_text(override: str, field: str) -> str:
    """Return an override with quotes around its value if it sets ``field``, a text that is not Hydra's."""
    name, _, text = override.partition("=")
    # As Hydra reads a quoted string: a quote inside has a backslash before it.
    is_quoted = re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", text, re.DOTALL) is not None
    if name != field or is_quoted or text == "null":
        return override
    escaped = text.replace("${", "\\${")
    return f"{field}={quoted(escaped)}"


def quoted(text: str) -> str:
    """Quote a text for Hydra, for which backslashes are special before a quote and at the end."""
    return "'" + re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), text) + "'"


def typed_value(overrides: Iterable[str], key: str) -> str | None:
    """Return the last value given for a group or field, without quotes; None if there is none."""
    value = None
    for override in overrides:
        match = OVERRIDE.match(override)
        if match is not None and match["key"] == key and match["value"] is not None:
            value = match["value"].strip()
    quoted = value is not None and len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if value is not None and quoted else value


def with_one_length(overrides: list[str]) -> list[str]:
    """Make a typed length of the run win over another length in a file."""
    given = [name for name in LENGTHS if typed_value(overrides, name) not in (None, "null")]
    if len({LENGTHS[name] for name in given}) != 1:
        return overrides
    return [f"{name}=null" for name in LENGTHS if LENGTHS[name] != LENGTHS[given[0]]] + overrides


def options_of(group: str) -> list[str]:
    return sorted(
        {
            str(path.relative_to(folder))[: -len(".yaml")]
            for folder in groups()[group]
            for path in folder.rglob("*.yaml")
        }
    )


def own_groups() -> set[str]:
    """Groups that only folders of the search path have. ``+`` adds one to a job, as Hydra says."""
    conf = config_folders().paths[0]
    return {name for name, folders in groups().items() if conf not in {folder.parent for folder in folders}}


def _check_options(group: str, value: str) -> None:
    options = [*options_of(group), *([FROM_CONFIG] if group == "model" else [])]
    if value.strip().startswith("[") and group not in LISTED:
        rule = "a group takes one option; would work:"
        first = value.strip().strip("[]").split(",")[0].strip()
        raise UserError(f"{group}={value}: {rule} {group}={first if first in options else options[0]}")
    if "(" in value or value.strip() == "[]":
        return
    for option in (o.strip().removesuffix(".yaml") for o in value.strip("[]'\" ").split(",")):
        if option not in options:
            close = _similar(option, options)
            works = [f"did you mean {', '.join(close)}?"] if close else []
            if not close or len(options) <= MOST_OPTIONS:
                works.append(f"options: {', '.join(options) or 'none'}")
            raise UserError(f"{group}={option}: no such option; {' '.join(works)}")


def _similar(name: str, options: list[str]) -> list[str]:
    """Options that contain a name (h100, or fp8 as float8), or else the one that is spelled like it."""
    inside = [each for each in options if name and (name in each or name.replace("fp", "float") in each)]
    return inside[:MOST_SIMILAR] or difflib.get_close_matches(name, options, n=1)


def check_field(
    key: str, value: str | None, schema: type, groups: list[str], sign: str | None = None
) -> None:
    prefix, current = "", schema
    names = key.split(".")
    for depth, name in enumerate(names):
        fields = fields_of(current)
        if name not in fields:
            known = {**fields, **(dict.fromkeys(groups) if depth == 0 else {})}
            shown = "" if value is None else f"={value}"
            rule = no_such_field(name, known, prefix, namesakes(schema, names[-1]))
            raise UserError(f"{key}{shown}: {rule}")
        inner = fields[name]
        if depth + 1 < len(names):
            if get_origin(type_hints(current)[name]) is dict:
                return  # its keys are the user's own
            if inner is None:
                raise ConfigError(key, value, f"{prefix}{name} is a value and has no fields")
            prefix, current = f"{prefix}{name}.", inner
    if sign == "~":
        works = "" if fields_of(current)[names[-1]] else f"; would work: {key}=value"
        raise UserError(f"~{key}: a field cannot be removed{works}")
    if sign == "+":
        raise UserError(f"+{key}={value}: the field exists already; would work: {key}={value}")


def namesakes(schema: type, name: str, prefix: str = "") -> list[str]:
    found = []
    for field, inner in fields_of(schema).items():
        if field == name:
            found.append(prefix + field)
        if inner is not None:
            found += namesakes(inner, name, f"{prefix}{field}.")
    return found


@functools.cache
def fields_of(schema: type) -> dict[str, Any]:
    """Field names of a dataclass, each with its own dataclass, or None for a plain value or a mapping."""
    return {field.name: _inner(type_hints(schema)[field.name]) for field in dataclasses.fields(schema)}


def _inner(hint: Any) -> Any:
    kinds = () if get_origin(hint) is dict else (hint, *get_args(hint))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
