"""Decide what ``-m`` runs: a grid, or points that a sweeper of Hydra chooses by their results."""

from __future__ import annotations

from collections.abc import Iterable

from harness.compose.composer import POINTS, Composer, with_one_value
from harness.compose.hydra_settings import settings_of_sweeper
from harness.compose.overrides import AXES, check_overrides, in_hydra_syntax
from harness.compose.search_path import search_path
from harness.config.job import Job
from harness.util.errors import UserError

GRID = "hydra._internal.core_plugins.basic_sweeper.BasicSweeper"
"""Hydra's default sweeper, whose points ``compose_points`` makes: all combinations of values."""


def chooses_points(overrides: Iterable[str], *, config_name: str = "train", schema: type = Job) -> bool:
    """Whether a sweeper of Hydra chooses the points by their results, such as ``hydra/sweeper=optuna``.

    Raises:
        UserError: the overrides are wrong for every point, or set what has no effect on a grid.
    """
    with search_path(overrides, config_name) as overrides, Composer(config_name, schema) as composer:
        check_overrides(overrides, schema)
        typed = in_hydra_syntax(overrides, schema)
        values = [each for each in settings_of_sweeper(typed) if not each.startswith("hydra/sweeper=")]
        # Without settings that only another sweeper or launcher has.
        once = with_one_value(composer, [each for each in typed if each not in values])
        sweeper = composer.sweeper(once)
    if sweeper.get("_target_") != GRID:
        return True
    if values := [each for each in values if "/" not in each.partition("=")[0]]:
        rule = "is for a sweeper that chooses points by their results"
        raise UserError(f"{values[0]}: {rule}; would work: hydra/sweeper=optuna")
    return False


def require_one_point(overrides: list[str], config_name: str, schema: type, *, can_sweep: bool) -> None:
    """Refuse settings of sweepers, and a sweep in the job's files without a choice of one of its points.

    Raises:
        UserError: naming the setting, or the open axes.
    """
    if of_sweeper := settings_of_sweeper(overrides):
        works = "-m" if can_sweep else "python -m harness.train -m"
        raise UserError(f"{of_sweeper[0]}: is for several jobs; would work: {works}")
    chosen = [each for each in overrides if each.startswith(("sweep=", "experiment=", AXES))]
    if not chosen:
        return
    with search_path(overrides, config_name) as overrides, Composer(config_name, schema) as composer:
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
