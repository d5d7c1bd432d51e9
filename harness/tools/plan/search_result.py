"""The result of a search: as text, as plain containers, and as a sweep that measures it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.compose.paths import conf_dir, config_folders
from harness.tools.plan.cost import budget_in_words
from harness.tools.plan.evidence_table import RESOLUTION
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import as_dict, devices, mesh_of, part_name, schedule_of, tokens_per_step
from harness.tools.plan.search import Candidate, Rejected, SearchResult
from harness.tools.plan.space import Point
from harness.util import PACKAGE
from harness.util.errors import ConfigError
from harness.util.files import write_atomically
from harness.util.tables import aligned, counted, figure, gib, seconds, shortened

# Reasons that are shown one by one; the others are summed.
_SHOWN = 6
# Fields of PlanJob that a training job does not have.
_PLANNER_FIELDS = (
    "search",
    "top",
    "headroom",
    "sweep_file",
    "calibrate",
    "calibration",
    "picture",
)


def render_found(found: SearchResult) -> str:
    """Format the result of a search, without its sweep file."""
    plan = found.best[0].plan
    job = plan.job
    unit = "GPU" if plan.accelerator is not None else "rank"
    nodes, per_node = job.cluster.nodes_for(job.world_size)
    where = f", {nodes} nodes of {per_node}" if nodes > 1 else ""
    head = (
        f"{job.name} on {devices(plan, job.world_size)}{where}; {job.global_batch_size:,} x "
        f"{job.training.seq_len:,} = {counted(tokens_per_step(job))} tokens a step\n"
        f"{found.points:,} ways to run {found.layouts:,} layouts, {found.planned:,} of them fully planned, "
        f"in {found.seconds:.1f} s\n"
    )
    kept = sorted(field for field in found.space.typed if field.startswith(_SEARCHED))
    head += f"kept as typed: {', '.join(kept)}\n" if kept else ""
    rows = [_row(number, each, unit) for number, each in enumerate(found.best, start=1)]
    left = {"layout", "recompute", "schedule"}
    table = aligned(rows, left) + _distinguished(found)
    cost = f"with the first, {budget_in_words(plan)}\n"
    return f"{head}\n{table}{cost}\nwhy the others lose\n{_losers(found)}"


def _alike(found: SearchResult) -> int | None:
    """Return how many of the best layouts are too close to the first to rank; None without published rows."""
    first = found.best[0]
    if first.plan.accelerator is None or first.plan.is_calibrated:
        return None
    return sum(each.seconds <= first.seconds * (1 + RESOLUTION.off) for each in found.best)


def _distinguished(found: SearchResult) -> str:
    alike = _alike(found)
    if alike is None:
        return ""
    which = "all" if alike == len(found.best) else f"the first {alike}"
    claim = f"{which} cannot be distinguished" if alike > 1 else "the first differs from the others"
    return (
        f"{claim}: the planned ratio of two layouts is off by {RESOLUTION.off:.1%} or less "
        f"in four of five published pairs ({RESOLUTION.pairs} pairs, {RESOLUTION.tables} tables)\n"
    )


_SEARCHED = ("parallelism.", "training.local_batch_size", "activation_checkpoint.mode")


def _row(number: int, candidate: Candidate, unit: str) -> dict[str, str]:
    plan, point = candidate.plan, candidate.point
    assert plan.speed is not None
    times = plan.job.accumulation_steps
    microbatches = point.local_batch_size // point.microbatch_size
    batch = (
        f"{microbatches} x {point.microbatch_size}"
        if point.schedule
        else f"{times} x {point.local_batch_size}"
    )
    return {
        "": f"{number}",
        "layout": mesh_of(plan.job.parallelism),
        "microbatches": batch,
        "recompute": point.mode,
        "schedule": schedule_of(plan.job) if point.schedule else "",
        "GiB": gib(plan.peak),
        "step": seconds(plan.speed.step_seconds),
        f"tokens/s a {unit}": figure(plan.speed.tokens_per_second_per_rank),
        "MFU": "" if plan.speed.mfu is None else f"{plan.speed.mfu:.1%}",
    }


def _losers(found: SearchResult) -> str:
    rejected = found.rejected
    rows = [
        (count, "illegal", rejected.rules[field]) for field, count in rejected.illegal.most_common(_SHOWN)
    ]
    lines = [f"  {count:>9,}  {what}: {shortened(str(rule), 150)}" for count, what, rule in rows]
    others = sum(rejected.illegal.values()) - sum(count for count, _, _ in rows)
    if others:
        lines.append(f"  {others:>9,}  illegal by {len(rejected.illegal) - len(rows)} other rules")
    if rejected.closest is not None:
        shortfall, point = rejected.closest
        lines.append(
            f"  {rejected.too_large:>9,}  do not fit; "
            f"the closest is at least {gib(shortfall)} GiB too large: {_describe_point(found, point)}"
        )
    if rejected.tied:
        lines.append(f"  {rejected.tied:>9,}  as fast as one of these, with more axes or more memory")
    for part, count in rejected.slower.most_common():
        lines.append(f"  {count:>9,}  slower, most of all by {part_name(part)}")
    return "".join(f"{line}\n" for line in lines)


def _describe_point(found: SearchResult, point: Point) -> str:
    layout = mesh_of(point.layout(found.space.base.parallelism))
    batch = f"{point.local_batch_size // point.microbatch_size} x {point.microbatch_size}"
    pipeline = f"{point.schedule}, {batch}" if point.schedule else f"{point.local_batch_size} at once"
    return f"{layout}, {pipeline}, {point.mode}"


def found_as_dict(found: SearchResult) -> dict[str, Any]:
    """The result of a search as plain containers, for JSON."""
    rejected: Rejected = found.rejected
    return {
        "world_size": found.space.world,
        "layouts": found.layouts,
        "points": found.points,
        "planned": found.planned,
        "seconds": found.seconds,
        "kept": sorted(found.space.typed),
        "alike": _alike(found),
        "best": [
            {
                "overrides": each.point.overrides(found.space.base.parallelism),
                "plan": _without_timeline(each.plan),
            }
            for each in found.best
        ],
        "lost": {
            "illegal": dict(rejected.illegal.most_common()),
            "too_large": rejected.too_large,
            "tied": rejected.tied,
            "closest": None
            if rejected.closest is None
            else {
                "lacks": rejected.closest[0],
                "overrides": rejected.closest[1].overrides(found.space.base.parallelism),
            },
            "slower": dict(rejected.slower.most_common()),
        },
    }


def _without_timeline(plan: Plan) -> dict[str, Any]:
    plain = as_dict(plan)
    if plain["speed"] is not None:
        del plain["speed"]["timeline"]
    return plain


def sweep_path(name: str, asked: str | None) -> Path:
    """Return the path of the sweep file: ``asked``, or in sweeps/search, for ``sweep=search/NAME``.

    If the harness is an installed package, or that folder is not writable: in ``sweep/`` of this folder.
    """
    if asked is not None:
        return Path(asked)
    folder = (Path(conf_dir()) / "sweep").resolve()
    is_installed = Path(conf_dir()).is_relative_to(PACKAGE)
    if is_installed or not os.access(folder, os.W_OK):
        return Path("sweep", f"{name}-search.yaml")
    return folder / "search" / f"{name}.yaml"


def write_sweep(found: SearchResult, path: Path, overrides: Sequence[str]) -> str:
    """Write the sweep that measures the best points; return the command that starts it.

    Args:
        found: the result of the search.
        path: the file.
        overrides: the overrides of the command line.

    Raises:
        ConfigError: the file cannot be written.
    """
    # Each point sets the searched fields; the same field on the command line would override it.
    moved = {
        override.split("=")[0] for override in found.best[0].point.overrides(found.space.base.parallelism)
    }
    moved |= {"parallelism.ep", "parallelism.pp_schedule", "parallelism.pp_microbatch_size", *_PLANNER_FIELDS}
    moved.add("parallelism.pp_layers_per_stage")
    job = [override for override in overrides if override.lstrip("+").split("=")[0] not in moved]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, _sweep(found, job).encode())
    except OSError as error:
        raise ConfigError(
            "sweep_file", path, f"cannot be written: {error.strerror}", "another path"
        ) from error
    return _command(path.resolve(), job)


def _command(path: Path, job: Sequence[str]) -> str:
    """Return the command that starts a sweep file."""
    start = ["python", "-m", "harness.train", "-m"]
    for folder in config_folders().paths:
        if (folder / "sweep").resolve() in path.parents:
            name = path.relative_to((folder / "sweep").resolve()).with_suffix("")
            return shlex.join([*start, f"sweep={name}", *job])
    for parent in path.parents:
        if parent.name == "sweep":
            name = path.relative_to(parent).with_suffix("")
            return shlex.join([*start, "--config-dir", str(parent.parent), f"sweep={name}", *job])
    typed = shlex.join([*start, "--config-dir", "FOLDER", f"sweep={path.stem}", *job])
    return f"to start it: put it into FOLDER/sweep/, and type {typed}"


def _sweep(found: SearchResult, typed: Sequence[str]) -> str:
    plan = found.best[0].plan
    points = "\n".join(
        f"        {' '.join(each.point.overrides(found.space.base.parallelism))}" for each in found.best
    )
    return f"""# @package _global_
# What harness plan search=true expects to be the fastest on {devices(plan, plan.job.world_size)},
# fastest first, of the job: {" ".join(shlex.join(typed).split())}
name: {plan.job.name}-search

hydra:
  sweeper:
    params:
      points: |
{points}
"""
