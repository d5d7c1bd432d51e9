"""Constraints of each pipeline schedule, and CSV schedules (no torch)."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from harness.util.errors import ConfigError


@dataclass(frozen=True)
class ScheduleRule:
    """Stages and microbatches that a torch schedule accepts (torch/distributed/pipelining/schedules.py)."""

    name: str
    stages_per_rank: str
    """``one``, ``many`` (at least two), or ``two``."""
    placement: str
    """``loop``: rank r has stages r, r + P, ...; ``v``: rank r has stages r and 2P - 1 - r."""
    microbatches: str
    """``any``; ``stages``: at least one per stage; ``rounds``: a multiple of max(1, microbatches // P)."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are taken in two passes (zero bubble, arXiv:2401.10241)."""

    @property
    def stages_in_words(self) -> str:
        """Number of stages a rank must hold, for error messages."""
        return {"one": "one stage", "two": "two stages", "many": "two or more stages"}[self.stages_per_rank]

    def takes_stages(self, per_rank: int) -> bool:
        """Whether a rank may hold this many stages."""
        return {"one": per_rank == 1, "two": per_rank == 2, "many": per_rank >= 2}[self.stages_per_rank]

    def takes_microbatches(self, microbatches: int, pp: int, per_rank: int) -> bool:
        """Whether the schedule can run this many microbatches."""
        if self.microbatches == "stages":
            return microbatches >= pp * per_rank
        return self.microbatches == "any" or microbatches % max(1, microbatches // pp) == 0

    def microbatches_in_words(self, microbatches: int, pp: int, per_rank: int) -> str:
        """The rule that takes_microbatches checks, for error messages."""
        if self.microbatches == "stages":
            return f"{self.name} needs at least as many microbatches as there are stages, {pp * per_rank}"
        rounds = microbatches // pp
        return (
            f"{self.name} runs {microbatches} microbatches over parallelism.pp={pp} in {rounds} rounds, and "
            f"needs a multiple of {rounds}"
        )


SCHEDULES = {
    rule.name: rule
    for rule in (
        ScheduleRule("GPipe", "one", "loop", "any"),
        ScheduleRule("1F1B", "one", "loop", "stages"),
        ScheduleRule("Interleaved1F1B", "many", "loop", "rounds"),
        ScheduleRule("LoopedBFS", "many", "loop", "any"),
        ScheduleRule("InterleavedZeroBubble", "many", "loop", "rounds", splits_backward=True),
        ScheduleRule("ZBVZeroBubble", "two", "v", "any", splits_backward=True),
        ScheduleRule("DualPipeV", "two", "v", "stages", splits_backward=True),
    )
}

_ACTION = re.compile(r"^(\d+)([A-Z_]+)(\d+)$")
Pass = tuple[int, str, int]
"""Stage, ``F``, ``B``, ``I`` or ``W``, microbatch."""


@dataclass(frozen=True)
class CsvSchedule:
    """A schedule read from a file."""

    stages_of_rank: list[list[int]]
    """Stages of every rank, ascending."""
    num_microbatches: int
    """Microbatches that every stage runs."""
    digest: str
    """SHA-256 of the file, twelve hex digits."""
    passes_of_rank: list[list[Pass]]
    """Passes of every rank, in order."""

    @property
    def num_stages(self) -> int:
        """Number of stages on all ranks."""
        return sum(len(stages) for stages in self.stages_of_rank)


def read_csv_schedule(path: str, pp: int) -> CsvSchedule:
    """Read torch's compute-only CSV and check that it runs every stage and microbatch exactly once, in an
    order that ends.

    Raises:
        ConfigError: the file is missing, has another number of ranks, is incomplete, or its ranks wait for
            each other.
    """
    field = "parallelism.pp_schedule_csv"
    if not Path(path).is_file():
        raise ConfigError(field, path, "no such file")
    with open(path, newline="") as file:
        rows = [[cell.strip() for cell in row if cell.strip()] for row in csv.reader(file) if row]
    if len(rows) != pp:
        raise ConfigError(
            field, path, f"has {len(rows)} rows; needs one per pipeline rank, parallelism.pp={pp}"
        )
    passes: list[list[Pass]] = [[] for _ in rows]
    for row, own in zip(rows, passes, strict=True):
        for cell in row:
            match = _ACTION.match(cell)
            if match is None or match[2] not in ("F", "B", "I", "W"):
                raise ConfigError(field, path, f"cell {cell!r} is not <stage><F|B|I|W><microbatch>, like 0F0")
            own.append((int(match[1]), match[2], int(match[3])))
    stages_of_rank = [sorted({stage for stage, _, _ in row}) for row in passes]
    stages = sorted(stage for row in stages_of_rank for stage in row)
    if stages != list(range(len(stages))):
        raise ConfigError(field, path, f"stages {stages} are not 0, 1, 2, ... each on one rank")
    kinds: dict[tuple[int, int], str] = defaultdict(str)
    for stage, kind, number in chain.from_iterable(passes):
        kinds[stage, number] += kind
    microbatches = len({number for _, number in kinds})
    wanted = {(stage, number) for stage in stages for number in range(microbatches)}
    if kinds.keys() != wanted or any(found.count("F") != 1 for found in kinds.values()):
        raise ConfigError(
            field, path, f"every stage needs one F of each of the microbatches 0 to {microbatches - 1}"
        )
    if any(found.replace("F", "") not in ("B", "IW") for found in kinds.values()):
        rule = "every stage and microbatch needs one B, or one I and one W after it"
        raise ConfigError(field, path, rule)
    if waiting := _waiting(passes, stages[-1]):
        rule = f"the ranks wait for each other, or for themselves, for ever: {', '.join(waiting)}"
        raise ConfigError(field, path, rule, "an order in which each pass comes after those that it needs")
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return CsvSchedule(stages_of_rank, microbatches, digest, passes)


def _waiting(passes: list[list[Pass]], last: int) -> list[str]:
    """Run all ranks, and say for each that cannot end at which pass it waits for which other one.

    torch places a send and its receive, in the order of both ranks, where such a run makes them. So if all
    end, sends and receives do too, also one after another, as one communicator executes them.
    """
    done: set[Pass] = set()
    following, moved = [0] * len(passes), True

    def missing(stage: int, kind: str, number: int) -> list[Pass]:
        needed = [(stage - 1, "F")] if kind == "F" else [(stage, "F"), (stage + 1, "B")]
        found = [(other, of, number) for other, of in needed if 0 <= other <= last]
        return [] if kind == "W" else [each for each in found if each not in done]

    while moved:
        moved = False
        for rank, row in enumerate(passes):
            while following[rank] < len(row) and not missing(*row[following[rank]]):
                stage, kind, number = row[following[rank]]
                # The first half of a backward pass, I, has what the stage before it waits for.
                done.add((stage, "B" if kind == "I" else kind, number))
                following[rank], moved = following[rank] + 1, True
    stopped = [row[here] for row, here in zip(passes, following, strict=True) if here < len(row)]
    return ["{}{}{} for {}{}{}".format(*own, *missing(*own)[0]) for own in stopped]
