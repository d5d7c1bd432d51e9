"""The passes of every pipeline rank, in order, from torch's own schedule objects, and their times.

Importing torch's pipelines takes two to three seconds, more than the rest of a plan. So orders are
cached in ``~/.cache/harness`` (or under ``XDG_CACHE_HOME``), by torch's version, and only the first
plan of a schedule imports torch. An order is a text with one line per rank, like ``0F0 0F1 0B0``; a
search of layouts reads two lines of most orders.
"""

import logging
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache
from importlib.metadata import version
from itertools import chain, islice, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import SCHEDULES, num_stages
from harness.tools.plan.plan import Action
from harness.util.files import write_atomically

_version = lru_cache(version)
# Version of the format of cached files.
_FORMAT = 3
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_Pass = tuple[int, str, int]
"""Stage, kind and microbatch."""
INPUTS = {
    "F": [(-1, "F")],
    "B": [(0, "F"), (1, "I")],
    "I": [(0, "F"), (1, "I")],
    "W": [(0, "I")],
}
"""Inputs of a pass by kind: the passes before it, by distance between stages and kind."""


def pipeline_order(
    layout: ParallelismConfig, n_layers: int, microbatches: int
) -> list[list[Action]]:
    """Return the passes of every pipeline rank for one local batch, in order, without times."""
    return [passes_of_rank(layout, n_layers, microbatches, rank) for rank in range(layout.pp)]


def passes_of_rank(
    layout: ParallelismConfig, n_layers: int, microbatches: int, rank: int
) -> list[Action]:
    """Return the passes of one pipeline rank, in order."""
    if layout.pp == 1:
        return [Action(0, kind, number) for number, kind in product(range(microbatches), "FB")]
    if schedule := layout.csv_schedule:
        passes = schedule.passes_of_rank[rank]
        return [Action(stage, kind, microbatch) for stage, kind, microbatch in passes]
    stages = num_stages(layout, n_layers)
    return _actions_of_torch(layout.pp_schedule, layout.pp, stages, microbatches, rank)


@lru_cache(maxsize=1024)  # the parts of a plan, and many layouts of a search, ask for the same one
def _actions_of_torch(
    name: str, pp: int, stages: int, microbatches: int, rank: int
) -> list[Action]:
    line = _of_torch(name, pp, stages, microbatches)[rank]
    return [Action(int(cell[1]), cell[2], int(cell[3])) for cell in _CELL.finditer(line)]


def gathering_passes(actions: Sequence[Action]) -> set[Action]:
    """Return the passes of a pipeline rank that gather parameters, if forward passes free them.

    A backward pass, and either half of a split one, leaves parameters gathered for the next pass.
    """
    found = set()
    before: dict[int, str] = {}
    for action in actions:
        if before.get(action.stage, "F") == "F":
            found.add(action)
        before[action.stage] = action.kind
    return found


@lru_cache(maxsize=512)
def _of_torch(name: str, pp: int, stages: int, microbatches: int) -> list[str]:
    """Lines of one of torch's schedules, from the cache if it is there."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = caches / "harness" / f"pipeline_orders-{_FORMAT}" / f"torch-{_version('torch')}"
    path = folder / f"{name}-{pp}-{stages}-{microbatches}"
    try:
        return path.read_text().splitlines()
    except OSError:
        ranks = _made_by_torch(name, pp, stages, microbatches)
    lines = [" ".join(f"{s}{kind}{i}" for s, kind, i in passes) for passes in ranks]
    with suppress(OSError):  # the cache is optional
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, "\n".join(lines).encode())
    return lines


def _made_by_torch(name: str, pp: int, stages: int, microbatches: int) -> list[list[_Pass]]:
    from torch.distributed.pipelining import schedules

    # torch logs the arguments of every schedule.
    logging.getLogger(schedules.__name__).setLevel(logging.WARNING)
    per_rank = stages // pp
    # The attributes of a stage that a schedule's constructor reads.
    shared = {
        "num_stages": stages,
        "group_size": pp,
        "group_rank": 0,
        "has_backward": False,
        "submod": None,
    }
    ours = [
        SimpleNamespace(stage_index=at, is_first=at == 0, is_last=at == stages - 1, **shared)
        for at in range(0, per_rank * pp, pp)
    ]
    of_one = SCHEDULES[name].stages_per_rank == "one"
    # Skip inserting sends and gathers, which takes torch ten times as long as the passes and is not
    # needed.
    bare = type(
        "Bare",
        (schedules.get_schedule_class(name),),
        {"_prepare_schedule_with_comms": lambda *_, **__: None},
    )
    schedule: Any = bare(ours[0] if of_one else ours, n_microbatches=microbatches)
    order = schedule._get_pipeline_order() if of_one else schedule.pipeline_order
    ranks = [list(chain.from_iterable(map(_passes, order[rank]))) for rank in range(pp)]
    return [_numbered(passes) for passes in ranks] if of_one else ranks


def _numbered(passes: list[_Pass]) -> list[_Pass]:
    """Number microbatches in the order in which the schedule runs them.

    The order that torch 2.13 gives for 1F1B starts with microbatch 1 on the last rank, and has no
    number 0.
    """
    seen: Counter[str] = Counter()
    numbered = []
    for stage, kind, _ in passes:
        numbered.append((stage, kind, seen[kind]))
        seen[kind] += 1
    return numbered


def _passes(step: Any) -> list[_Pass]:
    """None, one, or the two of an overlapped pair."""
    if step is None:
        return []
    if step.sub_actions is not None:
        return list(chain.from_iterable(map(_passes, step.sub_actions)))
    # A search calls this a million times; the descriptor ``name`` takes ten times as long.
    kind = _KINDS.get(step.computation_type._name_)
    return [] if kind is None else [(step.stage_index, kind, step.microbatch_index)]


def simulate(
    order: list[list[Action]], seconds: Callable[[Action], float], send_seconds: float
) -> list[list[Action]]:
    """Compute the times of every pass: it starts when its rank is free and its inputs have arrived.

    For each microbatch, a forward pass needs the forward of the previous stage; a backward pass its
    own forward, and the backward (for inputs) of the next stage; a backward for weights the one for
    inputs. Between ranks, inputs arrive ``send_seconds`` later.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    # By stage and kind of a pass: its inputs, and the seconds that they are on their way.
    needs = {
        (stage, kind): [
            (stage + offset, of, 0.0 if rank_of[stage + offset] == rank else send_seconds)
            for offset, of in inputs
            if stage + offset in rank_of
        ]
        for stage, rank in rank_of.items()
        for kind, inputs in INPUTS.items()
    }
    ended: dict[tuple[int, str, int], float] = {}
    timed: list[list[Action]] = [[] for _ in order]
    remaining = sum(map(len, order))
    while remaining:
        before = remaining
        for actions, done in zip(order, timed, strict=True):
            for action in islice(actions, len(done), None):
                stage, kind, microbatch, *_ = action
                arrivals = [done[-1].end if done else 0.0]
                for at, of, hop in needs[stage, kind]:
                    arrivals.append(ended.get((at, of, microbatch), math.inf) + hop)
                start = max(arrivals)
                if start == math.inf:
                    break
                end = start + seconds(action)
                # The first half of a backward pass, I, has what other passes wait for.
                ended[stage, "I" if kind == "B" else kind, microbatch] = end
                done.append(Action(stage, kind, microbatch, start, end))
                remaining -= 1
        if remaining == before:
            raise ValueError("the schedule deadlocks")
    return timed
