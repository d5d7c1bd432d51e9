"""One table of the plans of several points: ``python -m harness.plan -m parallelism.tp=1,2,4``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.app import Result
from harness.compose import Composed
from harness.errors import ConfigError, UserError
from harness.plan.make import make_plan, planned
from harness.plan.plan import Plan
from harness.plan.render import mesh_of
from harness.tables import aligned, figure, gib, seconds, shortened

REASON_CHARS = 120
ONE_PLAN = ("search", "verify", "rehearse", "calibrate", "picture")
"""Fields that ask for more than a plan."""


def compare(points: list[Composed]) -> Result:
    """Plan the points of a multirun; points that break a rule have it in the place of values.

    Raises:
        UserError: no point is legal.
        ConfigError: a field asks for more than a plan.
    """
    legal = [point.job for point in points if point.job is not None]
    if not legal:
        raise UserError(points[0].reason)
    for name in ONE_PLAN:
        if value := getattr(legal[0], name):
            raise ConfigError(name, value, "works on one job, and -m has several", f"{name} without -m")
    names = _varying([point.overrides for point in points])
    plans = [None if point.job is None else make_plan(*planned(point.job)) for point in points]
    rows = [_row(name, point, plan) for name, point, plan in zip(names, points, plans, strict=True)]
    data = [_values(point, plan) for point, plan in zip(points, plans, strict=True)]
    return Result({"points": data}, aligned(rows, {"point", "layout", "fits"}, indent=""))


def _varying(overrides: Sequence[Sequence[str]]) -> list[str]:
    """Return the overrides of each point that other points do not have."""
    common = set.intersection(*map(set, overrides))
    return [" ".join(each for each in own if each not in common) or "-" for own in overrides]


def _row(name: str, point: Composed, plan: Plan | None) -> dict[str, str]:
    if plan is None:
        empty = dict.fromkeys(("layout", "GiB", "step", "tokens/s each", "MFU"), "")
        return {"point": name, **empty, "fits": f"illegal: {shortened(point.reason, REASON_CHARS)}"}
    speed = plan.speed
    fits = {None: "unknown", True: "yes", False: "NO"}[plan.fits]
    return {
        "point": name,
        "layout": mesh_of(plan.job.parallelism),
        "GiB": gib(plan.peak),
        "step": "" if speed is None else seconds(speed.step_seconds),
        "tokens/s each": "" if speed is None else figure(speed.tokens_per_second_per_rank),
        "MFU": "" if speed is None or speed.mfu is None else f"{speed.mfu:.1%}",
        "fits": fits,
    }


def _values(point: Composed, plan: Plan | None) -> dict[str, Any]:
    if plan is None:
        return {"overrides": point.overrides, "legal": False, "reason": point.reason}
    speed = plan.speed
    return {
        "overrides": point.overrides,
        "legal": True,
        "fits": plan.fits,
        "memory_peak": plan.peak,
        "step_seconds": None if speed is None else speed.step_seconds,
        "tokens_per_second_per_rank": None if speed is None else speed.tokens_per_second_per_rank,
        "mfu": None if speed is None else speed.mfu,
    }
