"""Compose a typed, validated job from command-line overrides.

Overrides are checked against the dataclasses before Hydra sees them (so that every typo gets the same
one-line error), Hydra merges the YAML, and the result is a plain ``Job``. No code that runs a job imports
Hydra or OmegaConf.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from harness.compose.errors import MISSING, to_user_error
from harness.compose.layers import (
    CONFIG_JSON,
    Layers,
    empty_axes,
    files_of_option,
    plain_node,
    register_model,
    register_schema,
    schema_of,
)
from harness.compose.overrides import (
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
from harness.compose.paths import Stamp, conf_dir, config_folders
from harness.compose.resolve import resolve
from harness.compose.search_path import add_folders, overrides_for_hydra, search_path
from harness.config.job import Job, from_dict
from harness.config.texts import SecretError, masked
from harness.train.process import launched_ranks
from harness.util.errors import ConfigError, UserError

POINTS = "points"
"""Key in ``hydra.sweeper.params`` for points that are not a product of axes: one per line, as overrides."""


def compose_job(overrides: Iterable[str], *, config_name: str = "train", schema: type = Job) -> Any:
    """Compose, type, resolve and validate a job.

    Args:
        overrides: ``group=option`` and ``field=value`` strings, as typed.
        config_name: the primary config.
        schema: dataclass of the job.

    Raises:
        UserError: one line that names the wrong override, field or value, and what would work.
    """
    with search_path(spelled_out(overrides, schema), config_name) as typed:
        check_overrides(typed, schema)  # before Hydra is imported
        with Composer(config_name, schema) as composer:
            return composer.point(in_hydra_syntax(typed, schema))


def spelled_out(overrides: Iterable[str], schema: type) -> list[str]:
    """Return overrides without the abbreviations of a verb."""
    spell: Callable[[Iterable[str]], list[str]] = getattr(schema, "spelled_out", list)
    return spell(overrides)


class Composer:
    """Compose many jobs of one primary config, inside ``with``.

    Hydra takes 0.1 s for a config. So it composes files that can change several groups, once in a process.
    Options of single groups are merged into copies, and values are set there.

    Args:
        config_name: the primary config.
        schema: dataclass of the jobs.
    """

    def __init__(self, config_name: str = "train", schema: type = Job) -> None:
        self.config_name, self.schema = config_folders().primaries.get(config_name, config_name), schema
        self._hydra = ExitStack()

    def __enter__(self) -> Composer:
        from hydra import initialize_config_dir
        from hydra.core.global_hydra import GlobalHydra
        from hydra.core.override_parser.overrides_parser import OverridesParser

        register_schema(self.schema)
        GlobalHydra.instance().clear()
        self._hydra.enter_context(initialize_config_dir(config_dir=conf_dir(), version_base="1.3"))
        loader = GlobalHydra.instance().config_loader()
        add_folders(loader)
        empty_axes()
        self.parser = OverridesParser.create(loader)
        self._conf = config_folders().stamp()
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

    def point_of_sweep(self, overrides: list[str]) -> Composed:
        """Compose a job like ``point``, or find the reason why it is not valid."""
        try:
            return Composed(overrides, self.point(overrides))
        except SecretError:
            raise  # not a skipped point: a sweep writes the reasons of those to disk
        except UserError as error:
            return Composed(overrides, None, masked(str(error)))

    def config(self, overrides: list[str], *, with_hydra: bool = False) -> Any:
        """Compose a config, before it becomes a job; ``with_hydra`` adds Hydra's own part, key ``hydra``."""
        from hydra import compose

        register_model(overrides)
        try:
            return compose(self.config_name, overrides_for_hydra(overrides), return_hydra_config=with_hydra)
        except Exception as error:
            raise to_user_error(error, self.schema) from error

    def axes(self, overrides: list[str]) -> dict[str, Any]:
        """Axes of the sweep in the job's files, of overrides with one value.

        Values by name of the field or group, ``sweep.NAME`` for settings, and POINTS.
        """
        register_model(overrides)
        try:
            layers, config = self._config(overrides)
            layers.add_hydra(config)
            return dict(config.hydra.sweeper.get("params") or {})
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
        for typed in overrides_for_hydra(overrides):
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
        config = layers.config(options, {each.key_or_group for each in values})
        ConfigLoaderImpl._apply_overrides_to_config(values, config)
        return layers, config


_parsed_once: dict[str, Any] = {}


@functools.cache
def _layers(_conf: Stamp, config_name: str, schema: type, rest: tuple[str, ...]) -> Layers:
    return Layers(config_name, schema_of(schema), rest)


@functools.cache
def _sets_one_group(_conf: Stamp, override: str) -> bool:
    return bool(files_of_option(override))


@dataclass(frozen=True)
class Composed:
    """A point of a sweep: its overrides, and its job, or the reason why it has none."""

    overrides: list[str]
    job: Any
    reason: str = ""


def require_one_point(overrides: list[str], config_name: str, schema: type, *, can_sweep: bool) -> None:
    """Refuse ``sweep=optuna``, and a sweep in the job's files without a choice of one of its points.

    Raises:
        UserError: naming the sweep, or the open axes.
    """
    if "sweep=optuna" in overrides:
        works = "-m" if can_sweep else "python -m harness.train -m"
        raise UserError(f"sweep=optuna: is for several jobs; would work: {works}")
    chosen = [each for each in overrides if each.startswith(("sweep=", "experiment=", AXES))]
    if not chosen:
        return
    with search_path(overrides, config_name) as overrides, Composer(config_name, schema) as composer:
        axes = composer.axes(in_hydra_syntax(overrides, schema))
    listed = str(axes.pop(POINTS, "")).splitlines()
    keys = {each.lstrip("+").partition("=")[0] for each in overrides}
    is_listed = any(line.split() and set(line.split()) <= set(overrides) for line in listed)
    remaining = [name for name in map(str, axes) if name not in keys and not name.startswith("sweep.")]
    if listed and not is_listed:
        remaining = [POINTS, *remaining]
    if remaining:
        named = " ".join(each for each in chosen if not each.startswith(AXES)) or AXES
        works = "-m, which runs all points" if can_sweep else "the values of one point, without that file"
        raise UserError(f"{named}: has several points ({', '.join(remaining)}); would work: {works}")


def option_values(group: str) -> dict[str, dict[str, Any]]:
    """Values in the files of a group, by option; for groups whose files have no defaults list."""
    from omegaconf import OmegaConf

    files = {option: config_folders().find(f"{group}/{option}") for option in options_of(group)}
    loaded = {option: OmegaConf.load(file) for option, file in files.items() if file is not None}
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
    path = plain.get("model", {}).get("path")
    if path is not None and path != read_from:
        rule = "is read only together with model=from_config"
        raise ConfigError("model.path", path, rule, f"model=from_config model.path={path}")
    job = from_dict(schema, plain)
    # A verb's job may resolve itself in another way.
    own = getattr(job, "resolve", None)
    return (own or partial(resolve, job))(launched_ranks=launched_ranks())


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
