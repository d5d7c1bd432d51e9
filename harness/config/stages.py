"""Modules of each pipeline stage, and stages of each rank (no torch)."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from harness.config.pipeline_schedules import SCHEDULES, read_csv_schedule
from harness.util.errors import ConfigError

if TYPE_CHECKING:
    from harness.config.parallelism import ParallelismConfig


def stages_per_rank(layout: ParallelismConfig, n_layers: int) -> int:
    """Number of stages each pipeline rank holds (the maximum, for a CSV schedule).

    Raises:
        ConfigError: the number of stages is not a multiple of the ranks.
    """
    total = num_stages(layout, n_layers)
    if layout.pp_schedule_csv is None and total % layout.pp:
        rule = f"the number of stages, {total}, must be a multiple of parallelism.pp={layout.pp}"
        if layout.pp_modules_per_stage:
            schedule = SCHEDULES[layout.pp_schedule]
            works = [f"{layout.pp * r} stages" for r in (1, 2) if schedule.takes_stages(r)]
            raise ConfigError(
                "parallelism.pp_modules_per_stage", _typed(layout.pp_modules_per_stage), rule, works
            )
        raise ConfigError(
            "parallelism.pp_layers_per_stage",
            layout.pp_layers_per_stage,
            rule,
            [*fitting_layers_per_stage(layout, n_layers), "null"],
        )
    return -(-total // layout.pp)


def fitting_layers_per_stage(layout: ParallelismConfig, n_layers: int) -> list[int]:
    """Values of pp_layers_per_stage that are legal for the layout's degree and schedule."""
    check_weights(layout, n_layers)
    weight = _weight(layout, n_layers)
    schedule = SCHEDULES[layout.pp_schedule]
    totals = {layers: -(-weight // layers) for layers in range(1, weight + 1)}
    return [
        layers
        for layers, total in totals.items()
        if total <= n_layers + 2 and total % layout.pp == 0 and schedule.takes_stages(total // layout.pp)
    ]


def _weight(layout: ParallelismConfig, n_layers: int) -> int:
    """Total weight that the automatic split divides: the layers, and the weights of embedding and head."""
    return n_layers + layout.pp_first_stage_less_layers + layout.pp_last_stage_less_layers


def num_stages(layout: ParallelismConfig, n_layers: int) -> int:
    """Number of stages, from the module names, the CSV, the layers per stage, or the schedule."""
    if layout.pp_modules_per_stage:
        return len(layout.pp_modules_per_stage)
    if layout.pp_schedule_csv is not None:
        return read_csv_schedule(layout.pp_schedule_csv, layout.pp).num_stages
    if layout.pp_layers_per_stage is not None:
        return -(-_weight(layout, n_layers) // layout.pp_layers_per_stage)
    return layout.pp * (1 if SCHEDULES[layout.pp_schedule].stages_per_rank == "one" else 2)


def check_weights(layout: ParallelismConfig, n_layers: int) -> None:
    """Check the weights of embedding and head, also without a pipeline: a search over layouts uses them.

    Raises:
        ConfigError: a weight is negative, or so large that it changes nothing.
    """
    for name in ("pp_first_stage_less_layers", "pp_last_stage_less_layers"):
        weight = getattr(layout, name)
        if not 0 <= weight <= 2 * n_layers:
            rule = f"must be at least 0 and at most {2 * n_layers}, twice model.n_layers"
            raise ConfigError(f"parallelism.{name}", weight, rule)


def check_stages(layout: ParallelismConfig, n_layers: int) -> None:
    """Check that every stage gets a module, and that named modules are those of the model.

    Raises:
        ConfigError: the layers cannot be split this way.
    """
    named = len(layout.pp_modules_per_stage)
    if named:
        check_modules_per_stage(layout.pp_modules_per_stage, n_layers)
    if layout.pp_schedule_csv is not None:
        scheduled = read_csv_schedule(layout.pp_schedule_csv, layout.pp).num_stages
        available = named or n_layers + 2
        if scheduled > available or (named and scheduled < named):
            source = "parallelism.pp_modules_per_stage" if named else f"model.n_layers={n_layers}"
            raise ConfigError(
                "parallelism.pp_schedule_csv",
                layout.pp_schedule_csv,
                f"runs {scheduled} stages, but {source} makes {'' if named else 'at most '}{available}",
            )
    elif not named:
        _check_automatic_split(layout, n_layers)


def _check_automatic_split(layout: ParallelismConfig, n_layers: int) -> None:
    """Raise ConfigError if the automatic split would leave a stage without a module."""
    first, last = layout.pp_first_stage_less_layers, layout.pp_last_stage_less_layers
    layers = layout.pp_layers_per_stage
    works = [*fitting_layers_per_stage(layout, n_layers), "null"]
    total, most = num_stages(layout, n_layers), min(_weight(layout, n_layers), n_layers + 2)
    if total > most:
        weights = f"embedding and head weigh {first} and {last}"
        rule = f"{total} stages are too many for model.n_layers={n_layers} ({weights})"
        if layers is not None:
            raise ConfigError("parallelism.pp_layers_per_stage", layers, rule, works)
        raise ConfigError("parallelism.pp", layout.pp, rule, f"at most {most // (total // layout.pp)}")


def split_modules(layout: ParallelismConfig, n_layers: int) -> list[list[str]]:
    """Names of the modules of every stage, in order.

    The automatic split gives every stage the same weight. The embedding counts as pp_first_stage_less_layers
    layers and the head as pp_last_stage_less_layers, so the first and the last stage hold fewer layers. The
    earliest stages get the remainder.
    """
    if layout.pp_modules_per_stage:
        return layout.pp_modules_per_stage
    stages = num_stages(layout, n_layers)
    if stages == 1:
        return [["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]]
    first, last = layout.pp_first_stage_less_layers, layout.pp_last_stage_less_layers
    weight, extra = divmod(n_layers + first + last, stages)
    room = [weight + (1 if stage < extra else 0) for stage in range(stages)]
    room[0] = max(0, room[0] - first)
    room[-1] = max(0, room[-1] - last)
    # An embedding or head heavier than a stage takes room from the fullest stages; on a tie, from the ends.
    while sum(room) > n_layers:
        room[max(range(stages), key=lambda s: (room[s], s in (0, stages - 1)))] -= 1
    names: list[list[str]] = []
    layer = 0
    for count in room:
        names.append([f"layers.{i}" for i in range(layer, layer + count)])
        layer += count
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return names


def stages_of_rank(layout: ParallelismConfig, n_layers: int, pp_rank: int) -> list[int]:
    """Indices of the stages that a pipeline rank holds, ascending."""
    if layout.pp_schedule_csv is not None:
        return read_csv_schedule(layout.pp_schedule_csv, layout.pp).stages_of_rank[pp_rank]
    total = num_stages(layout, n_layers)
    if SCHEDULES[layout.pp_schedule].placement == "v" and total == 2 * layout.pp:
        return [pp_rank, total - 1 - pp_rank]
    return list(range(pp_rank, total, layout.pp))


def check_modules_per_stage(stages: list[list[str]], n_layers: int) -> None:
    """Raise ConfigError unless the stages hold every module once and in order."""
    field, value = "parallelism.pp_modules_per_stage", _typed(stages)
    wanted = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
    named = [name for stage in stages for name in stage]
    modules = f"tok_embeddings, layers.0 ... layers.{n_layers - 1}, norm, output"
    for name in named:
        if name not in wanted:
            close = difflib.get_close_matches(name, wanted, n=1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ConfigError(field, value, f"names {name}, which is not a module{hint}", modules)
    missing = [name for name in wanted if name not in named]
    if missing:
        raise ConfigError(field, value, f"leaves out {', '.join(missing)}", modules)
    if named != wanted:
        raise ConfigError(field, value, "must name every module once, in the order of the model", modules)
    if any(not stage for stage in stages):
        raise ConfigError(field, value, "has a stage without a module", "one module or more in every stage")


def _typed(stages: list[list[str]]) -> str:
    """The split as typed on the command line, truncated to 100 characters."""
    text = "[" + ",".join(f"[{','.join(stage)}]" for stage in stages) + "]"
    return text if len(text) <= 100 else f"{text[:96]}...]"
