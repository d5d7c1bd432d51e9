"""Compose a typed, validated job from command-line overrides: the only module that uses Hydra's composition.

Overrides are checked against the dataclasses before Hydra sees them (so that every typo gets the same
one-line error), Hydra merges the YAML, and the result is a plain ``Job``. No code that runs a job imports
Hydra or OmegaConf.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, cast, get_origin

from harness.compose_errors import MISSING, to_user_error
from harness.errors import UserError
from harness.exchange.found import recorded_model
from harness.exchange.from_config import model_node, require_read
from harness.job import Job, from_dict
from harness.launched import launched_ranks
from harness.layers import CONFIG_JSON, Layers, files_of_option, plain_node
from harness.overrides import (
    AXES,
    FROM_CONFIG,
    check_overrides,
    groups,
    in_hydra_syntax,
    options_of,
    sets_field,
    typed_value,
    with_one_length,
)
from harness.paths import conf_dir
from harness.text import SecretError

WEIGHTS = ("generate.checkpoint", "evaluate.checkpoint")
"""Fields with weights that are used: ``model=from_config`` is the model that they record."""
POINTS = "points"
"""Key in ``hydra.sweeper.params`` for points that are not a product of axes: one per line, as overrides."""

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


def compose_job(overrides: Iterable[str], *, config_name: str = "train", schema: type = Job) -> Any:
    """Compose, type, resolve and validate a job.

    Args:
        overrides: ``group=option`` and ``field=value`` strings, as typed.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the job.

    Raises:
        UserError: one line that names the wrong override, field or value, and what would work.
    """
    overrides = spelled_out(overrides, schema)
    check_overrides(overrides, schema)  # before Hydra is imported
    with Composer(config_name, schema) as composer:
        return composer.point(in_hydra_syntax(overrides, schema))


def spelled_out(overrides: Iterable[str], schema: type) -> list[str]:
    """Return overrides without the abbreviations of a verb."""
    spell: Callable[[Iterable[str]], list[str]] = getattr(schema, "spelled_out", list)
    return spell(overrides)


class Composer:
    """Compose many jobs of one primary config, inside ``with``.

    Hydra takes 0.1 s for a config. So it composes files that can change several groups, once in a process.
    Options of single groups are merged into copies, and values are set there.

    Args:
        config_name: the primary config, a file of conf/.
        schema: dataclass of the jobs.
    """

    def __init__(self, config_name: str = "train", schema: type = Job) -> None:
        self.config_name, self.schema = config_name, schema
        self._hydra = ExitStack()

    def __enter__(self) -> Composer:
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.override_parser.overrides_parser import OverridesParser

        register_schema(self.schema)
        GlobalHydra.instance().clear()
        self._hydra.enter_context(initialize_config_dir(config_dir=conf_dir(), version_base="1.3"))
        self.parser = OverridesParser.create(GlobalHydra.instance().config_loader())
        self._conf = _stamp(conf_dir())
        return self

    def __exit__(self, *_raised: object) -> None:
        self._hydra.close()

    def job(self, overrides: Iterable[str]) -> Any:
        """Compose one job, like ``compose_job``.

        Raises:
            UserError: one line that names the wrong override, field or value, and what would work.
        """
        overrides = list(overrides)
        check_overrides(overrides, self.schema)
        return self.point(in_hydra_syntax(overrides, self.schema))

    def point(self, overrides: list[str]) -> Any:
        """Compose one job from overrides that are already checked and in Hydra's syntax."""
        read_from, overrides = register_model(overrides), with_one_length(overrides)
        try:
            _, config = self._config(overrides)
        except Exception as error:
            raise to_user_error(error, self.schema) from error
        return job_from_config(config, self.schema, read_from)

    def config(self, overrides: list[str], *, with_hydra: bool = False) -> Any:
        """Compose a config, before it becomes a job; ``with_hydra`` adds Hydra's own part, key ``hydra``."""
        from hydra import compose

        register_model(overrides)
        try:
            return compose(self.config_name, overrides, return_hydra_config=with_hydra)
        except Exception as error:
            raise to_user_error(error, self.schema) from error

    def axes(self, overrides: list[str]) -> dict[str, Any]:
        """Axes of the sweep in the job's files: values by name of the field or group, and POINTS."""
        register_model(overrides)
        try:
            layers, config = self._config(overrides)
            layers.add_hydra(config)
            return dict(config.hydra.sweeper.params or {})
        except Exception as error:
            raise to_user_error(error, self.schema) from error

    def _parsed(self, typed: str) -> Any:
        """Parse one override; sweeps have the parser's folder and are not kept."""
        if typed not in _parsed_once:
            [parsed] = self.parser.parse_overrides([typed])
            if parsed.is_sweep_override():
                return parsed
            _parsed_once[typed] = parsed
        return _parsed_once[typed]

    def _config(self, overrides: list[str]) -> tuple[Layers, Any]:
        """Return a new config, as Hydra composes it, and what made it."""
        from hydra._internal.config_loader_impl import ConfigLoaderImpl

        values, options, rest = [], {}, []
        for typed in overrides:
            parsed = self._parsed(typed)
            group = parsed.key_or_group
            # Hydra reports the error of several values for one field.
            if parsed.is_sweep_override():
                rest.append(typed)
            elif sets_field(typed) or (group in groups() and isinstance(parsed.value(), dict)):
                values.append(parsed)
            # The last option of a group wins.
            elif typed_value([typed], "model") == FROM_CONFIG and not parsed.is_delete():
                options[group] = CONFIG_JSON
            elif _sets_one_group(self._conf, typed):
                options[group] = typed
            else:
                rest.append(typed)
        layers = _layers(self._conf, self.config_name, self.schema, tuple(rest))
        config = layers.config(options, {each.key_or_group.partition(".")[0] for each in values})
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return layers, config


_parsed_once: dict[str, Any] = {}
_Stamp = tuple[tuple[str, int, int], ...]


@functools.cache
def _layers(_conf: _Stamp, config_name: str, schema: type, rest: tuple[str, ...]) -> Layers:
    return Layers(config_name, _schemas[schema].node, rest)


@functools.cache
def _sets_one_group(_conf: _Stamp, override: str) -> bool:
    return bool(files_of_option(override))


def _stamp(folder: str) -> _Stamp:
    """Return path, size and mtime of all files below a folder, to detect changes."""
    return tuple(
        (entry.path, entry.stat().st_size, entry.stat().st_mtime_ns)
        for below, _, _ in sorted(os.walk(folder))
        for entry in sorted(os.scandir(below), key=lambda entry: entry.name)
        if entry.is_file()
    )


@dataclass(frozen=True)
class Composed:
    """A point of a sweep: its overrides, and its job, or the reason why it has none."""

    overrides: list[str]
    job: Any
    reason: str = ""


def compose_points(
    overrides: Iterable[str],
    *,
    config_name: str = "train",
    schema: type = Job,
    show: Callable[[int, int], None] = lambda done, points: None,
) -> list[Composed]:
    """Compose every point of a multirun, in the order of Hydra's own sweeper.

    Args:
        overrides: as typed; comma-separated values of one field are an axis.
        config_name: the primary config, a file of conf/.
        schema: dataclass of the jobs.
        show: called with the number of composed points and of all points.

    Raises:
        UserError: the overrides are wrong for every point.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    overrides = list(overrides)
    check_overrides(overrides, schema)
    typed = in_hydra_syntax(overrides, schema)
    points = []
    with Composer(config_name, schema) as composer:
        read = composer.parser.parse_overrides
        try:
            once = [str(o.input_line) for o in read(typed) if not o.is_sweep_override()]
            # The axes do not depend on the model's config.
            once = [each for each in once if typed_value([each], "model") != FROM_CONFIG]
            params = composer.axes(once)
            listed = _listed_points(params.pop(POINTS, ""), schema)
            axes = [f"{name}={values}" for name, values in params.items()]
            spelled = [
                point
                for own in listed or [[]]
                for point in BasicSweeper.split_arguments(read([*axes, *own, *typed]), None)[0]
            ]
        except UserError:
            raise
        except Exception as error:
            raise to_user_error(error, schema) from error
        for done, point in enumerate(spelled, start=1):
            try:
                points.append(Composed(point, composer.point(point)))
            except SecretError:
                raise  # not a skipped point: a sweep writes the reasons of those to disk
            except UserError as error:
                points.append(Composed(point, None, str(error)))
            show(done, len(spelled))
    return points


def _listed_points(text: str, schema: type) -> list[list[str]]:
    """Return the overrides of each line; the command line wins over a line.

    Raises:
        UserError: a line is not made of overrides.
    """
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    for line in lines:
        check_overrides(line, schema)
    return [in_hydra_syntax(line, schema) for line in lines]


def option_values(group: str) -> dict[str, dict[str, Any]]:
    """Values in the files of a group, by option; for groups whose files have no defaults list."""
    from omegaconf import OmegaConf

    folder = groups()[group]
    loaded = {option: OmegaConf.load(folder / f"{option}.yaml") for option in options_of(folder)}
    return {option: cast("dict[str, Any]", OmegaConf.to_container(of)) for option, of in loaded.items()}


def job_from_config(config: Any, schema: type = Job, read_from: str | None = None) -> Any:
    """Turn a config composed by Hydra into a resolved and validated job.

    Args:
        config: the composed config.
        schema: dataclass of the job.
        read_from: path from ``register_model``.

    Raises:
        UserError: an unknown key, a value of the wrong type, a missing value, or a broken rule.
    """
    from omegaconf.errors import OmegaConfBaseException

    try:
        plain = _plain_values(config)
    except OmegaConfBaseException as error:
        raise to_user_error(error, schema) from error
    require_read(plain.get("model", {}).get("path"), read_from)
    return from_dict(schema, plain).resolve(launched_ranks=launched_ranks())


def _plain_values(config: Any) -> dict[str, Any]:
    """Return a config as dictionaries; an error names all missing values."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        return cast("dict[str, Any]", plain_node(config))
    except OmegaConfBaseException:
        if missing := sorted(OmegaConf.missing_keys(config)):
            raise UserError(MISSING.format(", ".join(missing))) from None
        raise


def require_one_point(overrides: list[str], config_name: str, schema: type, *, can_sweep: bool) -> None:
    """Refuse a sweep in the job's files if the typed overrides do not choose one of its points.

    Raises:
        UserError: naming the open axes.
    """
    chosen = [each for each in overrides if each.startswith(("sweep=", "experiment=", AXES))]
    if not chosen:
        return
    with Composer(config_name, schema) as composer:
        axes = composer.axes(in_hydra_syntax(overrides, schema))
    listed = str(axes.pop(POINTS, "")).splitlines()
    keys = {each.lstrip("+").partition("=")[0] for each in overrides}
    is_listed = any(line.split() and set(line.split()) <= set(overrides) for line in listed)
    remaining = [str(name) for name in axes if str(name) not in keys]
    if listed and not is_listed:
        remaining = [POINTS, *remaining]
    if remaining:
        named = " ".join(each for each in chosen if not each.startswith(AXES)) or AXES
        works = "-m, which runs all points" if can_sweep else "the values of one point, without that file"
        raise UserError(f"{named}: has several points ({', '.join(remaining)}); would work: {works}")
