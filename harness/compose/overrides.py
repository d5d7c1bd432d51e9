"""Check overrides, before Hydra sees them: groups, options, fields, and Hydra's own settings."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_origin

from harness.compose.paths import config_folders
from harness.config.fields import no_such_field, type_hints
from harness.config.job import Job
from harness.config.texts import refuse_secrets
from harness.util.errors import ConfigError, UserError

HONOURED = ("searchpath", "sweeper.params")
"""Settings that have an effect, without ``hydra.``, each with the settings below it."""
_FOLDERS = "runs_dir=FOLDER name=NAME, a run's folder is FOLDER/NAME/ID, a sweep's is FOLDER/NAME"
_RECORDS = "job.json and overrides.txt in the run's folder, which are always written"
_OUTPUT = "metrics.console=plain metrics.log_interval=N; logs/ in the run's folder has each rank's output"
_ENVIRONMENT = "cluster.env.NAME=VALUE"

INSTEAD = {
    "defaults": "group=option, or the defaults list of an own primary config (--config-dir, --config-name)",
    "sweeper": "sweep=optuna for points chosen by results, with sweep.NAME=VALUE for its settings",
    "launcher": "cluster=slurm on a cluster, cluster=local here",
    "mode": "-m for a sweep, the command without -m for one job",
    "run": _FOLDERS,
    "sweep": _FOLDERS,
    "output": _FOLDERS,
    "output_subdir": _RECORDS,
    "hydra_logging": _OUTPUT,
    "job_logging": _OUTPUT,
    "verbose": _OUTPUT,
    "callbacks": "metrics.wandb=true, or result.json in the run's folder",
    "env": _ENVIRONMENT,
    "help": "--help",
    "hydra_help": "--help",
    "overrides": _RECORDS,
    "runtime": "--info, or code.json in the run's folder",
    "job.name": "name=NAME",
    "job.chdir": "paths relative to the current folder, which does not change",
    "job.override_dirname": "name=NAME with fields in it: 'name=a-${training.seed}'",
    "job.id": "the id in job.json, a hash of the job",
    "job.num": "the id in job.json, a hash of the job",
    "job.config_name": "--config-name NAME",
    "job.env_set": _ENVIRONMENT,
    "job.env_copy": _ENVIRONMENT,
    "job.config": "name=NAME with fields in it: 'name=a-${training.seed}'",
}
"""What would work instead of the settings without an effect; a name covers the settings below it."""


def is_honoured(key: str) -> bool:
    """Whether ``key`` (``hydra.NAME``, or ``hydra/GROUP``) is a setting that has an effect."""
    return any(f"{_name(key)}.".startswith(f"{name}.") for name in HONOURED)


def check_setting(override: str, key: str) -> None:
    """Refuse a setting of Hydra that would have no effect.

    Args:
        override: as typed, or ``key=value`` of a file.
        key: its key, which begins with ``hydra``.

    Raises:
        UserError: naming what to use instead.
    """
    if is_honoured(key):
        return
    parts = _name(key).split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    works = next((INSTEAD[name] for name in names if name in INSTEAD), None)
    if works is None:
        known = sorted({*HONOURED, *INSTEAD})
        raise UserError(f"{override}: no such setting of Hydra; Hydra has: {', '.join(known)}")
    raise UserError(f"{override}: has no effect, because Hydra only composes here; would work: {works}")


def _name(key: str) -> str:
    return key.removeprefix("hydra").lstrip("./").replace("/", ".")


OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@:-]*)(?:=(?P<value>.*))?$", re.DOTALL)

LISTED = ("experiment",)
"""Groups that allow a list of options; later options override earlier ones."""
AXES = "hydra.sweeper.params"
"""The setting of Hydra that has the axes of a sweep."""

LENGTHS = {
    "training.steps": "steps",
    "training.tokens": "tokens",
    "scale.tokens_per_parameter": "scale",
    "scale.flops": "scale",
}
"""Fields that give the length of a run. Only those of one kind can be combined."""

FROM_CONFIG = "from_config"
"""The option of group ``model`` that is not a file of conf/: it is read from a config.json."""

_NUMBER = re.compile(r"^\s*(nan|inf)\s*$", re.IGNORECASE)


_QUOTED = r"'(?:\\.|[^'\\])*'|\"(?:\\.|[^\"\\])*\"|"
# A quoted text, or an unquoted element of a list, mapping or sweep with characters that are not ASCII.
_NON_ASCII = re.compile(
    _QUOTED + r"(?<![^,\[:{])[^\s,\[\]{}()'\":=$\\]*[^\x00-\x7f][^,\[\]{}()'\":=$\\]*(?![^,\]}])"
)


def sets_field(override: str) -> bool:
    """Whether an override sets a field, so that it does not change which files are composed."""
    match = OVERRIDE.match(override)
    if match is None or match["sign"] is not None or match["key"].startswith("hydra"):
        return False
    return match["key"] not in groups()


def groups() -> dict[str, tuple[Path, ...]]:
    """The groups and their folders, in ``conf/`` and on the search path."""
    return config_folders().groups


def check_overrides(overrides: Iterable[str], schema: type = Job) -> None:
    """Reject overrides of unknown groups, options or fields, before Hydra is imported.

    Raises:
        UserError: with a suggestion.
    """
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
            check_setting(override, key)
            continue
        if key not in known_groups:
            _check_field(key, value, schema, list(known_groups), sign)
        elif value is not None and "{" not in value:
            if sign in ("+", "++") and match["key"] == key and key not in own_groups():
                raise UserError(f"{override}: a group is chosen without {sign}; would work: {key}={value}")
            _check_options(key, value)
        elif sign == "~" and key in fields_of(schema):
            options = " or ".join(options_of(key))
            raise UserError(f"{override}: every job needs an option of it; would work: {key}={options}")


def in_hydra_syntax(overrides: Iterable[str], schema: type = Job) -> list[str]:
    """Return the overrides in Hydra's syntax.

    Hydra needs ``++`` before keys of mappings, ``+`` before an option of a group for another place
    (data@data.sources.web=local_text), and quotes around options that look like numbers (debug=nan) and
    around characters that are not ASCII.
    """
    return [_missing_sign(override, schema) + _with_quotes(override) for override in overrides]


def _missing_sign(override: str, schema: type) -> str:
    match = OVERRIDE.match(override)
    sets_axes = match is not None and match["sign"] is None and match["key"] == AXES
    if sets_axes or _is_own_key(override, schema):
        return "++"
    return "+" if match is not None and match["sign"] is None and "@" in match["key"] else ""


def _with_quotes(override: str) -> str:
    match = OVERRIDE.match(override)
    if match is None or match["value"] is None:
        return override
    value = match["value"]
    if match["key"] in groups():
        options = [f"'{option}'" if _NUMBER.match(option) else option for option in value.split(",")]
        value = ",".join(options)
    elif not value.isascii() and "${" not in value:
        value = _NON_ASCII.sub(lambda text: text[0] if text[0][0] in "'\"" else f"'{text[0]}'", value)
    return f"{match['sign'] or ''}{match['key']}={value}"


def with_quoted_text(override: str, field: str) -> str:
    """Return an override with quotes around its value if it sets ``field``, a text that is not Hydra's."""
    name, _, text = override.partition("=")
    # As Hydra reads a quoted string: a quote inside has a backslash before it.
    is_quoted = re.fullmatch(r"""'([^'\\]|\\.)*'|"([^"\\]|\\.)*\"""", text, re.DOTALL) is not None
    if name != field or is_quoted or text == "null":
        return override
    # In quotes Hydra reads \' as ', and keeps all other backslashes but those before it and at the end.
    escaped = re.sub(
        r"(\\*)('|$)", lambda found: found[1] * 2 + (found[2] and "\\'"), text.replace("${", "\\${")
    )
    return f"{field}='{escaped}'"


def _is_own_key(override: str, schema: type) -> bool:
    """Whether a plain override sets a mapping, or a key of one."""
    match = OVERRIDE.match(override)
    current = schema
    for name in match["key"].split(".") if match is not None and match["sign"] is None else ():
        if not dataclasses.is_dataclass(current) or name not in fields_of(current):
            return False
        hint = type_hints(current)[name]
        if get_origin(hint) is dict:
            return True
        current = fields_of(current)[name]
    return False


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
    """Options of a group: its YAML files."""
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
    """Reject unknown options of a group. Sweep functions such as ``glob(...)`` are left to Hydra."""
    options = [*options_of(group), *([FROM_CONFIG] if group == "model" else [])]
    if value.strip().startswith("[") and group not in LISTED:
        rule = "a group takes one option; would work:"
        first = value.strip().strip("[]").split(",")[0].strip()
        raise UserError(f"{group}={value}: {rule} {group}={first if first in options else options[0]}")
    if "(" in value or value.strip() == "[]":
        return
    for option in (o.strip().removesuffix(".yaml") for o in value.strip("[]'\" ").split(",")):
        if option not in options:
            close = difflib.get_close_matches(option, options, n=1)
            hint = f"did you mean {close[0]}? options" if close else "options"
            raise UserError(f"{group}={option}: no such option; {hint}: {', '.join(options) or 'none'}")


def _check_field(key: str, value: str | None, schema: type, groups: list[str], sign: str | None) -> None:
    """Reject an unknown field, and signs that a field does not take."""
    prefix, current = "", schema
    names = key.split(".")
    for depth, name in enumerate(names):
        fields = fields_of(current)
        if name not in fields:
            known = {**fields, **(dict.fromkeys(groups) if depth == 0 else {})}
            raise unknown_field(key, value, name, known, prefix, _namesakes(schema, names[-1]))
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


def _namesakes(schema: type, name: str, prefix: str = "") -> list[str]:
    """Dotted names of all fields called ``name``."""
    found = []
    for field, inner in fields_of(schema).items():
        found += [prefix + field] if field == name else []
        found += _namesakes(inner, name, f"{prefix}{field}.") if inner is not None else []
    return found


def unknown_field(
    key: str, value: Any, name: str, known: Iterable[str], prefix: str, namesakes: Iterable[str] = ()
) -> UserError:
    """Make the error for ``name`` of the dotted ``key``, which is not in ``known``; with a suggestion."""
    shown = "" if value is None else f"={value}"
    return UserError(f"{key}{shown}: {no_such_field(name, known, prefix, namesakes)}")


@functools.cache
def fields_of(schema: type) -> dict[str, Any]:
    """Field names of a dataclass, each with its own dataclass, or None for a plain value or a mapping."""
    return {field.name: _inner(type_hints(schema)[field.name]) for field in dataclasses.fields(schema)}


def _inner(hint: Any) -> Any:
    kinds = () if get_origin(hint) is dict else (hint, *get_args(hint))
    return next((kind for kind in kinds if dataclasses.is_dataclass(kind)), None)
