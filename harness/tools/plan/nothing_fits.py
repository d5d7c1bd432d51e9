"""What to do if no layout of a search fits: more ranks, or other options for the closest layout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from harness.compose.overrides import OVERRIDE
from harness.compose.verb import Result
from harness.config.fields import with_value
from harness.config.job import Job
from harness.tools.plan.config import PlanJob
from harness.tools.plan.constants import Calibration
from harness.tools.plan.make import make_plan, planned
from harness.tools.plan.remedies import (
    LEAST_CONTEXT,
    Change,
    Remedy,
    grown,
    kinds_not_searched,
    remedies,
    remedies_as_dict,
    with_headroom,
)
from harness.tools.plan.render import mesh_of
from harness.tools.plan.search import Candidate, NothingFits, search
from harness.tools.plan.space import Space
from harness.util.errors import ConfigError, UserError
from harness.util.tables import figure, gib

FACTORS = (2, 4, 8, 16, 32, 64)
"""By how much the number of ranks is multiplied, until a layout fits."""
LEAST_MEMORY = {
    "activation_checkpoint.mode": "full",
    "parallelism.pp_schedule": "1F1B",
    "parallelism.pp_layers_per_stage": None,
    "parallelism.pp_microbatch_size": 1,
}
"""Values of searched fields that take little memory. With them a search has a hundredth of the points."""
OPTIONS = {field.name for field in fields(PlanJob)} - {field.name for field in fields(Job)} - {"calibration"}
"""Fields of a search that are no fields of a job."""


@dataclass(frozen=True)
class MoreRanks:
    """The largest number of ranks that was tried."""

    ranks: int
    overrides: Change
    """Overrides for that number."""
    best: Candidate | None
    """The fastest layout of those with the least memory; None if even these do not fit."""


def what_would_fit(failed: NothingFits, job: PlanJob, overrides: Sequence[str]) -> Result:
    """Return a failed search as a result, with an error that says what would work.

    Args:
        failed: the error of the search.
        job: the job of the search.
        overrides: the overrides that compose it.
    """
    _, calibration = planned(job)
    space, layout = failed.space, failed.closest.overrides(failed.space.base.parallelism)
    typed = [each for each in overrides if (match := OVERRIDE.match(each)) and match["key"] not in OPTIONS]
    closest = with_headroom(make_plan(failed.closest.job(space.base), calibration), job.headroom)
    changed = remedies(closest, [*typed, *layout], kinds_not_searched, job.headroom)
    more = more_ranks(space, calibration, job.headroom)
    works = [*_in_words(more), *(_changed(each) for each in changed if each.plan.fits)]
    would_work = f"; would work: {', or '.join(works)}" if works else ""
    data = {
        "world_size": space.world,
        "best": [],
        "too_large": failed.rejected.too_large,
        "illegal": dict(failed.rejected.illegal.most_common()),
        "closest": {"overrides": layout, "memory_peak": closest.peak, "memory_limit": closest.memory_limit},
        "remedies": remedies_as_dict(changed),
        "more_ranks": _as_dict(more, space),
    }
    return Result(data, error=UserError(f"{failed}{_too_few(more, space)}{would_work}"))


def more_ranks(space: Space, calibration: Calibration | None, headroom: float) -> MoreRanks:
    """Search for layouts of 2, 4, 8, ... times as many ranks, until one fits."""
    base, typed = space.base, space.typed
    fixed = {name: value for name, value in LEAST_MEMORY.items() if name not in typed}
    if base.training.seq_len < 2 * LEAST_CONTEXT and "parallelism.cp" not in typed:
        fixed["parallelism.cp"] = 1
    for name, value in fixed.items():
        base = with_value(base, name, value)
    tried = MoreRanks(space.world, (), None)
    for factor in FACTORS:
        change = grown(space.base.cluster, space.world, factor)
        if change is None:
            break
        larger = base
        for override in change:
            name, _, value = override.partition("=")
            larger = with_value(larger, name, int(value))
        world = space.world * factor
        try:
            wider = Space(larger, world, space.typed | set(fixed))
            return MoreRanks(world, change, search(wider, 1, calibration, headroom).best[0])
        except ConfigError:
            break  # the network between nodes is unknown
        except UserError:
            tried = MoreRanks(world, change, None)  # no layout fits, or is legal
    return tried


def _in_words(more: MoreRanks) -> list[str]:
    """What a larger number of ranks gives; nothing if it does not do."""
    if more.best is None:
        return []
    plan, point = more.best.plan, more.best.point
    assert plan.speed is not None
    rate, unit = figure(plan.speed.tokens_per_second_per_rank), "GPU" if plan.accelerator else "rank"
    return [
        f"{' '.join(more.overrides)} ({more.ranks} ranks: {mesh_of(plan.job.parallelism)}, {point.mode}, "
        f"{gib(plan.peak)} GiB, {rate} tokens/s a {unit})"
    ]


def _changed(remedy: Remedy) -> str:
    """A change of the closest layout that makes it fit."""
    numbers = ", changes the numbers" if remedy.changes_numbers else ""
    return f"{remedy.typed} (the closest layout then takes {gib(remedy.plan.peak)} GiB{numbers})"


def _too_few(more: MoreRanks, space: Space) -> str:
    return (
        f"; up to {more.ranks:,} ranks are too few" if more.best is None and more.ranks > space.world else ""
    )


def _as_dict(more: MoreRanks, space: Space) -> dict[str, Any]:
    """The larger number of ranks as plain containers."""
    best = more.best
    return {
        "tried": more.ranks,
        "overrides": list(more.overrides),
        "fits": best is not None,
        "layout": None if best is None else best.point.overrides(space.base.parallelism),
        "memory_peak": None if best is None else best.plan.peak,
        "step_seconds": None if best is None else best.seconds,
    }
