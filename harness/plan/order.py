"""The passes of every pipeline rank, in order, from torch's own schedule objects.

Importing torch's pipelines takes two to three seconds, more than the rest of a plan. So orders are cached in
``~/.cache/harness`` (or under ``XDG_CACHE_HOME``), by torch's version, and only the first plan of a schedule
imports torch.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import uuid
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.parallelism.config import ParallelismConfig
from harness.parallelism.schedules import SCHEDULES, read_csv_schedule
from harness.parallelism.stages import num_stages
from harness.plan.plan import Action

# Version of the format of cached files.
_FORMAT = 1
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")


def pipeline_order(layout: ParallelismConfig, n_layers: int, microbatches: int) -> list[list[Action]]:
    """Return the forward and backward passes of every pipeline rank, in order, without times.

    Args:
        layout: the layout, validated.
        n_layers: layers of the model.
        microbatches: microbatches of one pass over a local batch.
    """
    if layout.pp == 1:
        return [[Action(0, kind, i) for i in range(microbatches) for kind in ("F", "B")]]
    if layout.pp_schedule_csv is not None:
        rows = read_csv_schedule(layout.pp_schedule_csv, layout.pp).passes_of_rank
        return [[Action(stage, kind, microbatch) for stage, kind, microbatch in row] for row in rows]
    return _of_torch(layout.pp_schedule, layout.pp, num_stages(layout, n_layers), microbatches)


def gathering_passes(actions: Sequence[Action]) -> set[Action]:
    """Return the passes of a pipeline rank that gather parameters, if forward passes free them.

    A backward pass, and either half of a split one, leaves parameters gathered for the next pass.
    """
    gathered: set[int] = set()
    found = set()
    for action in actions:
        if action.stage not in gathered:
            found.add(action)
        (gathered.discard if action.kind == "F" else gathered.add)(action.stage)
    return found


@lru_cache(maxsize=512)
def _of_torch(name: str, pp: int, stages: int, microbatches: int) -> list[list[Action]]:
    """Return the order of one of torch's schedules, from the cache if it is there."""
    if "torch.distributed.pipelining" in sys.modules:
        return _made_by_torch(name, pp, stages, microbatches)
    path = _folder() / f"{name}-{pp}-{stages}-{microbatches}"
    order = _read(path)
    if order is None or not _is_complete(order, pp, stages * microbatches):
        order = _made_by_torch(name, pp, stages, microbatches)
        _write(path, order)
    return order


def _folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "harness" / f"pipeline_orders-{_FORMAT}" / f"torch-{version('torch')}"


def _read(path: Path) -> list[list[Action]] | None:
    """Read the order from a file with one line per rank, like ``0F0 0F1 0B0``; None if there is no file."""
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    cells = [[_CELL.fullmatch(cell) for cell in line.split()] for line in lines]
    return [[Action(int(c[1]), c[2], int(c[3])) for c in row if c is not None] for row in cells]


def _is_complete(order: list[list[Action]], pp: int, passes: int) -> bool:
    """Whether no pass is missing, as in a truncated file."""
    kinds = Counter(action.kind for row in order for action in row)
    return len(order) == pp and kinds["F"] == kinds["B"] + kinds["I"] == kinds["B"] + kinds["W"] == passes


def _write(path: Path, order: list[list[Action]]) -> None:
    """Write the order to the cache; ignore errors, because the cache is optional."""
    text = "".join(" ".join(f"{a.stage}{a.kind}{a.microbatch}" for a in row) + "\n" for row in order)
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()


def _made_by_torch(name: str, pp: int, stages: int, microbatches: int) -> list[list[Action]]:
    from torch.distributed.pipelining import schedules

    # torch logs the arguments of every schedule.
    logging.getLogger(schedules.__name__).setLevel(logging.WARNING)
    per_rank = stages // pp
    ours = [_Stage(index * pp, stages, pp) for index in range(per_rank)]
    of_one = SCHEDULES[name].stages_per_rank == "one"
    # Skip inserting sends and gathers, which takes torch ten times as long as the passes and is not needed.
    bare = type("Bare", (schedules.get_schedule_class(name),), {"_prepare_schedule_with_comms": _nothing})
    schedule: Any = bare(ours[0] if of_one else ours, n_microbatches=microbatches)
    order = schedule._get_pipeline_order() if of_one else schedule.pipeline_order
    ranks = [[action for step in order[rank] for action in _passes(step)] for rank in range(pp)]
    return [_numbered(actions) for actions in ranks] if of_one else ranks


def _nothing(schedule: Any, order: Any, *more: Any, **others: Any) -> None: ...


def _numbered(actions: list[Action]) -> list[Action]:
    """Number microbatches in the order in which the schedule runs them.

    The order that torch 2.13 gives for 1F1B starts with microbatch 1 on the last rank, and has no number 0.
    """
    seen: Counter[str] = Counter()
    numbered = []
    for action in actions:
        numbered.append(replace(action, microbatch=seen[action.kind]))
        seen[action.kind] += 1
    return numbered


class _Stage(SimpleNamespace):
    """The attributes of a stage that a schedule's constructor reads."""

    def __init__(self, index: int, stages: int, pp: int) -> None:
        super().__init__(
            stage_index=index,
            num_stages=stages,
            group_size=pp,
            group_rank=0,
            is_first=index == 0,
            is_last=index == stages - 1,
            has_backward=False,
            submod=None,
        )


def _passes(step: Any) -> list[Action]:
    """The passes in one entry of a schedule: none, one, or the two of an overlapped pair."""
    if step is None:
        return []
    if step.sub_actions is not None:
        return [action for part in step.sub_actions for action in _passes(part)]
    # A search calls this a million times; the descriptor ``name`` takes ten times as long.
    kind = _KINDS.get(step.computation_type._name_)
    return [] if kind is None else [Action(step.stage_index, kind, step.microbatch_index)]
