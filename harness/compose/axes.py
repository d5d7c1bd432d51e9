"""Check the axes of a sweep: Hydra's functions such as ``range()`` and ``glob()``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.compose.errors import INTERVAL
from harness.compose.overrides import groups
from harness.util.errors import UserError

WORKS = "values separated by commas, range(START,STOP,STEP), or glob(PATTERN) for options of a group"


def check_axes(parsed: Iterable[Any]) -> None:
    """Refuse axes without points for a grid.

    Args:
        parsed: overrides, parsed by Hydra.

    Raises:
        UserError: naming the axis.
    """
    from hydra.core.override_parser.types import Glob, RangeSweep

    for each in parsed:
        if not each.is_sweep_override():
            continue
        typed, name, value = str(each.input_line).removeprefix("++"), each.key_or_group, each.value()
        if each.is_interval_sweep():
            raise UserError(f"{typed}: {INTERVAL}; would work: {WORKS}")
        if isinstance(value, Glob) and name not in groups():
            rule = f"glob() chooses options of a group, and {name} is a field"
            raise UserError(f"{typed}: {rule}; would work: values separated by commas")
        if isinstance(value, RangeSweep) and value.step == 0:
            raise UserError(f"{typed}: the step of a range must not be 0; would work: {WORKS}")
        if next(each.sweep_iterator(), None) is None:
            raise UserError(f"{typed}: an axis without values; would work: {WORKS}")
