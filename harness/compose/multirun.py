"""The points of ``-m``: of a grid, or the axes of which Optuna chooses points by their results."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from harness.compose.composer import POINTS, Composed, Composer
from harness.compose.hydra import (
    apply_value,
    resolve_references,
    search_path,
    sets_search_path,
    special_texts,
)
from harness.compose.overrides import (
    AXES,
    FROM_CONFIG,
    INTERVAL,
    check_overrides,
    groups,
    to_user_error,
    typed_value,
)
from harness.config.job import Job
from harness.util.errors import UserError

SETTINGS = "sweep."
"""Prefix of the settings of a sweep whose points are chosen by their results, such as ``sweep.n_trials``."""


def chooses_points(overrides: Iterable[str], *, config_name: str = "train", schema: type = Job) -> bool:
    """Whether points are chosen by their results, as with ``sweep=optuna``: a ``sweep.NAME`` is given."""
    overrides = list(overrides)
    if any(each.startswith(SETTINGS) for each in overrides):
        return True
    with search_path(overrides, config_name) as overrides:
        check_overrides(overrides, schema)
        composer = Composer(config_name, schema)
        params = composer.axes(with_one_value(composer, overrides))
    return any(name.startswith(SETTINGS) for name in params)


@dataclass(frozen=True)
class Space:
    """Axes of which points are chosen.

    Attributes:
        settings: values of ``sweep.NAME``, by NAME.
        axes: parsed by Hydra, by name of the field or group.
        fixed: overrides of all points.
    """

    settings: dict[str, Any]
    axes: dict[str, Any]
    fixed: list[str]


def read_space(composer: Composer, overrides: Iterable[str]) -> Space:
    """Read the axes and settings of a command line and of the files that it names.

    Raises:
        UserError: an override is wrong, or the points are listed.
    """
    overrides = list(overrides)
    typed = [each for each in overrides if not each.startswith(SETTINGS)]
    check_overrides(typed, composer.schema)
    params = composer.axes(with_one_value(composer, typed))
    if POINTS in params:
        rule = "is a list of points, so there is nothing to choose"
        raise UserError(f"{AXES}.{POINTS}: {rule}; would work: a sweep without {SETTINGS}NAME")
    in_files = [f"{name}={'null' if value is None else value}" for name, value in params.items()]
    given = [each for each in overrides if each.startswith(SETTINGS)]
    space = Space({}, {}, [])
    settings: dict[str, Any] = {"sweep": {}}
    for each in composer.parsed([*in_files, *typed, *given]):
        name = each.get_key_element()
        if name.startswith(SETTINGS) and each.is_sweep_override():
            raise UserError(f"{each.input_line}: a setting of the sweep has one value, or a list in [ ]")
        if name.startswith(SETTINGS):
            apply_value(settings, each)
        elif each.is_sweep_override():
            space.axes[name] = each
        elif str(each.input_line) != "sweep=optuna":
            space.axes.pop(name, None)
            space.fixed.append(str(each.input_line))
    try:
        space.settings.update(resolve_references(settings, list(special_texts(settings)))["sweep"])
    except Exception as error:
        raise to_user_error(error) from error
    return space


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
    with search_path(overrides, config_name) as overrides:
        check_overrides(overrides, schema)
        composer = Composer(config_name, schema)
        # The points have the search path as it is written here, and not as the sweeper would.
        searched = [each for each in overrides if sets_search_path(each)]
        typed = [each for each in overrides if each not in searched]

        def read(overrides: list[str]) -> list[Any]:
            parsed: list[Any] = composer.parsed(overrides)
            check_axes(parsed)
            return parsed

        params = composer.axes(with_one_value(composer, typed))
        listed = _listed_points(params.pop(POINTS, ""), schema)
        axes = [f"{name}={values}" for name, values in params.items()]
        try:
            spelled = [
                [*searched, *point]
                for own in listed or [[]]
                for point in BasicSweeper.split_arguments(read([*axes, *own, *typed]), None)[0]
            ]
        except UserError:
            raise
        except Exception as error:
            raise to_user_error(error) from error
        for done, point in enumerate(spelled, start=1):
            points.append(composer.point_of_sweep(point))
            show(done, len(spelled))
    return points


def with_one_value(composer: Composer, typed: list[str]) -> list[str]:
    """Return the overrides that are no axes; without the model's config, which no sweep depends on."""
    once = [str(each.input_line) for each in composer.parsed(typed) if not each.is_sweep_override()]
    return [each for each in once if typed_value([each], "model") != FROM_CONFIG]


def _listed_points(text: str, schema: type) -> list[list[str]]:
    lines = [line.split() for line in text.splitlines() if line.strip() and not line.strip().startswith("#")]
    for line in lines:
        check_overrides(line, schema)
    return lines


WORKS = "values separated by commas, range(START,STOP,STEP), or glob(PATTERN) for options of a group"


def check_axes(parsed: Iterable[Any]) -> None:
    """Refuse axes without points for a grid."""
    from hydra.core.override_parser.types import Glob, RangeSweep

    for each in parsed:
        if not each.is_sweep_override():
            continue
        typed, name, value = str(each.input_line), each.key_or_group, each.value()
        if each.is_interval_sweep():
            raise UserError(f"{typed}: {INTERVAL}; would work: {WORKS}")
        if isinstance(value, Glob) and name not in groups():
            rule = f"glob() chooses options of a group, and {name} is a field"
            raise UserError(f"{typed}: {rule}; would work: values separated by commas")
        if isinstance(value, RangeSweep) and value.step == 0:
            raise UserError(f"{typed}: the step of a range must not be 0; would work: {WORKS}")
        if next(each.sweep_iterator(), None) is None:
            raise UserError(f"{typed}: an axis without values; would work: {WORKS}")
