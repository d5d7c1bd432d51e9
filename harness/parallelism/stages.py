"""Which modules of a decoder each pipeline stage holds, and which rank holds each stage (no torch)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.errors import ConfigError
from harness.parallelism.schedules import SCHEDULES, read_csv_schedule

if TYPE_CHECKING:
    from harness.parallelism.config import ParallelismConfig


def stages_per_rank(layout: ParallelismConfig, n_layers: int) -> int:
    """Number of stages each pipeline rank holds (the most, for a CSV schedule).

    Raises:
        ConfigError: the layers cannot be split into that many stages.
    """
    total = num_stages(layout, n_layers)
    if layout.pp_schedule_csv is None and total % layout.pp:
        field, value = (
            ("parallelism.pp_modules_per_stage", f"{total} stages")
            if layout.pp_modules_per_stage
            else ("parallelism.pp_layers_per_stage", layout.pp_layers_per_stage)
        )
        raise ConfigError(
            field, value, f"makes {total} stages, which must be a multiple of parallelism.pp={layout.pp}"
        )
    return -(-total // layout.pp)


def num_stages(layout: ParallelismConfig, n_layers: int) -> int:
    """Number of stages of the whole pipeline: said by the CSV, the names, the layers per stage, or the schedule."""
    if layout.pp_modules_per_stage:
        return len(layout.pp_modules_per_stage)
    if layout.pp_schedule_csv is not None:
        return read_csv_schedule(layout.pp_schedule_csv, layout.pp).num_stages
    weight = n_layers + layout.pp_first_stage_less_layers + layout.pp_last_stage_less_layers
    if layout.pp_layers_per_stage is not None:
        if layout.pp_layers_per_stage < 1:
            raise ConfigError("parallelism.pp_layers_per_stage", layout.pp_layers_per_stage, "must be at least 1")
        total = -(-weight // layout.pp_layers_per_stage)
    else:
        total = layout.pp * (1 if SCHEDULES[layout.pp_schedule].stages_per_rank == "one" else 2)
    if total > weight or total > n_layers + 2:
        raise ConfigError(
            "parallelism.pp",
            layout.pp,
            f"{total} stages are too many for model.n_layers={n_layers} (embedding and head weigh "
            f"{layout.pp_first_stage_less_layers} and {layout.pp_last_stage_less_layers})",
            f"at most {min(weight, n_layers + 2) * layout.pp // total}",
        )
    return total


def split_modules(layout: ParallelismConfig, n_layers: int) -> list[list[str]]:
    """Names of the modules of every stage, in order.

    The automatic split gives every stage the same weight, the embedding and the head counting as the
    layers they stand for, and the remainder to the earliest stages; so first and last hold fewer layers.
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
    # A table heavier than a whole stage leaves layers over: they go to the lightest stages in the middle.
    while sum(room) > n_layers:
        room[room.index(max(room))] -= 1
    while sum(room) < n_layers:
        room[min(range(stages), key=lambda s: (room[s], s in (0, stages - 1)))] += 1
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
    """Raises ConfigError unless the stages hold every module once and in order."""
    field = "parallelism.pp_modules_per_stage"
    wanted = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
    named = [name for stage in stages for name in stage]
    for name in named:
        if name not in wanted:
            raise ConfigError(field, name, "no such module", f"tok_embeddings, layers.0 ... layers.{n_layers - 1}, norm, output")
    missing = [name for name in wanted if name not in named]
    if missing:
        raise ConfigError(field, "[...]", f"leaves out {', '.join(missing)}")
    if named != wanted:
        raise ConfigError(field, "[...]", "must name every module once, in the order of the model")
    if any(not stage for stage in stages):
        raise ConfigError(field, "[...]", "has a stage without a module")
