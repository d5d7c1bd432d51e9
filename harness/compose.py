"""From command-line overrides to a typed, validated job: the only module that knows Hydra's composition.

The size of this boundary is deliberate: overrides are checked against the dataclasses before Hydra sees
them (so that every typo gets the same one-line error), Hydra merges the YAML, and what comes out is a
plain ``Job``. Nothing behind this door imports Hydra or OmegaConf.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args, get_type_hints

from harness.errors import ConfigError, UserError
from harness.job import Job, from_dict, launched_ranks
from harness.paths import conf_dir

_OVERRIDE = re.compile(r"^(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w./@:-]*)(?:=(?P<value>.*))?$", re.DOTALL)


def register_schema(schema: type = Job) -> None:
    """Makes a dataclass known to Hydra as ``job_schema``, the root that every primary config starts from."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(name="job_schema", node=schema)


def compose_job(overrides: Iterable[str], *, config_name: str = "train", schema: type = Job) -> Any:
    """Composes, types, resolves and validates a job.

    Args:
        overrides: ``group=option`` and ``field=value`` strings, as typed.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.

    Raises:
        UserError: one line that says which override, field or value is wrong, and what would work.
    """
    from hydra import compose, initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    overrides = list(overrides)
    check_overrides(overrides, schema)
    register_schema(schema)
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=conf_dir(), version_base="1.3"):
        try:
            config = compose(config_name=config_name, overrides=overrides)
        except Exception as error:
            raise translated(error) from error
    return job_from_config(config, schema)


def job_from_config(config: Any, schema: type = Job) -> Any:
    """Turns what Hydra composed into a resolved and validated job.

    Raises:
        UserError: an unknown key, a value of the wrong type, a missing value, or a broken rule.
    """
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise translated(error) from error
    assert isinstance(plain, dict)
    reject_unknown_keys(plain, schema)
    return from_dict(schema, plain).resolve(launched_ranks=launched_ranks())


def check_overrides(overrides: Iterable[str], schema: type = Job) -> None:
    """Refuses overrides that name no group, option or field, before Hydra is even imported.

    Raises:
        UserError: with a did-you-mean.
    """
    groups = {p.name: p for p in Path(conf_dir()).iterdir() if p.is_dir()}
    for override in overrides:
        match = _OVERRIDE.match(override)
        if match is None or (match["value"] is None and match["sign"] != "~"):
            raise UserError(f"{override}: not an override; would work: field=value or group=option")
        key, value = match["key"].split("@")[0], match["value"]
        if key == "hydra" or key.startswith(("hydra.", "hydra/")):
            continue
        if key in groups and value is not None and "{" not in value:
            _check_options(key, value, groups[key])
        elif key not in groups:
            _check_field(key, value, schema, list(groups))


def reject_unknown_keys(plain: dict[str, Any], schema: type, prefix: str = "") -> None:
    """Walks a composed config and refuses every key that the dataclasses do not have.

    Structured configs refuse unknown keys of files and plain overrides, but ``+key=value`` goes through.

    Raises:
        ConfigError: with a did-you-mean.
    """
    fields = _fields(schema)
    for name, value in plain.items():
        if name not in fields:
            raise _unknown(prefix + name, value, name, fields, prefix)
        if fields[name] is not None and isinstance(value, dict):
            reject_unknown_keys(value, fields[name], f"{prefix}{name}.")


def translated(error: BaseException) -> UserError:
    """What Hydra or OmegaConf has to say, on one line."""
    parts: list[str] = []
    current: BaseException | None = error
    while current is not None:
        parts += [line.strip() for line in str(current).splitlines() if line.strip()]
        current = current.__cause__
    key = next((p.split(":", 1)[1].strip() for p in parts if p.startswith("full_key:")), "")
    told = [p for p in parts if not p.startswith(("full_key:", "object_type=", "reference_type=", "set_env", "See "))]
    text = "; ".join(dict.fromkeys(told)) or type(error).__name__
    return UserError(f"{key}: {text}" if key and key not in text else text)


def _check_options(group: str, value: str, folder: Path) -> None:
    """Refuses options that the group does not have; a sweep's comma list and globs are left to Hydra."""
    options = sorted(str(p.relative_to(folder))[: -len(".yaml")] for p in folder.rglob("*.yaml"))
    chosen = value.strip("[]'\" ").split(",") if "(" not in value else []
    for option in (o.strip().removesuffix(".yaml") for o in chosen):
        if option not in options and option not in ("null", ""):
            close = difflib.get_close_matches(option, options, n=1)
            hint = f"did you mean {close[0]}? options" if close else "options"
            raise UserError(f"{group}={option}: no such option; {hint}: {', '.join(options) or 'none'}")


def _check_field(key: str, value: str | None, schema: type, groups: list[str]) -> None:
    """Refuses a dotted name that leads to no field."""
    prefix, current = "", schema
    names = key.split(".")
    for depth, name in enumerate(names):
        fields = _fields(current)
        if name not in fields:
            known = {**fields, **(dict.fromkeys(groups) if depth == 0 else {})}
            raise _unknown(key, value, name, known, prefix)
        inner = fields[name]
        if depth + 1 < len(names):
            if inner is None:
                raise ConfigError(key, value, f"{prefix}{name} is a value and has no fields")
            prefix, current = f"{prefix}{name}.", inner


def _unknown(key: str, value: Any, name: str, known: Iterable[str], prefix: str) -> UserError:
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    works = f"did you mean {prefix}{close[0]}?" if close else f"{prefix or 'the job'} has: {', '.join(sorted(known))}"
    shown = "" if value is None else f"={value}"
    return UserError(f"{key}{shown}: no such field; {works}")


def _fields(schema: type) -> dict[str, Any]:
    """Field names of a dataclass, each with its own dataclass, or None for a plain value."""
    hints = get_type_hints(schema)
    return {
        field.name: next(
            (t for t in (hints[field.name], *get_args(hints[field.name])) if dataclasses.is_dataclass(t)), None
        )
        for field in dataclasses.fields(schema)
    }
