"""The passes of every pipeline rank, in order, from torch's own schedule objects, and their times.

Importing torch's pipelines takes two to three seconds, more than the rest of a plan. So orders are
cached in ``~/.cache/harness`` (or under ``XDG_CACHE_HOME``), by torch's version, and only the first
plan of a schedule imports torch. An order is a text with one line per rank, like ``0F0 0F1 0B0``; a
search of layouts reads two lines of most orders.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from itertools import chain, islice, product
from operator import ge, le
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from harness.config.parallelism import ParallelismConfig
from harness.config.pipeline import SCHEDULES, num_stages, read_csv_schedule
from harness.tools.plan.plan import Action
from harness.util.files import write_atomically

_version = lru_cache(version)
# Version of the format of cached files.
_FORMAT = 3
_KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_CELL = re.compile(r"(\d+)([FBIW])(\d+)")
_Pass = tuple[int, str, int]
"""Stage, kind and microbatch."""


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
    if layout.pp_schedule_csv is not None:
        rows = read_csv_schedule(layout.pp_schedule_csv, layout.pp).passes_of_rank
        return [Action(stage, kind, microbatch) for stage, kind, microbatch in rows[rank]]
    stages = num_stages(layout, n_layers)
    return _actions_of_torch(layout.pp_schedule, layout.pp, stages, microbatches, rank)


@lru_cache(maxsize=1024)  # the parts of a plan, and many layouts of a search, ask for the same one
def _actions_of_torch(
    name: str, pp: int, stages: int, microbatches: int, rank: int
) -> list[Action]:
    line = _of_torch(name, pp, stages, microbatches)[rank]
    return [Action(int(cell[1]), cell[2], int(cell[3])) for cell in _CELL.finditer(line)]


@dataclass(frozen=True)
class Moment:
    """A pass of a rank, and the state of the rank without the microbatch of the pass."""

    number: int
    stage: int
    kind: str
    again: bool
    """Whether its stage has gradients of earlier microbatches."""
    counts: dict[tuple[str, int], int]
    """By name and first equal stage: stages that ``ran``, stages with ``gradients``, microbatches after ``F``
    and after ``I``, microbatches whose outputs are ``left``."""


def fullest(
    actions: Iterable[Action], equal: Mapping[int, int], *, keeps_outputs: bool = False
) -> list[Moment]:
    """Return the passes at which a rank's memory can peak, in schedule order.

    A pass is left out if another one of its kind has at least as large counts. Moments name only
    the first of ``equal`` stages; ``keeps_outputs`` is that of ``Software``.
    """
    counted = ["ran", "gradients", "F", "I"]
    if keeps_outputs:
        counted.append("left")
    counts = {(what, stage): 0 for stage in equal.values() for what in counted}
    found: dict[tuple[int, str, bool], dict[tuple[int, ...], Moment]] = {}
    ran = set[int]()
    again = set[int]()
    for number, action in enumerate(actions):
        stage = equal[action.stage]
        kind = action.kind
        if action.stage not in ran:
            ran.add(action.stage)
            counts["ran", stage] += 1
        if kind != "F":
            counts["I" if kind == "W" else "F", stage] -= 1
        key = stage, kind, action.stage in again
        largest = found.setdefault(key, {})
        now = tuple(counts.values())
        if now not in largest and not any(all(map(ge, other, now)) for other in largest):
            for less in [other for other in largest if all(map(le, other, now))]:
                del largest[less]
            largest[now] = Moment(number, *key, dict(counts))
        if kind in "FI":
            counts[kind, stage] += 1
            continue
        if keeps_outputs:
            counts["left", stage] += 1
        if action.stage not in again:
            again.add(action.stage)
            counts["gradients", stage] += 1
    moments = chain.from_iterable(largest.values() for largest in found.values())
    return sorted(moments, key=lambda moment: moment.number)


def gathering_passes(actions: Sequence[Action]) -> set[Action]:
    """Return the passes of a pipeline rank that gather parameters, if forward passes free them.

    A backward pass, and either half of a split one, leaves parameters gathered for the next pass.
    """
    gathered: set[int] = set()
    found = set()
    for action in actions:
        if action.stage not in gathered:
            found.add(action)
        if action.kind == "F":
            gathered.discard(action.stage)
        else:
            gathered.add(action.stage)
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
    rank_of = dict[int, int]()
    for rank, actions in enumerate(order):
        rank_of |= {action.stage: rank for action in actions}
    # What a pass needs: the stage and kind of another one, and the seconds until its output
    # arrives.
    needs: dict[tuple[int, str], list[tuple[int, str, float]]] = {}
    for stage, rank in rank_of.items():
        activation = [(stage - 1, "F")] if stage else []
        gradient = [(stage + 1, "I")] if stage + 1 in rank_of else []
        inputs = {"F": activation, "I": [(stage, "F"), *gradient], "W": [(stage, "I")]}
        for kind, passes in inputs.items():
            needs[stage, kind] = [
                (at, of, 0.0 if rank_of[at] == rank else send_seconds) for at, of in passes
            ]
    ended: dict[tuple[int, str, int], float] = {}
    timed: list[list[Action]] = [[] for _ in order]
    remaining = sum(map(len, order))
    while remaining:
        before = remaining
        for actions, done in zip(order, timed, strict=True):
            for action in islice(actions, len(done), None):
                stage = action.stage
                microbatch = action.microbatch
                kind = "I" if action.kind == "B" else action.kind
                needed = [
                    (ended.get((at, of, microbatch)), hop) for at, of, hop in needs[stage, kind]
                ]
                arrivals = [end + hop for end, hop in needed if end is not None]
                if len(arrivals) < len(needed):
                    break
                start = max([done[-1].end if done else 0.0, *arrivals])
                end = ended[stage, kind, microbatch] = start + seconds(action)
                done.append(Action(stage, action.kind, microbatch, start, end))
                remaining -= 1
        if remaining == before:
            raise ValueError("the schedule deadlocks")
    return timed
