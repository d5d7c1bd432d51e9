"""Rules of pipelines: stages, schedules and microbatches."""

from __future__ import annotations

import csv
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import chain, count, product
from pathlib import Path
from typing import TYPE_CHECKING

from harness.config.model import ModelConfig
from harness.util.errors import ConfigError, divisors

if TYPE_CHECKING:
    from harness.config.parallelism import ParallelismConfig


@dataclass(frozen=True)
class ScheduleRule:
    """Stages and microbatches that a torch schedule accepts (torch/distributed/pipelining/schedules.py)."""

    name: str
    stages_per_rank: str
    """``one``, ``many`` (at least two), or ``two``."""
    placement: str
    """``loop``: rank r has stages r, r + P, ...; ``v``: rank r has stages r and 2P - 1 - r."""
    microbatches: str
    """``any``; ``stages``: at least one per stage; ``rounds``: a multiple of max(1, microbatches //
    P)."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are taken in two passes (zero bubble,
    arXiv:2401.10241)."""

    @property
    def stages_in_words(self) -> str:
        """Number of stages a rank must hold, for error messages."""
        return {"one": "one stage", "two": "two stages", "many": "two or more stages"}[
            self.stages_per_rank
        ]

    def takes_stages(self, per_rank: int) -> bool:
        return {"one": per_rank == 1, "two": per_rank == 2, "many": per_rank >= 2}[
            self.stages_per_rank
        ]

    def takes_microbatches(self, microbatches: int, pp: int, per_rank: int) -> bool:
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
        return sum(len(stages) for stages in self.stages_of_rank)


def read_csv_schedule(path: str, pp: int) -> CsvSchedule:
    """Read torch's compute-only CSV and check that it runs every stage and microbatch exactly once,
    in an order that ends.
    """
    refusal = partial(ConfigError, "parallelism.pp_schedule_csv", path)
    if not Path(path).is_file():
        raise refusal("no such file")
    with open(path, newline="") as file:
        rows = [row for row in csv.reader(file) if row]
    if len(rows) != pp:
        raise refusal(f"has {len(rows)} rows; needs one per pipeline rank, parallelism.pp={pp}")
    passes: list[list[Pass]] = []
    stages_of_rank = []
    for row in rows:
        of_rank = []
        for cell in filter(None, map(str.strip, row)):
            match = _ACTION.match(cell)
            if match is None or match[2] not in ("F", "B", "I", "W"):
                raise refusal(f"cell {cell!r} is not <stage><F|B|I|W><microbatch>, like 0F0")
            of_rank.append((int(match[1]), match[2], int(match[3])))
        passes.append(of_rank)
        stages_of_rank.append(sorted({stage for stage, _, _ in of_rank}))
    stages = sorted(chain.from_iterable(stages_of_rank))
    if stages != list(range(len(stages))):
        raise refusal(f"stages {stages} are not 0, 1, 2, ... each on one rank")
    kinds: dict[tuple[int, int], str] = defaultdict(str)
    for stage, kind, number in chain.from_iterable(passes):
        kinds[stage, number] += kind
    microbatches = len({number for _, number in kinds})
    wanted = set(product(stages, range(microbatches)))
    in_order = ("FB", "FIW")
    if kinds.keys() != wanted or any(found not in in_order for found in kinds.values()):
        raise refusal(
            f"every stage needs one F of each of the microbatches 0 to {microbatches - 1}, and after it "
            "one B, or one I and then one W"
        )
    if waiting := _waiting(passes, stages[-1]):
        rule = f"the ranks wait for each other, or for themselves, for ever: {', '.join(waiting)}"
        raise refusal(rule, "an order in which each pass comes after those that it needs")
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
    return CsvSchedule(stages_of_rank, microbatches, digest, passes)


def _waiting(passes: list[list[Pass]], last: int) -> list[str]:
    """Run all ranks, and say for each that cannot end at which pass it waits for which other one.

    torch places a send and its receive, in the order of both ranks, where such a run makes them. So
    if all end, sends and receives do too, also one after another, as one communicator executes
    them.
    """
    done: set[Pass] = set()
    following = [0] * len(passes)
    moved = True

    def missing(stage: int, kind: str, number: int) -> list[Pass]:
        needed = [(stage - 1, "F")] if kind == "F" else [(stage, "F"), (stage + 1, "B")]
        found = [(other, pass_kind, number) for other, pass_kind in needed if 0 <= other <= last]
        return [] if kind == "W" else [other for other in found if other not in done]

    while moved:
        moved = False
        for rank, row in enumerate(passes):
            while following[rank] < len(row) and not missing(*row[following[rank]]):
                stage, kind, number = row[following[rank]]
                # The first half of a backward pass, I, has what the stage before it waits for.
                done.add((stage, "B" if kind == "I" else kind, number))
                following[rank] += 1
                moved = True
    stopped = [row[here] for row, here in zip(passes, following, strict=True) if here < len(row)]
    return ["{}{}{} for {}{}{}".format(*stop, *missing(*stop)[0]) for stop in stopped]


def stages_per_rank(layout: ParallelismConfig, n_layers: int) -> int:
    """Number of stages each pipeline rank holds (the maximum, for a CSV schedule)."""
    total = num_stages(layout, n_layers)
    if layout.pp_schedule_csv is None and total % layout.pp:
        rule = f"the number of stages, {total}, must be a multiple of parallelism.pp={layout.pp}"
        if layout.pp_modules_per_stage:
            schedule = SCHEDULES[layout.pp_schedule]
            stages = [f"{layout.pp * r} stages" for r in (1, 2) if schedule.takes_stages(r)]
            typed = _typed(layout.pp_modules_per_stage)
            raise ConfigError("parallelism.pp_modules_per_stage", typed, rule, stages)
        works = [*fitting_layers_per_stage(layout, n_layers), "null"]
        raise ConfigError(
            "parallelism.pp_layers_per_stage", layout.pp_layers_per_stage, rule, works
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
        if total <= n_layers + 2
        and total % layout.pp == 0
        and schedule.takes_stages(total // layout.pp)
    ]


def _weight(layout: ParallelismConfig, n_layers: int) -> int:
    """Total weight that the automatic split divides: the layers, and the weights of embedding and head."""
    return n_layers + layout.pp_first_stage_less_layers + layout.pp_last_stage_less_layers


def num_stages(layout: ParallelismConfig, n_layers: int) -> int:
    if layout.pp_modules_per_stage:
        return len(layout.pp_modules_per_stage)
    if schedule := layout.csv_schedule:
        return schedule.num_stages
    if layout.pp_layers_per_stage is not None:
        return -(-_weight(layout, n_layers) // layout.pp_layers_per_stage)
    return layout.pp * (1 if SCHEDULES[layout.pp_schedule].stages_per_rank == "one" else 2)


def check_weights(layout: ParallelismConfig, n_layers: int) -> None:
    """Check the weights of embedding and head, also without a pipeline: a search over layouts uses them."""
    for name in ("pp_first_stage_less_layers", "pp_last_stage_less_layers"):
        weight = getattr(layout, name)
        if not 0 <= weight <= 2 * n_layers:
            rule = f"must be at least 0 and at most {2 * n_layers}, twice model.n_layers"
            raise ConfigError(f"parallelism.{name}", weight, rule)


def check_stages(layout: ParallelismConfig, n_layers: int) -> None:
    named = len(layout.pp_modules_per_stage)
    if named:
        check_modules_per_stage(layout.pp_modules_per_stage, n_layers)
    schedule = layout.csv_schedule
    if schedule is not None:
        scheduled = schedule.num_stages
        available = named or n_layers + 2
        if scheduled > available or (named and scheduled < named):
            source = "parallelism.pp_modules_per_stage" if named else f"model.n_layers={n_layers}"
            rule = f"runs {scheduled} stages, but {source} makes {'' if named else 'at most '}{available}"
            raise ConfigError("parallelism.pp_schedule_csv", layout.pp_schedule_csv, rule)
    if named or schedule is not None:
        return
    works = [*fitting_layers_per_stage(layout, n_layers), "null"]
    total = num_stages(layout, n_layers)
    most = min(_weight(layout, n_layers), n_layers + 2)
    if total > most:
        first = layout.pp_first_stage_less_layers
        last = layout.pp_last_stage_less_layers
        rule = (
            f"{total} stages are too many for model.n_layers={n_layers} (embedding and head weigh "
            f"{first} and {last})"
        )
        layers = layout.pp_layers_per_stage
        if layers is not None:
            raise ConfigError("parallelism.pp_layers_per_stage", layers, rule, works)
        raise ConfigError(
            "parallelism.pp", layout.pp, rule, f"at most {most // (total // layout.pp)}"
        )


def split_modules(layout: ParallelismConfig, n_layers: int) -> list[list[str]]:
    """Names of the modules of every stage, in order.

    The automatic split gives every stage the same weight. The embedding counts as
    pp_first_stage_less_layers layers and the head as pp_last_stage_less_layers, so the first and
    the last stage hold fewer layers. The earliest stages get the remainder.
    """
    if layout.pp_modules_per_stage:
        return layout.pp_modules_per_stage
    stages = num_stages(layout, n_layers)
    first = layout.pp_first_stage_less_layers
    last = layout.pp_last_stage_less_layers
    weight, extra = divmod(n_layers + first + last, stages)
    room = [weight + (1 if stage < extra else 0) for stage in range(stages)]
    room[0] = max(0, room[0] - first)
    room[-1] = max(0, room[-1] - last)
    # An embedding or head heavier than a stage takes room from the fullest stages; on a tie, from
    # the ends.
    while sum(room) > n_layers:
        room[max(range(stages), key=lambda s: (room[s], s in (0, stages - 1)))] -= 1
    names: list[list[str]] = []
    layer = 0
    for blocks in room:
        names.append([f"layers.{i}" for i in range(layer, layer + blocks)])
        layer += blocks
    names[0].insert(0, "tok_embeddings")
    names[-1] += ["norm", "output"]
    return names


def stages_of_rank(layout: ParallelismConfig, n_layers: int, pp_rank: int) -> list[int]:
    """Indices of the stages that a pipeline rank holds, ascending."""
    if schedule := layout.csv_schedule:
        return schedule.stages_of_rank[pp_rank]
    total = num_stages(layout, n_layers)
    if SCHEDULES[layout.pp_schedule].placement == "v" and total == 2 * layout.pp:
        return [pp_rank, total - 1 - pp_rank]
    return list(range(pp_rank, total, layout.pp))


def check_modules_per_stage(stages: list[list[str]], n_layers: int) -> None:
    """Raise ConfigError unless the stages hold every module once and in order."""
    wanted = ["tok_embeddings", *(f"layers.{i}" for i in range(n_layers)), "norm", "output"]
    if list(chain.from_iterable(stages)) == wanted and all(stages):
        return
    raise ConfigError(
        "parallelism.pp_modules_per_stage",
        _typed(stages),
        "must name every module once, in the order of the model, and one or more in every stage",
        f"tok_embeddings, layers.0 ... layers.{n_layers - 1}, norm, output",
    )


def _typed(stages: list[list[str]]) -> str:
    text = "[" + ",".join(f"[{','.join(stage)}]" for stage in stages) + "]"
    return text if len(text) <= 100 else f"{text[:96]}...]"


def check_pipeline(
    layout: ParallelismConfig, model: ModelConfig, local_batch_size: int, share: int
) -> None:
    check_weights(layout, model.n_layers)
    if layout.pp == 1:
        return
    if model.tied_embeddings:
        rule = (
            "the model ties its output projection to the embedding table, and the pipeline would put "
            "them on different ranks"
        )
        raise ConfigError("parallelism.pp", layout.pp, rule, "1, or model.tied_embeddings=false")
    if model.mtp.depth:
        rule = (
            "multi-token prediction uses the embedding and the output projection, and the pipeline would "
            "put them on different ranks"
        )
        raise ConfigError("parallelism.pp", layout.pp, rule, "1, or model.mtp.depth=0")
    if local_batch_size % layout.pp_microbatch_size:
        rule = f"must divide training.local_batch_size={local_batch_size}"
        works = divisors(local_batch_size)
        raise ConfigError("parallelism.pp_microbatch_size", layout.pp_microbatch_size, rule, works)
    check_stages(layout, model.n_layers)
    per_rank = stages_per_rank(layout, model.n_layers)
    if from_file := layout.csv_schedule:
        scheduled = from_file.num_microbatches
        rule = f"{layout.pp_schedule_csv} runs {scheduled} microbatches"
        _check_microbatches(layout, local_batch_size, share, scheduled.__eq__, rule)
        return
    schedule = SCHEDULES[layout.pp_schedule]
    if not schedule.takes_stages(per_rank):
        fits = [other.name for other in SCHEDULES.values() if other.takes_stages(per_rank)]
        if layout.pp_layers_per_stage is not None and not layout.pp_modules_per_stage:
            layers = [*fitting_layers_per_stage(layout, model.n_layers), "null"]
            fits.append(f"or parallelism.pp_layers_per_stage={', '.join(map(str, layers))}")
        rule = f"takes {schedule.stages_in_words} per rank, and the split gives {per_rank}"
        raise ConfigError("parallelism.pp_schedule", layout.pp_schedule, rule, fits)
    microbatches = local_batch_size // layout.pp_microbatch_size
    _check_microbatches(
        layout,
        local_batch_size,
        share,
        lambda number: schedule.takes_microbatches(number, layout.pp, per_rank),
        schedule.microbatches_in_words(microbatches, layout.pp, per_rank),
    )


def _check_microbatches(
    layout: ParallelismConfig, batch: int, share: int, fits: Callable[[int], bool], rule: str
) -> None:
    size = layout.pp_microbatch_size
    if fits(batch // size):
        return
    local = [b for b in divisors(share) if b % size == 0 and fits(b // size)]
    smaller = [s for s in divisors(batch) if fits(batch // s)]
    now = batch // size
    near = next(filter(fits, chain(range(now, now + layout.pp + 1), count(1)))) * size
    works = [", ".join(map(str, local))] if local else []
    if smaller:
        works.append(f"parallelism.pp_microbatch_size={', '.join(map(str, smaller))}")
    works.append(f"{near} with training.global_batch_size={near * layout.data_parallel}")
    rule = f"with parallelism.pp_microbatch_size={size} the number of microbatches is {now}, but {rule}"
    raise ConfigError("training.local_batch_size", batch, rule, ", or ".join(works))
