"""Give Hydra the configs that are not files: the job, and the model of a config.json."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, get_origin

from harness.compose.overrides import FROM_CONFIG, typed_value
from harness.config.job import Job
from harness.util import PACKAGE
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


def find_launcher() -> None:
    """Let Hydra find the harness's launcher, before it imports its plugins.

    An editable install makes ``hydra_plugins`` importable by a finder, which does not list its modules.
    """
    try:
        import hydra_plugins
    except ImportError:
        return  # a copy of the package alone; only sweepers need the launcher
    folder = str(PACKAGE.parent / "hydra_plugins")
    if folder not in hydra_plugins.__path__:
        hydra_plugins.__path__.append(folder)


def adapt_sweepers() -> None:
    """Change defaults of Hydra's sweepers, after Hydra has imported its plugins.

    ``params`` is empty instead of null: Hydra cannot merge ``hydra.sweeper.params={...}`` into null. Optuna's
    ``max_failure_rate`` is 1 instead of 0: some points of a space are not valid jobs, which must not end the
    study. Its ``direction`` is null, which stands for that in which the objective improves.
    """
    from hydra.core.config_store import ConfigStore

    stored = ConfigStore.instance().repo["hydra"]["sweeper"]
    for name in ("basic.yaml", "optuna.yaml"):
        if name in stored and stored[name].node.params is None:
            stored[name].node.params = {}
            if name == "optuna.yaml":
                stored[name].node.max_failure_rate, stored[name].node.direction = 1.0, None


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
    from harness.weights.detect import recorded_model
    from harness.weights.from_config import model_node

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
