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

from harness.compose.axes import check_axes
from harness.compose.errors import MISSING, to_user_error
from harness.compose.layers import CONFIG_JSON, Layers, files_of_option, plain_node
from harness.compose.overrides import (
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
from harness.compose.schemas import adapt_sweepers, find_launcher, register_model, register_schema, schema_of
from harness.compose.search_path import add_folders, overrides_for_hydra, search_path, sets_search_path
from harness.config.job import Job, from_dict
from harness.config.texts import SecretError
from harness.util.errors import ConfigError, UserError
from harness.util.launcher_env import launched_ranks

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
        find_launcher()
        GlobalHydra.instance().clear()
        self._hydra.enter_context(initialize_config_dir(config_dir=conf_dir(), version_base="1.3"))
        loader = GlobalHydra.instance().config_loader()
        add_folders(loader)
        adapt_sweepers()
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
            return Composed(overrides, None, str(error))

    def config(self, overrides: list[str], *, with_hydra: bool = False) -> Any:
        """Compose a config, before it becomes a job; ``with_hydra`` adds Hydra's own part, key ``hydra``."""
        from hydra import compose

        register_model(overrides)
        try:
            return compose(self.config_name, overrides_for_hydra(overrides), return_hydra_config=with_hydra)
        except Exception as error:
            raise to_user_error(error, self.schema) from error

    def sweep_config(self, overrides: list[str]) -> Any:
        """Compose the config that a sweeper of Hydra gets; fields with several values keep their defaults."""
        from hydra.core.global_hydra import GlobalHydra
        from hydra.types import RunMode

        register_model(overrides)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        try:
            typed = overrides_for_hydra(overrides)
            return hydra.compose_config(self.config_name, typed, RunMode.MULTIRUN, from_shell=False)
        except Exception as error:
            raise to_user_error(error, self.schema) from error

    def sweeper(self, overrides: list[str]) -> Any:
        """Return ``hydra.sweeper`` of a job's files and of overrides with one value."""
        register_model(overrides)
        try:
            layers, config = self._config(overrides)
            layers.add_hydra(config)
            return config.hydra.sweeper
        except Exception as error:
            raise to_user_error(error, self.schema) from error

    def axes(self, overrides: list[str]) -> dict[str, Any]:
        """Axes of the sweep in the job's files: values by name of the field or group, and POINTS."""
        return dict(self.sweeper(overrides).get("params") or {})

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
        config_name: the primary config.
        schema: dataclass of the jobs.
        show: called with the number of composed points and of all points.

    Raises:
        UserError: the overrides are wrong for every point.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    points = []
    with search_path(overrides, config_name) as overrides, Composer(config_name, schema) as composer:
        check_overrides(overrides, schema)
        # The points have the search path as it is written here, and not as the sweeper would.
        searched = [each for each in overrides if sets_search_path(each)]
        typed = in_hydra_syntax([each for each in overrides if each not in searched], schema)

        def read(overrides: list[str]) -> list[Any]:
            parsed: list[Any] = composer.parser.parse_overrides(overrides)
            check_axes(parsed)
            return parsed

        try:
            params = composer.axes(with_one_value(composer, typed))
            listed = _listed_points(params.pop(POINTS, ""), schema)
            axes = [f"{name}={values}" for name, values in params.items()]
            spelled = [
                [*searched, *point]
                for own in listed or [[]]
                for point in BasicSweeper.split_arguments(read([*axes, *own, *typed]), None)[0]
            ]
        except UserError:
            raise
        except Exception as error:
            raise to_user_error(error, schema) from error
        for done, point in enumerate(spelled, start=1):
            points.append(composer.point_of_sweep(point))
            show(done, len(spelled))
    return points


def with_one_value(composer: Composer, typed: list[str]) -> list[str]:
    """Return the overrides that are no axes; without the model's config, which no sweep depends on."""
    try:
        parsed = composer.parser.parse_overrides(typed)
    except Exception as error:
        raise to_user_error(error, composer.schema) from error
    once = [str(each.input_line) for each in parsed if not each.is_sweep_override()]
    return [each for each in once if typed_value([each], "model") != FROM_CONFIG]


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
