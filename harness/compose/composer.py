"""Compose a typed, validated job from command-line overrides, and the points of ``-m``.

Overrides are checked against the dataclasses before Hydra is imported, so that every typo gets the
same one-line error. Hydra says which files a job is made of; they and the values on the command
line are merged as plain dictionaries. No code that runs a job imports Hydra or OmegaConf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast

from harness.compose.hydra import (
    Hydra,
    apply_value,
    hydra_of,
    resolve_references,
    search_path,
    special_texts,
)
from harness.compose.hydra_errors import MISSING, user_errors
from harness.compose.length import (
    BATCH,
    WARMUP,
    other_lengths,
    with_fitting_batch,
    with_fitting_warmup,
)
from harness.compose.override import Override, last_text, parse
from harness.compose.overrides import (
    AXES,
    FROM_CONFIG,
    check_setting,
    checked,
    fields_of,
    groups,
    options_of,
)
from harness.compose.paths import config_folders
from harness.compose.resolve import resolve
from harness.config.elsewhere import answer
from harness.config.fields import EXECUTION, LABEL, NO_FIELD, from_dict, without_effect
from harness.config.job import Job
from harness.config.texts import SecretError, masked
from harness.config.types import UNSET, type_hints, with_types
from harness.metrics.console import progress
from harness.train.process import launched_ranks
from harness.util.encoding import flat_items
from harness.util.errors import ConfigError, UserError, as_typed

POINTS = "points"
"""Key in ``hydra.sweeper.params`` for points that are not a product of axes: one per line, as
overrides."""
WEIGHTS = ("generate.checkpoint", "evaluate.checkpoint")
"""Fields with weights that are used: ``model=from_config`` is the model that they record."""


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
        parsed = checked(typed, schema)  # before Hydra is imported
        return Composer(config_name, schema).point(parsed)


def resolved(job: Any) -> Any:
    # A verb's job may resolve itself in another way.
    resolve_job = getattr(job, "resolve", None) or partial(resolve, job)
    return resolve_job(launched_ranks=launched_ranks())


def spelled_out(overrides: Iterable[str], schema: type) -> list[str]:
    """Return overrides without the abbreviations of a verb."""
    spell: Callable[[Iterable[str]], list[str]] = getattr(schema, "spelled_out", list)
    return spell(overrides)


class Composer:
    """Compose many jobs of one primary config, with the folders that are in use at the first one.

    Args:
        config_name: the primary config.
        schema: dataclass of the jobs.
    """

    def __init__(self, config_name: str = "train", schema: type = Job) -> None:
        self.config_name = config_folders().primaries.get(config_name, config_name)
        self.schema = schema

    @cached_property
    def _hydra(self) -> Hydra:
        return hydra_of(config_folders().stamp())

    def job(self, overrides: Iterable[str]) -> Any:
        """Compose one job, like ``compose_job``.

        Raises:
            UserError: one line that names the wrong override, field or value, and what would work.
        """
        return self.point(checked(overrides, self.schema))

    def point(self, overrides: list[Override]) -> Any:
        """Compose one job from checked overrides, all of which have an effect."""
        job = self._point(overrides, fits_batch=True)
        for error in self._idle(job, overrides).values():
            raise error
        return job

    def _point(self, overrides: list[Override], *, fits_batch: bool = False) -> Any:
        config, _, missing = self._merged(
            overrides, resolve=True, left_out=other_lengths(overrides)
        )
        path = config.get("model", {}).get("path")
        if path not in (None, UNSET, self._source_of_model(overrides)[1]):
            rule = "is read only together with model=from_config"
            raise ConfigError("model.path", path, rule, f"model=from_config model.path={path}")
        try:
            job = from_dict(self.schema, config, unset=UNSET)
        except ConfigError as error:
            raise self._with_file(error, overrides) from None
        if missing:
            raise UserError(MISSING.format(", ".join(sorted(missing))))
        if isinstance(job, Job) and last_text(overrides, WARMUP) is None:
            job = with_fitting_warmup(job)
        # Points of a sweep keep one batch, so that they can be compared.
        fits_batch = fits_batch and isinstance(job, Job) and job.fits_batch
        try:
            made = resolved(job)
        except ConfigError as error:
            if error.field != BATCH or not fits_batch or any(self._source(BATCH, overrides)):
                raise
            return with_fitting_batch(job, resolved)
        # A search leaves the batches open.
        is_open = not fits_batch or made.training.local_batch_size is None
        if is_open or not made.empty_in_words or any(self._source(BATCH, overrides)):
            return made
        return with_fitting_batch(job, resolved)

    def point_of_sweep(self, overrides: list[str]) -> Composed:
        """Compose a job like ``point``, or find the reason why it is not valid.

        Values without an effect are left to ``with_effect``.
        """
        parsed = [parse(override) for override in overrides]
        try:
            job = self._point(parsed)
            idle = {source: str(error) for source, error in self._idle(job, parsed).items()}
            return Composed(overrides, job, idle=idle)
        except SecretError:
            raise  # not a skipped point: a sweep writes the reasons of those to disk
        except UserError as error:
            return Composed(overrides, None, masked(str(error)))

    def config(self, overrides: Iterable[str], *, resolve: bool = False) -> dict[str, Any]:
        """Compose a config, before it becomes a job; ``resolve`` replaces ``${...}`` by values."""
        config, _, _ = self._merged([parse(override) for override in overrides], resolve=resolve)
        return config

    def files(self, overrides: Iterable[str]) -> list[Path]:
        """Return the files that a job is made of, in order; later ones win."""
        with user_errors():
            files, _ = self._split([parse(override) for override in overrides])
            found = [config_folders().find(name) for name, _ in self._hydra.layers(*files)]
        return [path for path in found if path is not None]

    def parsed(self, overrides: Iterable[str]) -> list[Any]:
        """Parse overrides; Hydra's objects say their keys, values and axes."""
        with user_errors():
            return [self._hydra.parse(parse(override), self.schema) for override in overrides]

    def axes(self, overrides: Iterable[Override]) -> dict[str, Any]:
        """Axes of the sweep in the job's files, which axes on the command line do not choose.

        Values by name of the field or group, ``sweep.NAME`` for settings, and POINTS.
        """
        with user_errors():
            fixed = [
                override
                for override in overrides
                if not self._hydra.parse(override, self.schema).is_sweep_override()
                # No sweep depends on the model's config.
                and not (override.key == "model" and override.text == FROM_CONFIG)
            ]
        _, settings, _ = self._merged(fixed)
        axes = (settings.get("sweeper") or {}).get("params") or {}
        if not isinstance(axes, dict) or not isinstance(axes.get(POINTS, ""), str):
            raise UserError(
                f"{AXES}={as_typed(axes)}: must be a mapping of axes, and {POINTS} in it a text"
            )
        return dict(axes)

    def _merged(
        self, overrides: list[Override], *, resolve: bool = False, left_out: Iterable[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
        """Return a new config, its settings of Hydra, and the fields that must be given.

        Values that files give the fields ``left_out`` do not count.
        """
        with user_errors([f"{each.key}/{each.text}" for each in overrides]):
            files, values = self._split(overrides)
            config = self._hydra.composed(*files)
            settings = config.pop("hydra", None) or {}
            for key, value in flat_items({"hydra": settings}):
                shown = f"{key}={as_typed(value)} (in a file of the job)"
                check_setting(key, as_typed(value), shown)
            for name in left_out:
                part, _, field = name.partition(".")
                config[part][field] = None
            in_file = {"hydra": settings}
            for parsed in values:
                apply_value(in_file if parsed.is_hydra_override() else config, parsed)
            changed = {value.key_or_group.partition(".")[0] for value in values}
            texts = list(special_texts(config))
            missing = [name for values, key, name in texts if values[key] == UNSET]
            if resolve:
                changed |= {name.partition(".")[0] for _, _, name in texts}
                config = resolve_references(config, texts)
        for name in changed & config.keys():
            config[name] = with_types(config[name], type_hints(self.schema).get(name, Any))
        return config, in_file["hydra"], missing

    def _split(self, overrides: list[Override]) -> tuple[Any, list[Any]]:
        """Return the arguments of ``Hydra.layers``, and the parsed overrides that set values."""
        chosen: dict[str, str] = {}
        others = []
        values = []
        for override in overrides:
            parsed = self._hydra.parse(override, self.schema)
            if parsed.is_sweep_override():
                rule = RANGE if parsed.is_interval_sweep() else SWEPT
                raise UserError(f"{override.source}: {rule}")
            key = parsed.get_key_element()
            group = parsed.key_or_group
            if override.sets_search_path:
                continue
            if parsed.package is None and (
                group not in groups() or isinstance(parsed.value(), dict)
            ):
                values.append(parsed)
            elif parsed.package is not None and not parsed.is_add() and not parsed.is_delete():
                others.append(f"+{parsed.input_line}")
            elif group in fields_of(self.schema) and key == group:
                chosen[group] = f"{group}={parsed.value()}"  # the last one wins
            else:
                others.append(str(parsed.input_line))
        choices = (*chosen.values(), *others)
        return (self.config_name, choices, self.schema, partial(self._model, overrides)), values

    def _idle(self, job: Any, overrides: list[Override]) -> dict[str, UserError]:
        """Errors of a job's values that have no effect, by the override or file that gives each.

        A group's option may have them: it is made for many jobs. So may an experiment, if an
        override turns the switch off, or for options of a layout, which points of its sweep can
        use.
        """
        idle: dict[str, UserError] = {}
        keys = [self._hydra.parse(override, self.schema).key_or_group for override in overrides]
        for role, switch, error in without_effect(job):
            of_layout = role != LABEL or switch.startswith("parallelism.")
            if of_layout and getattr(job, "varies", False):
                continue
            source, is_typed = self._source(error.field, overrides)
            is_decided = any(f"{switch}.".startswith(f"{key}.") for key in keys)
            of_experiment = source.startswith("experiment/") and role != EXECUTION
            if is_typed or (of_experiment and not is_decided):
                idle.setdefault(source, self._with_file(error, overrides))
        return idle

    def _source(self, field: str, overrides: list[Override]) -> tuple[str, bool]:
        """The override or file that gives a value, empty for a default; and whether it is typed."""
        files, values = self._split(overrides)
        for value in reversed(values):
            key = value.key_or_group
            if f"{field}.".startswith(f"{key}.") or key.startswith(f"{field}."):
                return str(value.input_line), True
        source = ""
        content: Any
        for name, content in self._hydra.layers(*files):
            for part in field.split("."):
                content = content.get(part, MISSING) if isinstance(content, dict) else MISSING
            if content is not MISSING and name not in ("train", "job_schema"):
                source = name
        return source, False

    def _with_file(self, error: ConfigError, overrides: list[Override]) -> UserError:
        """Add the file with the wrong value to an error, unless it is typed or a default."""
        source, is_typed = self._source(error.field, overrides)
        place = ""
        if source and not is_typed:
            if error.field in ("experiment", "sweep"):
                return UserError(f"In '{source}': the file must begin with '# @package _global_'")
            place = f" (in {source}.yaml)"
        if error.rule.startswith(NO_FIELD):
            rule = answer(error.field, as_typed(error.value), self.schema) or error.rule
            return UserError(f"{error.field}: {rule}{place}")
        return ConfigError(error.field, error.value, f"{error.rule}{place}", error.works)

    def _source_of_model(self, overrides: list[Override]) -> tuple[str, str | None]:
        """The field and the path that ``model=from_config`` reads; no path without that option."""
        if last_text(overrides, "model") == FROM_CONFIG:
            # A conversion reads the config.json of its source.
            for field in (*WEIGHTS, "model.path", "convert.source"):
                if path := last_text(overrides, field):
                    return field, path
        return "model.path", None

    def _model(self, overrides: list[Override]) -> dict[str, Any]:
        from harness.weights.config_json import model_node
        from harness.weights.detect import recorded_model

        field, path = self._source_of_model(overrides)
        if path is None:
            works = "model=from_config model.path=FOLDER, which holds a config.json"
            raise UserError(
                f"model.path: must be given with model=from_config; would work: {works}"
            )
        return recorded_model(path, field) if field in WEIGHTS else model_node(path)


SWEPT = (
    "has several values; would work: -m to run one job for each, [...] around a list, quotes around one "
    "text with commas"
)
RANGE = "is a range to choose from; would work: -m sweep=optuna, or one value"


@dataclass(frozen=True)
class Composed:
    """A point of a sweep: its overrides, and its job, or the reason why it has none.

    Attributes:
        idle: errors of values that have no effect in the job, by their overrides.
    """

    overrides: list[str]
    job: Any
    reason: str = ""
    idle: dict[str, str] = field(default_factory=dict)


def with_effect(points: list[Composed]) -> list[Composed]:
    """Refuse the points with a value that has no effect in any of them.

    So an option of one layout may be typed for a sweep over layouts.
    """
    used: set[str] = set()
    for point in points:
        if point.job:
            used |= set(point.overrides) - point.idle.keys()
    checked = []
    for point in points:
        reasons = [reason for typed, reason in point.idle.items() if typed not in used]
        checked.append(Composed(point.overrides, None, masked(reasons[0])) if reasons else point)
    return checked


def require_one_point(composer: Composer, overrides: list[str], *, can_sweep: bool) -> None:
    """Refuse ``sweep=optuna``, and a sweep in the job's files without a choice of one of its points."""
    if "sweep=optuna" in overrides:
        works = "-m" if can_sweep else "harness train -m"
        raise UserError(f"sweep=optuna: is for several jobs; would work: {works}")
    files = [override for override in overrides if override.startswith(("sweep=", "experiment="))]
    if not files and not any(override.startswith(AXES) for override in overrides):
        return
    axes = composer.axes([parse(override) for override in overrides])
    listed = str(axes.pop(POINTS, "")).splitlines()
    keys = {parse(override).key for override in overrides}
    is_listed = any(line.split() and set(line.split()) <= set(overrides) for line in listed)
    remaining = [
        name for name in map(str, axes) if name not in keys and not name.startswith("sweep.")
    ]
    if listed and not is_listed:
        remaining = [POINTS, *remaining]
    if remaining:
        named = " ".join(files) or AXES
        works = (
            "-m, which runs all points"
            if can_sweep
            else "the values of one point, without that file"
        )
        raise UserError(
            f"{named}: has several points ({', '.join(remaining)}); would work: {works}"
        )


def option_values(group: str) -> dict[str, dict[str, Any]]:
    """Values in the files of a group, by option; for groups whose files have no defaults list."""
    from omegaconf import OmegaConf

    files = {option: config_folders().find(f"{group}/{option}") for option in options_of(group)}
    values = {}
    for option, file in files.items():
        if file is not None:
            values[option] = cast("dict[str, Any]", OmegaConf.to_container(OmegaConf.load(file)))
    return values


SETTINGS = "sweep."
"""Prefix of the settings of a sweep whose points are chosen by their results, such as
``sweep.n_trials``."""


def chooses_points(composer: Composer, overrides: Sequence[str]) -> bool:
    """Whether points are chosen by their results, as with ``sweep=optuna``: a ``sweep.NAME`` is given."""
    if any(override.startswith(SETTINGS) for override in overrides):
        return True
    params = composer.axes(checked(overrides, composer.schema))
    return any(name.startswith(SETTINGS) for name in params)


@dataclass(frozen=True)
class SweepSpace:
    """Axes of which points are chosen.

    Attributes:
        settings: values of ``sweep.NAME``, by NAME.
        axes: parsed by Hydra, by name of the field or group.
        fixed: overrides of all points.
    """

    settings: dict[str, Any]
    axes: dict[str, Any]
    fixed: list[str]


def read_space(composer: Composer, overrides: Iterable[str]) -> SweepSpace:
    """Read the axes and settings of a command line and of the files that it names.

    Raises:
        UserError: an override is wrong, or the points are listed.
    """
    overrides = list(overrides)
    typed = [override for override in overrides if not override.startswith(SETTINGS)]
    params = composer.axes(checked(typed, composer.schema))
    if POINTS in params:
        rule = "is a list of points, so there is nothing to choose"
        raise UserError(f"{AXES}.{POINTS}: {rule}; would work: a sweep without {SETTINGS}NAME")
    in_files = [f"{name}={'null' if value is None else value}" for name, value in params.items()]
    given = [override for override in overrides if override.startswith(SETTINGS)]
    space = SweepSpace({}, {}, [])
    settings: dict[str, Any] = {"sweep": {}}
    for parsed in composer.parsed([*in_files, *typed, *given]):
        name = parsed.get_key_element()
        if name.startswith(SETTINGS) and parsed.is_sweep_override():
            raise UserError(
                f"{parsed.input_line}: a setting of the sweep has one value, or a list in [ ]"
            )
        if name.startswith(SETTINGS):
            apply_value(settings, parsed)
        elif parsed.is_sweep_override():
            space.axes[name] = parsed
        elif str(parsed.input_line) != "sweep=optuna":
            space.axes.pop(name, None)
            space.fixed.append(str(parsed.input_line))
    with user_errors():
        space.settings.update(resolve_references(settings, list(special_texts(settings)))["sweep"])
    return space


def compose_points(
    overrides: Iterable[str],
    *,
    config_name: str = "train",
    schema: type = Job,
) -> list[Composed]:
    """Compose every point of a multirun, in the order of Hydra's own sweeper.

    Args:
        overrides: as typed; comma-separated values of one field are an axis.
        config_name: the primary config.
        schema: dataclass of the jobs.

    Raises:
        UserError: the overrides are wrong for every point.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper

    points = []
    with search_path(overrides, config_name) as overrides:
        parsed = checked(overrides, schema)
        composer = Composer(config_name, schema)
        # The points have the search path as it is written here, and not as the sweeper would.
        searched = [override.source for override in parsed if override.sets_search_path]
        typed = [override for override in parsed if not override.sets_search_path]
        sources = [override.source for override in typed]
        params = composer.axes(typed)
        listed = []
        for line in params.pop(POINTS, "").splitlines():
            if line.strip() and not line.strip().startswith("#"):
                listed.append(line.split())
                checked(line.split(), schema)
        axes = [f"{name}={values}" for name, values in params.items()]
        spelled = []
        with user_errors():
            for values_of_point in listed or [[]]:
                values = composer.parsed([*axes, *values_of_point, *sources])
                check_axes(values)
                # There is no limit to a batch.
                [combinations] = BasicSweeper.split_arguments(values, None)
                spelled += [[*searched, *combination] for combination in combinations]
        with progress(len(spelled), seconds=10.0) as show:
            for point in spelled:
                show("composing")
                points.append(composer.point_of_sweep(point))
    return with_effect(points)


WORKS = (
    "values separated by commas, range(START,STOP,STEP), glob(PATTERN) for options of a group, or "
    "sweep=optuna, which takes interval()"
)


def check_axes(parsed: Iterable[Any]) -> None:
    """Refuse axes without points for a grid."""
    from hydra.core.override_parser.types import RangeSweep

    for axis in parsed:
        if not axis.is_sweep_override():
            continue
        value = axis.value()
        is_endless = isinstance(value, RangeSweep) and value.step == 0
        if axis.is_interval_sweep() or is_endless or next(axis.sweep_iterator(), None) is None:
            raise UserError(f"{axis.input_line}: a grid needs points; would work: {WORKS}")
