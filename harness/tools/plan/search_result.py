"""The result of a search: as text, as plain containers, and as a sweep that measures it."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.tools.plan.config import PLANNER_FIELDS
from harness.tools.plan.evidence import RESOLUTION
from harness.tools.plan.render import (
    as_dict,
    batch_in_words,
    cost_in_words,
    devices,
    figure_columns,
    in_short,
    mesh_of,
    nodes_in_words,
    schedule_of,
)
from harness.tools.plan.search import Candidate, Search
from harness.util.errors import ConfigError
from harness.util.files import write_atomically
from harness.util.tables import Column, Table, columns_of, to_text
from harness.util.words import figure, gib, plural, shortened

# Reasons that are shown one by one; the others are summed.
_SHOWN = 6
_COLUMNS = columns_of("""
    layout    layout
    batch     microbatches  s
    mode      recompute
    schedule  schedule
""")
_SEARCHED = ("parallelism.", "training.local_batch_size", "activation_checkpoint.mode")


def render_search(found: Search) -> str:
    """Format the result of a search, without its sweep file."""
    plan = found.best[0].plan
    job = plan.job
    head = (
        f"{job.name} on {devices(plan)}{nodes_in_words(job)}; {batch_in_words(job)}\n"
        f"{plural(found.points, 'way')} to run {plural(found.layouts, 'layout')}, {len(found.fitting):,} of "
        f"them fully planned, in {found.seconds:.1f} s\n"
    )
    kept = sorted(field for field in found.space.typed if field.startswith(_SEARCHED))
    if kept:
        head += f"kept as typed: {', '.join(kept)}\n"
    columns = [Column("name", ""), *_COLUMNS, *figure_columns("tokens/s per GPU")]
    rows = [{"name": name, **_row(candidate)} for name, candidate in found.shown.items()]
    table = to_text(Table(columns, rows, missing=""), "  ")
    hours = "unknown" if plan.gpu_hours is None else figure(plan.gpu_hours)
    cost = cost_in_words(plan)
    budget = f"{plural(job.steps, 'step')}: {hours} GPU-hours{cost and f'; {cost}'}"
    trust = f"{_distinguished(found)}with the first, {budget}\n"
    return f"{head}\n{table}{trust}\nwhy the others lose\n{_losers(found)}"


def _row(candidate: Candidate) -> dict[str, Any]:
    point = candidate.point
    job = candidate.plan.job
    batch = f"{job.accumulation_steps} x {point.local_batch_size}"
    schedule = ""
    if point.schedule:
        batch = f"{point.local_batch_size // point.microbatch_size} x {point.microbatch_size}"
        schedule = schedule_of(job).partition(" (")[0]
    return {
        "layout": mesh_of(job.parallelism),
        "batch": batch,
        "mode": point.mode,
        "schedule": schedule,
        **in_short(candidate.plan),
    }


def _alike(found: Search) -> int | None:
    """Return how many of the best layouts are too close to the first to rank; None without published rows."""
    if found.error is None:
        return None
    return sum(candidate.seconds <= found.most for candidate in found.best)


def _distinguished(found: Search) -> str:
    alike = _alike(found)
    if alike is None:
        return ""
    which = "all" if alike == len(found.best) else f"the first {alike}"
    claim = f"{which} cannot be distinguished" if alike > 1 else "the first differs from the others"
    text = (
        f"{claim}: the planned ratio of two layouts is off by {found.error:.1%} or less "
        f"in four of five published pairs ({RESOLUTION.pairs} pairs, {RESOLUTION.tables} tables)\n"
    )
    first = found.best[0]
    simplest = found.simplest
    if simplest is first:
        return text
    mode = simplest.point.mode
    plan = simplest.plan
    return (
        f"{text}simplest within the error: {mesh_of(plan.job.parallelism)}, "
        f"{'no' if mode == 'none' else mode} recompute: {gib(plan.peak)} GiB, "
        f"{figure(in_short(plan)['tokens_per_second_per_rank'])} tokens/s per GPU, "
        f"{1 - first.seconds / simplest.seconds:.1%} behind\n"
    )


def _losers(found: Search) -> str:
    shown = found.illegal.most_common(_SHOWN)
    lines = [
        (count, f"illegal: {shortened(str(found.rules[field]), 150)}") for field, count in shown
    ]
    others = found.illegal.total() - sum(count for _, count in shown)
    lines.append((others, "illegal by other rules"))
    if closest := found.closest:
        layout = mesh_of(closest.point.layout(found.space.base.parallelism))
        reason = f"at least {gib(closest.bytes)} GiB too large: {layout}, {closest.point.mode}"
        lines.append((found.too_large, f"do not fit; the closest is {reason}"))
    lines.append((found.slower, "slower, or as fast and less simple"))
    return "".join(f"  {count:>9,}  {reason}\n" for count, reason in lines if count)


def search_as_dict(found: Search) -> dict[str, Any]:
    """The result of a search as plain containers, for JSON."""
    base = found.space.base.parallelism

    def plain(candidate: Candidate) -> dict[str, Any]:
        plan = as_dict(candidate.plan)
        del plan["speed"]["timeline"]
        return {"overrides": candidate.point.overrides(base), "plan": plan}

    closest = found.closest
    return {
        "world_size": found.space.world,
        "layouts": found.layouts,
        "points": found.points,
        "planned": len(found.fitting),
        "seconds": found.seconds,
        "kept": sorted(found.space.typed),
        "alike": _alike(found),
        "best": [plain(candidate) for candidate in found.best],
        "simplest": plain(found.simplest),
        "fastest": {kind: plain(candidate) for kind, candidate in found.fastest.items()},
        "lost": {
            "illegal": dict(found.illegal.most_common()),
            "too_large": found.too_large,
            "closest": closest
            and {"lacks": closest.bytes, "overrides": closest.point.overrides(base)},
            "slower": found.slower,
        },
    }


def sweep_path(name: str, asked: str | None) -> Path:
    """Return the path of the sweep file, in a folder that ``--config-dir`` makes an option of ``sweep``."""
    return Path(asked or f"sweep/{name}-search.yaml")


def commands(found: Search, path: Path, overrides: Sequence[str]) -> str:
    """Write the sweep that measures the shown layouts; return what to type: to start it, and to train one."""
    base = found.space.base.parallelism
    plan = found.best[0].plan
    shown = sorted(found.shown.values(), key=lambda candidate: candidate.order)
    points = [candidate.point.overrides(base) for candidate in shown]
    # Each point sets the searched fields; the same field on the command line would override it.
    of_pipeline = ("pp_schedule", "pp_layers_per_stage", "pp_microbatch_size")
    moved = {override.split("=")[0] for override in points[0]} | PLANNER_FIELDS
    moved |= {f"parallelism.{name}" for name in ("ep", "cp_method", *of_pipeline)}
    job = [override for override in overrides if override.lstrip("+").split("=")[0] not in moved]
    lines = "\n".join(f"        {' '.join(typed)}" for typed in points)
    text = f"""# @package _global_
# What harness plan search=true shows for {devices(plan)}, fastest first, of the job:
# {" ".join(shlex.join(job).split())}
name: {plan.job.name}-search

hydra:
  sweeper:
    params:
      points: |
{lines}
"""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text.encode())
    except OSError as error:
        rule = f"cannot be written: {error.strerror}"
        raise ConfigError("sweep_file", path, rule, "another path") from error
    home = path.parent.parent
    measure = ["harness", "train", "-m", "--config-dir", f"{home}", f"sweep={path.stem}", *job]
    train = ["harness", "train", *job, *found.simplest.point.overrides(base)]
    which = "first" if found.simplest is found.best[0] else "simplest"
    return (
        f"to measure the {len(shown)}: {path}\n  {shlex.join(measure)}\n"
        f"to train the {which}:\n  {shlex.join(train)}\n"
    )
