"""Hydra's part of composition: its search path, its grammar, and the files of a job in their order.

``hydra.compose`` merges files as nodes of OmegaConf, which takes twenty times as long as plain
dictionaries. So this module uses parts of Hydra 1.3 that are private: ``create_defaults_list`` and
the repository of files.
"""

import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

from harness.compose.hydra_errors import user_errors
from harness.compose.override import SETTING, Override, parse, quoted
from harness.compose.overrides import FROM_CONFIG
from harness.compose.paths import (
    Stamp,
    config_folders,
    folder_of_package,
    folders_with,
    using_folders,
)
from harness.config.fields import default_of
from harness.config.job import Job
from harness.config.types import UNSET, is_special, type_hints, with_types
from harness.util.errors import ConfigError, UserError

SCHEMA = "job_schema"
"""Config that every primary one starts from: the defaults of the job's dataclass."""
_REFERENCE = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


class Hydra:
    """Hydra's parser and its readers of files, for the folders in use; each file is read once."""

    def __init__(self) -> None:
        from hydra._internal.config_loader_impl import ConfigLoaderImpl
        from hydra._internal.config_repository import CachingConfigRepository
        from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
        from hydra.core.config_store import ConfigStore
        from hydra.core.override_parser.overrides_parser import OverridesParser
        from hydra.core.plugins import Plugins

        class Files(CachingConfigRepository):
            """The files in use; an error names the one that cannot be read."""

            def load_config(self, config_path: str) -> Any:
                try:
                    return super().load_config(config_path)
                except UnicodeDecodeError as error:
                    file = config_folders().find(config_path)
                    raise UserError(f"{file}: is not YAML in UTF-8: {error}") from None

        Plugins.instance()  # finds the readers of files
        store = ConfigStore.instance()
        if f"{SCHEMA}.yaml" not in store.repo:
            store.store(name=SCHEMA, node={})
        if f"{FROM_CONFIG}.yaml" not in store.repo.get("model", {}):
            store.store(name=FROM_CONFIG, node={}, group="model")
        search = ConfigSearchPathImpl()
        search.append("hydra", "pkg://hydra.conf")
        for folder in config_folders().paths:
            search.append("main" if not search.get_path()[1:] else "added", f"file://{folder}")
        search.append("schema", "structured://")
        self.loader = ConfigLoaderImpl(search)
        self.parser = OverridesParser.create(self.loader)
        self._repository = Files(self.loader.repository)
        self._parsed: dict[tuple[str, type], Any] = {}
        self._layers: dict[tuple[str, tuple[str, ...]], list[tuple[str, str]]] = {}
        self._contents: dict[str, dict[str, Any]] = {}
        self._composed: dict[Any, dict[str, Any]] = {}

    def parse(self, override: Override, schema: type = Job) -> Any:
        """Return Hydra's object of an override, which says its value, or the points of its axis."""
        key = override.source, schema
        if key not in self._parsed:
            [self._parsed[key]] = self.parser.parse_overrides([override.for_hydra(schema)])
        return self._parsed[key]

    def layers(
        self,
        primary: str,
        choices: tuple[str, ...],
        schema: type,
        model: Callable[[], dict[str, Any]],
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the files of a job, later ones win: name, and values at their places in the job."""
        from hydra._internal.defaults_list import create_defaults_list

        if (primary, choices) not in self._layers:
            parsed = [self.parse(parse(choice)) for choice in choices]
            found = create_defaults_list(self._repository, primary, parsed, False, False)
            self._layers[primary, choices] = [
                (str(default.config_path), default.package or "") for default in found.defaults
            ]
        for name, package in self._layers[primary, choices]:
            if name == SCHEMA:
                content = plain_defaults(schema)
            elif name == f"model/{FROM_CONFIG}":
                content = model()
            else:
                content = self._read(name)
            if name != primary and "searchpath" in (content.get("hydra") or {}):
                rule = "hydra.searchpath is only supported from the primary config"
                raise UserError(f"{name}.yaml: {rule}; would work: --config-dir FOLDER")
            for part in reversed(package.split(".") if package else []):
                content = {part: content}
            check_time(name, content)
            yield name, content

    def composed(
        self,
        primary: str,
        choices: tuple[str, ...],
        schema: type,
        model: Callable[[], dict[str, Any]],
    ) -> dict[str, Any]:
        """Return a new copy of the merged files of a job."""
        key = primary, choices, schema
        if key not in self._composed:
            config: dict[str, Any] = {}
            names = []
            for name, content in self.layers(primary, choices, schema, model):
                merge(config, content)
                names.append(name)
            config = with_types(config, schema)
            if f"model/{FROM_CONFIG}" in names:  # read again for each job
                return config
            self._composed[key] = config
        return copied(self._composed[key])

    def _read(self, name: str) -> dict[str, Any]:
        from omegaconf import OmegaConf

        if name not in self._contents:
            loaded = self._repository.load_config(name)
            content: Any = OmegaConf.to_container(loaded.config) if loaded is not None else {}
            if not isinstance(content, dict):
                raise UserError(
                    f"{name}.yaml: must be a mapping of fields, like training: {{steps: 3}}"
                )
            if not isinstance(content.get("hydra") or {}, dict):
                raise UserError(
                    f"{name}.yaml: hydra must be a mapping, like {{sweeper: {{params: ...}}}}"
                )
            content.pop("defaults", None)
            self._contents[name] = content
        return self._contents[name]


def check_time(name: str, content: dict[str, Any]) -> None:
    """Refuse a file's time limit that YAML has read in base 60: seconds, taken as minutes."""
    cluster = content.get("cluster")
    time = cluster.get("time") if isinstance(cluster, dict) else None
    if isinstance(time, int) and time >= 3600 and time % 60 == 0:
        text = f"{time // 3600}:{time // 60 % 60:02}:00"
        rule = f"{time} minutes; without quotes YAML reads {text} as this number (in {name}.yaml)"
        raise ConfigError("cluster.time", time, rule, f'"{text}", or {time // 60}')


@functools.cache
def hydra_of(_stamp: Stamp) -> Hydra:
    """Return Hydra for the files in use, which have this stamp."""
    return Hydra()


def plain_defaults(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass as dictionaries; ``???`` stands for values that must be given."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        hint = type_hints(kind)[field.name]
        if dataclasses.is_dataclass(hint):
            values[field.name] = plain_defaults(cast("type", hint))
        else:
            value = default_of(field)
            values[field.name] = UNSET if value is dataclasses.MISSING else copied(value)
    return values


def copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: copied(element) for key, element in value.items()}
    return [copied(element) for element in value] if isinstance(value, list | tuple) else value


def merge(config: dict[str, Any], content: dict[str, Any]) -> None:
    """Merge values into a config; lists are replaced, and ``???`` demands a later value."""
    for key, value in content.items():
        if isinstance(value, dict) and isinstance(config.get(key), dict):
            merge(config[key], value)
        else:
            config[key] = copied(value)


def apply_value(config: dict[str, Any], parsed: Any) -> None:
    """Set, merge or delete what an override says, parsed by Hydra."""
    typed = str(parsed.input_line)
    value = parsed.value()
    *path, last = parsed.key_or_group.split(".")
    place: Any = config
    for name in path:
        if isinstance(place.get(name), list):
            raise UserError(f"{typed}: an element of a list; would work: the complete list")
        if not isinstance(place.get(name), dict):
            place[name] = {}
        place = place[name]
    if parsed.is_delete():
        if last not in place:
            raise UserError(f"{typed}: there is nothing to remove")
        del place[last]
    elif parsed.is_add() and place.get(last) is not None and not isinstance(value, dict | list):
        raise UserError(f"{typed}: the field exists already; would work: {typed[1:]}")
    else:
        merge(place, {last: value})


def resolve_references(
    config: dict[str, Any], texts: Iterable[tuple[Any, Any, str]]
) -> dict[str, Any]:
    """Replace ``${...}`` by values, unless they refer to a value that must be given."""
    rest = False
    for values, key, name in texts:
        # Last, so that the error of a wrong value is that of the field that is referred to.
        top = name.partition(".")[0]
        config[top] = config.pop(top)
        if values[key] == UNSET:
            continue
        match = _REFERENCE.fullmatch(values[key])
        target: Any = config
        for part in match[1].split(".") if match else ():
            target = target.get(part) if isinstance(target, dict) else None
        if isinstance(target, str | int | float) and not is_special(target):
            values[key] = target
        elif target != UNSET:
            rest = True
    if rest:
        from omegaconf import OmegaConf

        return OmegaConf.to_container(OmegaConf.create(config), resolve=True)  # type: ignore[return-value]
    return config


def special_texts(config: Any, prefix: str = "") -> Iterator[tuple[Any, Any, str]]:
    """Yield the containers of all special texts, with their keys and dotted names."""
    for key, value in config.items() if isinstance(config, dict) else enumerate(config):
        if isinstance(value, dict | list):
            yield from special_texts(value, f"{prefix}{key}.")
        elif is_special(value):
            yield config, key, f"{prefix}{key}"


FLAG = "--config-dir"
VARIABLE = "HARNESS_CONF"
_WORKS = f"{SETTING}=[file:///FOLDER], {SETTING}=[pkg://PACKAGE.FOLDER], {FLAG} FOLDER"
# Text that Hydra's grammar reads without quotes.
_PLAIN = re.compile(r"[\w./:-]+", re.ASCII)
SHADOWED_SHOWN = 3


@contextmanager
def search_path(
    overrides: Iterable[str],
    primary: str,
    *,
    folders: Sequence[str] = (),
    primaries: dict[str, str] | None = None,
) -> Iterator[list[str]]:
    """Use the user's folders; yield the overrides, with the search path first.

    The order is Hydra's: ``conf/``, the folders of ``--config-dir`` and HARNESS_CONF, then the typed
    search path or, without one, that of the primary config. Without any of these, the folders in use
    stay.

    Args:
        overrides: as typed.
        primary: name of the primary config.
        folders: values of ``--config-dir`` and HARNESS_CONF.
        primaries: primary configs to compose instead of a verb's own, by name; None keeps those in
            use.
    """
    now = config_folders()
    names = now.primaries if primaries is None else primaries
    overrides = list(overrides)
    typed = [override for override in overrides if parse(override).sets_search_path]
    rest = [override for override in overrides if not parse(override).sets_search_path]
    found = {f"file://{_folder(folder, FLAG)}": _folder(folder, FLAG) for folder in folders}
    entries = (
        _entries(typed[-1])
        if typed
        else _of_primary(names.get(primary, primary), [*found.values()] or now.added)
    )
    for entry in entries:
        folder = _folder(entry, SETTING)
        # An element that means the same from another folder.
        found[entry if entry.startswith("pkg://") else f"file://{folder}"] = folder
    if not found and names == now.primaries:
        yield rest
        return
    with using_folders([*found.values()] or now.added, names):
        entries = [entry if _PLAIN.fullmatch(entry) else quoted(entry) for entry in found]
        yield [f"{SETTING}=[{','.join(entries)}]", *rest] if found else rest


def folders_of_environment() -> list[str]:
    """Return the folders that the variable HARNESS_CONF adds to every command."""
    names = os.environ.get(VARIABLE, "").split(os.pathsep)
    return [str(_folder(name, VARIABLE)) for name in names if name]


def shadowed() -> list[str]:
    """Say which of the user's files are not used, because an earlier folder has another of the same name."""
    shown = []
    for path in config_folders().paths[1:]:
        for file in sorted([*path.glob("*.yaml"), *path.glob("*/*.yaml")]):
            first = config_folders().find(str(file.relative_to(path).with_suffix("")))
            # A copy changes nothing.
            if first is not None and first.read_bytes() != file.read_bytes():
                shown.append(f"{file}: not used, {first} has the same name and comes first")
    more = len(shown) - SHADOWED_SHOWN
    if more > 0:
        shown[SHADOWED_SHOWN:] = [f"and {more} more files"]
    return shown


def _entries(override: str) -> list[str]:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    with user_errors():
        [parsed] = OverridesParser.create().parse_overrides([override])
    if parsed.is_sweep_override():
        raise UserError(
            f"{override}: all points of a sweep have one search path; would work: {_WORKS}"
        )
    return _texts(parsed.value(), override)


def _of_primary(name: str, added: Sequence[Path]) -> list[str]:
    folders = folders_with(added)
    file = folders.find(name)
    if file is None:
        searched = ", ".join(map(str, folders.paths))
        names = {found.stem for path in folders.paths for found in path.glob("*.yaml")}
        works = ", ".join(sorted(names))
        raise UserError(f"--config-name={name}: no such file in {searched}; would work: {works}")
    try:
        if "searchpath" not in file.read_text(encoding="utf-8"):
            return []
    except (OSError, ValueError):
        return []  # Hydra reports it
    from omegaconf import OmegaConf

    with user_errors():
        found = OmegaConf.select(OmegaConf.load(file), SETTING)
        return [] if found is None else _texts(list(found), f"{SETTING} in {file}")


def _texts(value: Any, source: str) -> list[str]:
    elements = value if isinstance(value, list) else [None]
    # Hydra's quoted texts are a class of their own.
    texts: list[Any] = [getattr(element, "text", element) for element in elements]
    if not all(isinstance(text, str) and text for text in texts):
        raise UserError(f"{source}: must be a list of folders or packages; would work: {_WORKS}")
    return texts


def _folder(entry: str, source: str) -> Path:
    scheme, _, name = entry.rpartition("://")
    shown = f"{source}={entry}" if source != SETTING else f"{source}=[{entry}]"
    if scheme == "pkg":
        found = folder_of_package(name)
        if found is None:
            rule = "no such folder in an installed package"
            raise UserError(f"{shown}: {rule}; would work: pip install its package, or {_WORKS}")
        return found
    if scheme not in ("", "file"):
        raise UserError(f"{shown}: must begin with file:// or pkg://; would work: {_WORKS}")
    try:
        if Path(name).is_dir():
            return Path(name).absolute()
    except (OSError, ValueError):  # an invalid path
        pass
    raise UserError(f"{shown}: no such folder; would work: {_WORKS}")
