"""Configs for Hydra that are not files, and the configs of many jobs from few compositions by Hydra."""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_origin

from harness.compose.overrides import FROM_CONFIG, OVERRIDE, check_setting, groups, options_of, typed_value
from harness.compose.paths import config_folders
from harness.config.job import Job
from harness.util.errors import UserError

WEIGHTS = ("generate.checkpoint", "evaluate.checkpoint")
"""Fields with weights that are used: ``model=from_config`` is the model that they record."""

_schemas: dict[type, Any] = {}
"""Hydra's nodes of registered dataclasses; making one takes longer than composing a job."""


def register_schema(schema: type = Job) -> None:
    """Register a dataclass with Hydra as ``job_schema``, which every primary config starts from."""
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    if schema not in _schemas:
        store.store(name="job_schema", node=schema_node(schema))
        _schemas[schema] = store.repo["job_schema.yaml"]
    store.repo["job_schema.yaml"] = _schemas[schema]


def schema_of(schema: type) -> Any:
    """Return the node of a registered dataclass."""
    return _schemas[schema].node


def schema_node(schema: type) -> Any:
    """Return a dataclass as a config that can be changed: OmegaConf makes frozen ones read-only.

    The elements of mappings of dataclasses and of lists of mappings lose their type, because OmegaConf
    accepts only elements that have it already; ``from_dict`` checks them.
    """
    from omegaconf import DictConfig, ListConfig, OmegaConf

    def unlock(node: DictConfig) -> DictConfig:
        node._set_flag("readonly", None)
        if dataclasses.is_dataclass(node._metadata.element_type):
            node._metadata.element_type, node._metadata.ref_type = Any, dict[str, Any]
        for name in node:
            child = node._get_node(name)
            if isinstance(child, DictConfig):
                unlock(child)
            elif isinstance(child, ListConfig) and get_origin(child._metadata.element_type) is dict:
                child._metadata.element_type, child._metadata.ref_type = Any, list[Any]
        return node

    return unlock(OmegaConf.structured(schema))


def empty_axes() -> None:
    """Let Hydra merge ``hydra.sweeper.params={...}``, which it cannot merge into its default, null."""
    from hydra.core.config_store import ConfigStore

    node = ConfigStore.instance().repo["hydra"]["sweeper"]["basic.yaml"].node
    node.params = {} if node.params is None else node.params


def register_model(overrides: Iterable[str]) -> str | None:
    """Register the option ``model=from_config`` with Hydra, from the config.json that the overrides name.

    Returns:
        The path it was read from; None without that option.

    Raises:
        UserError: config.json does not describe a valid model.
    """
    from hydra.core.config_store import ConfigStore

    overrides, store = list(overrides), ConfigStore.instance()
    if typed_value(overrides, "model") != FROM_CONFIG:
        return None
    from harness.weights.config_json import model_node
    from harness.weights.detect import recorded_model

    for field in WEIGHTS:
        path = typed_value(overrides, field)
        if path is not None:
            store.store(group="model", name=FROM_CONFIG, node=recorded_model(path, field))
            return path
    # A conversion reads the config.json of its source.
    path = typed_value(overrides, "model.path") or typed_value(overrides, "convert.source")
    if path is None:
        works = "model=from_config model.path=FOLDER, which holds a config.json"
        raise UserError(f"model.path: must be given with model=from_config; would work: {works}")
    store.store(group="model", name=FROM_CONFIG, node=model_node(path))
    return path


CONFIG_JSON = f"model={FROM_CONFIG}"
"""The override whose option is registered again for each job, so nothing made from it is kept."""
_OTHER_PACKAGE = re.compile(r"^#\s*@package\s+(?!_global_\s*$)", re.MULTILINE)


class Layers:
    """Configs that differ in values, and in options whose files set values of their own group only.

    Args:
        config_name: the primary config.
        schema: node of the job's dataclass.
        rest: the other overrides, the same for all configs.
    """

    def __init__(self, config_name: str, schema: Any, rest: tuple[str, ...]) -> None:
        self.config_name, self.schema, self.rest = config_name, schema, rest
        self._simple_groups = _simple_groups(config_name, rest)
        self._composed: dict[tuple[str, ...], Any] = {}
        self._nodes: dict[str, Any] = {}
        self._shareable: dict[int, bool] = {}
        self._hydra: Any = None

    def config(self, options: dict[str, str], changed: set[str]) -> Any:
        """Return a new config, as Hydra composes it.

        Args:
            options: override that chooses the option, by group.
            changed: groups and dotted fields that the caller will set. Configs share the other nodes.
        """
        overrides = tuple(options.values())
        # For the only job of a process, Hydra composes once.
        if overrides in self._composed or not (self._composed or options.keys() <= self._simple_groups):
            base = self._compose(*overrides)
            return base if CONFIG_JSON in overrides else self._copy(base, {}, changed)
        nodes = {group: self._node(group, override) for group, override in options.items()}
        own = {"model"} if CONFIG_JSON in overrides else set()
        return self._copy(self._compose(), nodes, changed | own)

    def add_hydra(self, config: Any) -> None:
        """Add Hydra's own part to a config."""
        from omegaconf import open_dict

        with open_dict(config):
            config["hydra"] = self._hydra

    def _compose(self, *options: str) -> Any:
        from hydra import compose
        from omegaconf import open_dict

        if options in self._composed:
            return self._composed[options]
        config = compose(self.config_name, [*self.rest, *options], return_hydra_config=True)
        with open_dict(config):
            self._hydra = config.pop("hydra")
        if config_folders().added or {"experiment", "sweep"} & _chosen(self._hydra):
            _check_settings(self._hydra)
        if CONFIG_JSON not in options:
            self._composed[options] = config
        return config

    def _node(self, group: str, override: str) -> Any:
        """Return the node of an option; its parent is another config."""
        if override in self._nodes:
            return self._nodes[override]
        try:
            node = self._merged(group, override) if group in self._simple_groups else None
        except Exception:
            node = None  # Hydra will raise it again, with the name of the file
        if node is None:
            node = self._compose(override)._get_node(group)
        if override != CONFIG_JSON:
            self._nodes[override] = node
        return node

    def _merged(self, group: str, override: str) -> Any:
        """Merge the files of an option into the schema, as Hydra does."""
        from hydra.core.config_store import ConfigStore
        from omegaconf import OmegaConf

        if override == CONFIG_JSON:
            layers = [ConfigStore.instance().repo["model"][f"{FROM_CONFIG}.yaml"].node]
        else:
            layers = [OmegaConf.load(file) for file in files_of_option(override)]
        node = copy.deepcopy(self.schema._get_node(group))
        for layer in layers:
            layer.pop("defaults", None)
            node.merge_with(layer)
        return node

    def _copy(self, base: Any, nodes: dict[str, Any], changed: set[str]) -> Any:
        """Copy a config, with other nodes for some groups; complete copies would take most of the time."""
        memo = {}  # deepcopy takes what is here for the copy of an object
        for name in base:
            child = base._get_node(name)
            memo[id(child)] = self._copy_changed(nodes.get(name, child), name, changed)
        return copy.deepcopy(base, memo)

    def _copy_changed(self, node: Any, name: str, changed: set[str]) -> Any:
        """Copy a node if it or a field in it is set; it shares nodes in it that are not."""
        if not any(f"{each}.".startswith(f"{name}.") for each in changed) and self._can_share(node):
            return node
        memo = {}
        if name not in changed and isinstance(node._value(), dict):
            for key, child in node._value().items():
                if isinstance(child._value(), dict):
                    memo[id(child)] = self._copy_changed(child, f"{name}.{key}", changed)
        return copy.deepcopy(node, memo)

    def _can_share(self, node: Any) -> bool:
        """Whether no value refers to other fields (``${...}``), which are found through the parent."""
        from omegaconf import OmegaConf

        if id(node) not in self._shareable:
            plain = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
            self._shareable[id(node)] = "${" not in str(plain)
        return self._shareable[id(node)]


def _chosen(hydra: Any) -> set[str]:
    """Groups of which a config has an option."""
    return {str(group) for group, option in hydra.runtime.choices.items() if option is not None}


def _check_settings(hydra: Any) -> None:
    """Refuse settings of Hydra that files of the job make, and that would have no effect.

    Raises:
        UserError: naming the first one.
    """
    usual, settings = _usual_settings(), _settings(hydra)
    for key, value in settings.items():
        if key not in usual or value != usual[key]:
            try:
                check_setting(f"{key}={value}", key)
            except UserError as error:
                raise UserError(f"{error} (it is in a file of the job)") from None


@functools.cache
def _usual_settings() -> dict[str, Any]:
    """Settings of a config without files."""
    from hydra.core.global_hydra import GlobalHydra
    from hydra.types import RunMode

    loader = GlobalHydra.instance().config_loader()
    return _settings(loader.load_configuration(None, [], RunMode.RUN).hydra)


def _settings(hydra: Any) -> dict[str, Any]:
    """Values by dotted name, without those that Hydra sets itself; first the options of Hydra's groups."""
    from omegaconf import OmegaConf

    plain = OmegaConf.to_container(hydra, enum_to_str=True)
    assert isinstance(plain, dict)
    options = plain["runtime"]["choices"]
    for name in ("name", "config_name", "override_dirname"):
        del plain["job"][name]
    del plain["runtime"], plain["overrides"]
    return {key: each for key, each in options.items() if key.startswith("hydra/")} | _flat(plain, "hydra")


def _flat(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not value:
        return {name: value}
    return {
        key: each for part, below in value.items() for key, each in _flat(below, f"{name}.{part}").items()
    }


def plain_node(node: Any) -> Any:
    """Resolve a node to plain values, as ``OmegaConf.to_container`` does in four times the time."""
    from omegaconf import Node, OmegaConf

    value = node._value()
    if isinstance(value, Node):  # of a field with several types
        return plain_node(value)
    if isinstance(value, dict):
        return {key: plain_node(each) for key, each in value.items()}
    if isinstance(value, list):
        return [plain_node(each) for each in value]
    if isinstance(value, str) and ("${" in value or value == "???"):
        value = node._get_parent()[node._key()]
        if OmegaConf.is_config(value):
            return OmegaConf.to_container(value, resolve=True, throw_on_missing=True)
    return value


def files_of_option(override: str) -> tuple[Path, ...]:
    """Files of the option that an override chooses, later ones win; none if it can change other groups."""
    match = OVERRIDE.match(override)
    if match is None or match["sign"] is not None or match["key"] not in groups():
        return ()
    option = (match["value"] or "").strip("'\"")
    return _own_files(f"{match['key']}/{option}") if option in options_of(match["key"]) else ()


def _own_files(name: str) -> tuple[Path, ...]:
    """Files of a config and its defaults, in the order in which Hydra merges them; none if Hydra has to."""
    path = config_folders().find(name)
    content = _content(path)
    if path is None or not isinstance(content, dict) or not isinstance(content.get("defaults", []), list):
        return ()
    if "@package" in path.read_text():
        return ()
    files: tuple[Path, ...] = ()
    defaults = content.get("defaults", [])
    # Without _self_, Hydra merges a file after its defaults.
    for each in defaults if "_self_" in defaults else [*defaults, "_self_"]:
        is_option = isinstance(each, str) and each.isidentifier()
        found = (path,) if each == "_self_" else _own_files(_beside(name, each)) if is_option else ()
        if not found:
            return ()
        files += found
    return files


def _beside(name: str, default: str) -> str:
    """Name of the config that a string in the defaults list of another one means."""
    folder = "" if default.startswith("/") else name.rpartition("/")[0]
    return f"{folder}/{default.strip('/')}".lstrip("/")


def _simple_groups(config_name: str, rest: tuple[str, ...]) -> set[str]:
    """Groups whose values come from their option alone, not from a primary config or an experiment."""
    found = _groups_not_set(config_name)
    for override in rest:
        name, _, option = override.partition("=")
        if name in groups() and config_folders().find(f"{name}/{option}"):
            found &= _groups_not_set(f"{name}/{option}")
        elif not name.startswith("hydra."):
            return set()
    return found


def _groups_not_set(name: str) -> set[str]:
    """Groups whose values a config leaves to their options; none if that cannot be seen."""
    path = config_folders().find(name)
    content = _content(path)
    if path is None or not isinstance(content, dict) or not isinstance(content.get("defaults", []), list):
        return set()
    if _OTHER_PACKAGE.search(path.read_text()):
        return set()
    found = set(groups()) - set(content)
    for each in content.get("defaults", []):
        if isinstance(each, dict):
            chosen = {
                str(group).removeprefix("override ").strip("/"): option for group, option in each.items()
            }
            for group, option in chosen.items():
                if option and not files_of_option(f"{group}={option}"):
                    found &= _groups_not_set(f"{group}/{option}")
        elif not isinstance(each, str):
            return set()
        elif each not in ("job_schema", "_self_"):
            found &= _groups_not_set(_beside(name, each))
    return found


def _content(path: Path | None) -> Any:
    """Content of a file; None if it cannot be read, which Hydra will report."""
    import yaml

    if path is None:
        return None
    try:
        return _parsed(path.read_text()) or {}
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return None


@functools.cache
def _parsed(text: str) -> Any:
    import yaml

    return yaml.safe_load(text)
