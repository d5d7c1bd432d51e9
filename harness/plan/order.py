"""What every pipeline rank does, in order, as torch's own schedule objects say.

torch is imported where there is a pipeline.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

from harness.parallelism.config import ParallelismConfig
from harness.parallelism.schedules import SCHEDULES, read_csv_schedule
from harness.parallelism.stages import num_stages
from harness.plan.plan import Action

_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def pipeline_order(layout: ParallelismConfig, n_layers: int, microbatches: int) -> list[list[Action]]:
    """Forward and backward passes of every pipeline rank, in the order in which they run, without times.

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


@lru_cache(maxsize=512)
def _of_torch(name: str, pp: int, stages: int, microbatches: int) -> list[list[Action]]:
    from torch.distributed.pipelining import schedules

    # It tells what it was given, once for every schedule made.
    logging.getLogger(schedules.__name__).setLevel(logging.WARNING)
    per_rank = stages // pp
    ours = [_Stage(index * pp, stages, pp) for index in range(per_rank)]
    of_one = SCHEDULES[name].stages_per_rank == "one"
    made: Any = schedules.get_schedule_class(name)(ours[0] if of_one else ours, n_microbatches=microbatches)
    order = made._get_pipeline_order() if of_one else made.pipeline_order
    ranks = [[action for step in order[rank] for action in _passes(step)] for rank in range(pp)]
    return [_numbered(actions) for actions in ranks] if of_one else ranks


def _numbered(actions: list[Action]) -> list[Action]:
    """With microbatches one after the other, as such a schedule runs them.

    What torch 2.13 tells of 1F1B begins with microbatch 1 on the last rank, and has none of number 0.
    """
    seen: Counter[str] = Counter()
    numbered = []
    for action in actions:
        numbered.append(replace(action, microbatch=seen[action.kind]))
        seen[action.kind] += 1
    return numbered


class _Stage(SimpleNamespace):
    """What a schedule asks of a stage when it is made."""

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
    kind = _KINDS.get(step.computation_type.name)
    return [] if kind is None else [Action(step.stage_index, kind, step.microbatch_index)]
