"""What would make a job fit: single changes of it, each composed and planned as if it had been typed."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.compose.composer import Composer
from harness.config.cluster import ClusterConfig
from harness.config.job import Job, differing_numerics
from harness.tools.plan.config import GPUS, PlanJob
from harness.tools.plan.make import calibration_of, make_plan
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import figure_columns, in_short
from harness.tools.plan.space import MODES
from harness.util.errors import ConfigError, divisors
from harness.util.tables import Column, Table, to_text

Change = tuple[str, ...]
"""Overrides that are added to those of the job."""
FACTORS = (2, 4, 8)
"""By how much a degree of parallelism, the number of chunks or the number of devices is
multiplied."""
LEAST_CONTEXT = 4096
"""Tokens that context parallelism leaves a rank at least. It is for long sequences: Llama 3 has 8,192 tokens
on a rank (arXiv:2407.21783, table 4)."""
CLOSEST = 3
"""Changes that are shown although they are not enough."""


@dataclass(frozen=True)
class Remedy:
    """A changed job, and its plan."""

    overrides: Change
    """One change, or two."""
    plan: Plan
    """Its plan. Without a time if it keeps parameters on the host: copies are not planned."""
    changes_numbers: bool
    """Whether it computes other numbers."""
    takes_more: bool
    """Whether it takes more devices."""

    @property
    def typed(self) -> str:
        return " ".join(self.overrides)

    @property
    def offloads(self) -> bool:
        """Whether it keeps parameters on the host."""
        return self.plan.job.parallelism.cpu_offload

    @property
    def is_plain(self) -> bool:
        """Whether the job computes the same on the same devices, in a known time."""
        return not (self.changes_numbers or self.takes_more or self.offloads)

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: cheapest first; those that do not fit last, the smallest first."""
        if not self.plan.fits:
            return (True, self.plan.peak)
        speed = self.plan.speed
        time = math.inf if speed is None else 1 / speed.tokens_per_second_per_rank
        return (False, self.changes_numbers, self.takes_more, time)


def kinds_of_change(job: Job) -> Iterator[list[Change]]:
    """Yield the changes of each kind, the smallest first; some may not be legal."""
    layout = job.parallelism
    mode = job.activation_checkpoint.mode
    stronger = MODES[MODES.index(mode) + 1 :] if mode in MODES else MODES[-1:]
    yield [(f"activation_checkpoint.mode={each}",) for each in stronger]
    *smaller, _ = divisors(job.microbatch_size)
    if layout.pp > 1:
        yield [(f"parallelism.pp_microbatch_size={size}",) for size in reversed(smaller)]
    else:
        yield [_with_degrees(job, {}, size) for size in reversed(smaller)]
    for axis in ("dp_shard", "tp", "cp", "pp"):
        yield [change for factor in FACTORS if (change := _moved(job, axis, factor))]
    if job.model.moe.enabled:
        yield [(f"parallelism.ep={layout.ep * factor}",) for factor in FACTORS]
    yield [change for factor in FACTORS if (change := _on_more_devices(job, factor))]
    yield [(f"training.loss_chunks={job.training.loss_chunks * factor}",) for factor in FACTORS]
    yield [("parallelism.reshard_after_forward=always",)]
    yield [("parallelism.cpu_offload=true",)]
    yield [("precision.param_dtype=bfloat16",)]
    yield [("precision.reduce_dtype=bfloat16",)]
    yield [("optimizer.state_dtype=bfloat16",)]
    yield [("precision.param_dtype=bfloat16", "precision.master_dtype=bfloat16")]


def multiply_ranks(cluster: ClusterConfig, world: int, factor: int) -> Change | None:
    """Return the overrides for ``factor`` times as many ranks; None if one machine would not have them."""
    ranks = world * factor
    if cluster.is_here:
        return (f"cluster.ranks={ranks}",) if ranks <= GPUS else None
    nodes, per_node = cluster.nodes_for(world)
    if cluster.ranks is None and per_node == cluster.ranks_per_node:
        return (f"cluster.nodes={nodes * factor}",)
    more = () if cluster.nodes is None else (f"cluster.nodes={nodes * factor}",)
    return (f"cluster.ranks={ranks}", *more)


def _with_degrees(job: Job, moved: dict[str, int], local: int) -> Change:
    """Change degrees. The global batch is as before, in passes of at most ``local`` sequences.

    A pipeline gets all of them in one.
    """
    after = job.parallelism.degrees | moved
    share = -(-job.global_batch_size // (after["dp_replicate"] * after["dp_shard"]))
    size = share if after["pp"] > 1 else math.gcd(local, share)
    return (
        *(f"parallelism.{name}={after[name]}" for name in after if name in moved),
        f"training.global_batch_size={job.global_batch_size}",
        f"training.local_batch_size={size}",
    )


def _moved(job: Job, axis: str, factor: int) -> Change | None:
    """Multiply the degree of an axis, and divide that of a data-parallel axis; the ranks stay the same."""
    degrees = job.parallelism.degrees
    givers = [
        each
        for each in ("dp_shard", "dp_replicate")
        if each != axis and degrees[each] % factor == 0
    ]
    more = degrees[axis] * factor
    if not givers or (axis == "tp" and job.cluster.nodes_for(job.world_size)[1] % more):
        return None
    if axis == "cp" and job.training.seq_len < more * LEAST_CONTEXT:
        return None
    moved = {axis: more, givers[0]: degrees[givers[0]] // factor}
    return _with_degrees(job, moved, job.local_batch_size)


def _on_more_devices(job: Job, factor: int) -> Change | None:
    """Multiply dp_shard and the number of devices."""
    layout = job.parallelism
    more = multiply_ranks(job.cluster, job.world_size, factor)
    if more is None or job.global_batch_size < layout.data_parallel * factor:
        return None
    moved = {"dp_shard": layout.dp_shard * factor}
    return (*_with_degrees(job, moved, job.local_batch_size), *more)


def remedies(plan: Plan, overrides: Sequence[str]) -> list[Remedy]:
    """Plan changes of a job that does not fit: of each kind the smallest that is enough, else the best.

    If each that is enough has other numbers, more devices or an unknown time, a second change is
    added to the one of the others that takes the least memory. ``overrides`` compose the job.

    Returns:
        Those that fit, cheapest first: by device time for a token, then those with unknown time, on
        more devices, with other numbers. Then those that do not fit but take less memory, the
        smallest first.
    """
    composer = Composer("plan", PlanJob)
    found = [*_smallest_changes(composer, plan, overrides)]
    plain = [each for each in found if each.is_plain]
    if plain and not any(each.plan.fits for each in plain):
        first = min(plain, key=lambda each: each.plan.peak)
        for second in _smallest_changes(composer, first.plan, [*overrides, *first.overrides]):
            if second.plan.fits and not (second.takes_more or second.offloads):
                # Of a field that both set, the second value counts.
                both = [*first.overrides, *second.overrides]
                fields = {each.partition("=")[0]: each for each in both}
                found.append(replace(second, overrides=tuple(fields.values())))
    return sorted(found, key=lambda each: each.order)


def _smallest_changes(composer: Composer, plan: Plan, overrides: Sequence[str]) -> Iterator[Remedy]:
    """Plan the smallest change of each kind that fits, or else the best if it takes less memory."""
    before = plan.job

    def composed(change: Change) -> PlanJob | None:
        """The changed job; None if it is illegal or the same."""
        try:
            job: PlanJob = composer.job([*overrides, *change])
        except ConfigError:
            return None
        return None if job.plain == before else job

    for changes in kinds_of_change(before):
        best = None
        least = plan.peak
        for change in changes:
            job = composed(change)
            if job is None:
                continue
            made = make_plan(job.plain, calibration_of(job))
            if job.parallelism.cpu_offload:
                made = replace(made, speed=None)
            if made.fits or made.peak < least:
                least = made.peak
                numbers = bool(differing_numerics(before, job.plain))
                best = Remedy(change, made, numbers, job.world_size > before.world_size)
            if made.fits:
                break
        if best is None:
            continue
        for each in best.overrides:
            # Leave out what the job would have anyway.
            fewer = tuple(other for other in best.overrides if other != each)
            job = composed(fewer)
            if job is not None and _runs_alike(job.plain, best.plan.job):
                best = replace(best, overrides=fewer)
        yield best


def _runs_alike(a: Job, b: Job) -> bool:
    """Whether two jobs are the same on the same nodes, however these are given."""
    nodes = [job.cluster.nodes_for(job.world_size) for job in (a, b)]
    return nodes[0] == nodes[1] and replace(a, cluster=b.cluster) == b


def render_remedies(found: Sequence[Remedy]) -> str:
    """Format what makes a job fit, or what comes closest."""
    enough = [each for each in found if each.plan.fits]
    columns = [
        Column("change", "change"),
        *figure_columns("tokens/s per GPU"),
        Column("besides", "besides"),
    ]
    rows = []
    for each in enough or found[:CLOSEST]:
        besides = [f"{each.plan.job.world_size} GPUs"] if each.takes_more else []
        besides += ["changes the numbers"] if each.changes_numbers else []
        besides += ["unknown time"] if each.plan.speed is None else []
        rows.append({"change": each.typed, "besides": ", ".join(besides), **in_short(each.plan)})
    table = to_text(Table(columns, rows, missing=""), "  ")
    if enough:
        return f"each of these makes it fit; cheapest first\n{table}"
    closest = "; the closest are\n" if found else "\n"
    return f"no change makes it fit{closest}{table}search=true tries every layout of these ranks\n"


def remedies_as_dict(found: Sequence[Remedy]) -> list[dict[str, Any]]:
    """The changes as plain containers for JSON."""
    return [
        {
            "overrides": each.overrides,
            "world_size": each.plan.job.world_size,
            "changes_numbers": each.changes_numbers,
            **in_short(each.plan),
        }
        for each in found
    ]
