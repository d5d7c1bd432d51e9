"""One table of the plans of several points: ``harness plan -m parallelism.tp=1,2,4``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.compose.composer import Composed
from harness.compose.scale import count
from harness.compose.verb import Result
from harness.tools.plan.make import make_plan, planned
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import mesh_of, tokens_of
from harness.util.errors import ConfigError, UserError
from harness.util.hardware import POWER_SHARE
from harness.util.tables import aligned, counted, dollars, figure, gib, seconds, shortened, summed

REASON_CHARS = 120
ONE_PLAN = ("search", "rehearse", "calibrate", "picture", "against")
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
    budgets = [None if plan is None else _budget(plan) for plan in plans]
    shown = len({(each["parameters"], each["tokens"]) for each in budgets if each is not None}) > 1
    has_price = any(each is not None and each["dollars"] is not None for each in budgets)
    unit = "rank" if any(plan is not None and plan.accelerator is None for plan in plans) else "GPU"
    rows = [
        _row(name, point, plan)
        | (_sizes(budget) if shown else {})
        | (_price(budget, f"{unit}-hours") if shown or has_price else {})
        for name, point, plan, budget in zip(names, points, plans, budgets, strict=True)
    ]
    data = [
        _values(point, plan) | (budget or {})
        for point, plan, budget in zip(points, plans, budgets, strict=True)
    ]
    total = _total([each for each in budgets if each is not None])
    text = aligned(rows, {"point", "layout", "fits"}, indent="")
    return Result(
        {"points": data, "total": total}, text + (_total_in_words(total, plans, unit) if shown else "")
    )


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


def _budget(plan: Plan) -> dict[str, Any]:
    """Return what all steps of a job cost; unknown hours are None."""
    tokens = tokens_of(plan.job)
    return {
        "parameters": plan.accounting.parameters,
        "non_embedding_parameters": count(plan.job.model, "non_embedding"),
        "tokens": tokens,
        "flops": plan.accounting.flops_per_token_full * tokens,
        "gpu_hours": plan.gpu_hours,
        "dollars": plan.dollars,
        "kwh": plan.kwh,
    }


def _sizes(budget: dict[str, Any] | None) -> dict[str, str]:
    if budget is None:
        return dict.fromkeys(("parameters", "non-emb.", "tokens", "FLOPs"), "")
    return {
        "parameters": counted(budget["parameters"]),
        "non-emb.": counted(budget["non_embedding_parameters"]),
        "tokens": counted(budget["tokens"]),
        "FLOPs": f"{budget['flops']:.3g}",
    }


def _price(budget: dict[str, Any] | None, hours: str) -> dict[str, str]:
    """Cost of all steps; unknown values are empty."""
    known = budget or {}
    columns = {hours: ("gpu_hours", figure), "price": ("dollars", dollars), "kWh": ("kwh", figure)}
    values = {column: (known.get(name), as_text) for column, (name, as_text) in columns.items()}
    return {column: "" if value is None else as_text(value) for column, (value, as_text) in values.items()}


def _total(budgets: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Add up the budgets of all legal points; a sum with an unknown value is None."""
    return {
        "points": len(budgets),
        "tokens": sum(each["tokens"] for each in budgets),
        "flops": sum(each["flops"] for each in budgets),
        **{name: summed(each[name] for each in budgets) for name in ("gpu_hours", "dollars", "kwh")},
    }


def _total_in_words(total: dict[str, Any], plans: Sequence[Plan | None], unit: str) -> str:
    """Return the cost of all points, and how the FLOPs compare with 6 N D."""
    made = [plan for plan in plans if plan is not None]
    hours = "hours unknown" if total["gpu_hours"] is None else f"{figure(total['gpu_hours'])} {unit}-hours"
    if total["dollars"] is not None:
        hours += f", {dollars(total['dollars'])}"
    if total["kwh"] is not None:
        pue = " x PUE" if any(plan.job.cluster.pue is not None for plan in made) else ""
        hours += f", {figure(total['kwh'])} kWh of the GPUs alone ({POWER_SHARE:.0%} of their power{pue})"
    ratios = [6 * count(plan.job.model, "active") / plan.accounting.flops_per_token_full for plan in made]
    return (
        f"all {total['points']}: {counted(total['tokens'])} tokens, {total['flops']:.3g} FLOPs, {hours}\n"
        "FLOPs: those of MFU, with full attention; 6 x non-embedding parameters x tokens is "
        f"{min(ratios):.0%} to {max(ratios):.0%} of them\n"
    )


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
