"""What would make a job fit: single changes of it, each composed and planned as if it had been typed.

If no layout of a search fits: more ranks, or changes of the closest layout that a search does not try.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any

from harness.compose.composer import Composer
from harness.compose.overrides import OVERRIDE
from harness.compose.verb import Result
from harness.config.cluster import ClusterConfig
from harness.config.fields import with_value
from harness.config.job import Job, differing_numerics
from harness.tools.plan.config import GPUS, PLANNER_FIELDS, PlanJob
from harness.tools.plan.make import calibration_of, make_plan
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import device_name, mesh_of
from harness.tools.plan.search import Candidate, NothingFits, Search, search
from harness.tools.plan.space import MODES, Space
from harness.util.errors import ConfigError, UserError, divisors
from harness.util.tables import Column, Table, figure, gib, to_text

Change = tuple[str, ...]
"""Overrides that are added to those of the job."""
FACTORS = (2, 4, 8)
"""By how much a degree of parallelism, the number of chunks or the number of devices is multiplied."""
FACTORS_OF_RANKS = (2, 4, 8, 16, 32, 64)
"""By how much a failed search multiplies the number of ranks, until a layout fits."""
LEAST_CONTEXT = 4096
"""Tokens that context parallelism leaves a rank at least. It is for long sequences: Llama 3 has 8,192 tokens
on a rank (arXiv:2407.21783, table 4)."""
LEAST_MEMORY = {
    "activation_checkpoint.mode": "full",
    "parallelism.pp_schedule": "1F1B",
    "parallelism.pp_layers_per_stage": None,
    "parallelism.pp_microbatch_size": 1,
}
"""Values of searched fields that take little memory. With them a search has a hundredth of the points."""
CLOSEST = 3
"""Changes that are shown although they are not enough."""


@dataclass(frozen=True)
class Remedy:
    """A changed job, and its plan."""

    changes: tuple[Change, ...]
    """One change, or two."""
    plan: Plan
    changes_numbers: bool
    """Whether it computes other numbers."""
    takes_more: bool
    """Whether it takes more devices."""

    @property
    def overrides(self) -> list[str]:
        """The overrides of all changes; of a field that two set, the last."""
        return list({each.partition("=")[0]: each for change in self.changes for each in change}.values())

    @property
    def typed(self) -> str:
        return " ".join(self.overrides)

    @property
    def rate(self) -> float | None:
        """Predicted tokens per second of a device; None if unknown."""
        speed = self.plan.speed
        return None if speed is None or self.offloads else speed.tokens_per_second_per_rank

    @property
    def offloads(self) -> bool:
        """Whether it keeps parameters on the host, so that its time is unknown: copies are not planned."""
        return self.plan.job.parallelism.cpu_offload

    @property
    def order(self) -> tuple[float, ...]:
        """Sort key: cheapest first."""
        if not self.plan.fits:
            return (True, self.plan.peak)
        return (False, self.changes_numbers, self.takes_more, self.rate is None, -(self.rate or 0.0))


def kinds_of_change(job: Job) -> Iterator[list[Change]]:
    """Yield the changes of each kind, the smallest first; some may not be legal."""
    layout, mode = job.parallelism, job.activation_checkpoint.mode
    stronger = MODES[MODES.index(mode) + 1 :] if mode in MODES else MODES[-1:]
    yield [(f"activation_checkpoint.mode={each}",) for each in stronger]
    *smaller, _ = divisors(job.microbatch_size)
    if layout.pp > 1:
        yield [(f"parallelism.pp_microbatch_size={size}",) for size in reversed(smaller)]
    else:
        yield [_batch(job, layout.data_parallel, size) for size in reversed(smaller)]
    for axis in ("dp_shard", "tp", "cp", "pp"):
        yield [change for factor in FACTORS if (change := _moved(job, axis, factor))]
    if job.model.moe.enabled:
        yield [(f"parallelism.ep={layout.ep * factor}",) for factor in FACTORS]
    yield [change for factor in FACTORS if (change := _on_more_devices(job, factor))]
    yield from kinds_not_searched(job)


def kinds_not_searched(job: Job) -> Iterator[list[Change]]:
    """Yield those of ``kinds_of_change`` that a search does not try."""
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


def _batch(job: Job, replicas: int, local: int | None = None) -> Change:
    """The global batch as before, in passes of at most ``local`` sequences; a pipeline gets all in one."""
    share = job.global_batch_size // replicas
    size = share if local is None else gcd(local, share)
    return (f"training.global_batch_size={job.global_batch_size}", f"training.local_batch_size={size}")


def _moved(job: Job, axis: str, factor: int) -> Change | None:
    """Multiply the degree of an axis, and divide that of a data-parallel axis; the ranks stay the same."""
    degrees = job.parallelism.degrees
    givers = [each for each in ("dp_shard", "dp_replicate") if each != axis and degrees[each] % factor == 0]
    more = degrees[axis] * factor
    if not givers or (axis == "tp" and job.cluster.nodes_for(job.world_size)[1] % more):
        return None
    if axis == "cp" and job.training.seq_len < more * LEAST_CONTEXT:
        return None
    after = degrees | {axis: more, givers[0]: degrees[givers[0]] // factor}
    changed = [f"parallelism.{name}={degree}" for name, degree in after.items() if degree != degrees[name]]
    local = None if after["pp"] > 1 else job.local_batch_size
    return (*changed, *_batch(job, after["dp_replicate"] * after["dp_shard"], local))


def _on_more_devices(job: Job, factor: int) -> Change | None:
    """Multiply dp_shard and the number of devices."""
    layout, more = job.parallelism, multiply_ranks(job.cluster, job.world_size, factor)
    if more is None or job.global_batch_size % (layout.data_parallel * factor):
        return None
    local = None if layout.pp > 1 else job.local_batch_size
    batch = _batch(job, layout.data_parallel * factor, local)
    return (f"parallelism.dp_shard={layout.dp_shard * factor}", *more, *batch)


def remedies(
    plan: Plan,
    overrides: Sequence[str],
    kinds: Callable[[Job], Iterable[list[Change]]] = kinds_of_change,
    headroom: float = 0.0,
) -> list[Remedy]:
    """Plan changes of a job that does not fit: of each kind the smallest that is enough, else the largest.

    If each that is enough has other numbers, more devices or an unknown time, a second change is added to
    the one of the others that takes the least memory. ``overrides`` compose the job; ``headroom`` is the
    fraction of the usable memory that must stay free.

    Returns:
        Those that fit, cheapest first: by device time for a token, then those with unknown time, on more
        devices, with other numbers. Then those that do not fit but take less memory, the smallest first.
    """
    composer = Composer("plan", PlanJob)
    found = _smallest_changes(composer, plan, overrides, kinds(plan.job), headroom)
    plain = [each for each in found if not (each.changes_numbers or each.takes_more or each.offloads)]
    if plain and not any(each.plan.fits for each in plain):
        first = min(plain, key=lambda each: each.plan.peak)
        typed, more = [*overrides, *first.overrides], kinds(first.plan.job)
        found += [
            replace(each, changes=(*first.changes, *each.changes))
            for each in _smallest_changes(composer, first.plan, typed, more, headroom)
            if each.plan.fits and not (each.takes_more or each.offloads)
        ]
    return sorted(found, key=lambda each: each.order)


def _smallest_changes(
    composer: Composer, plan: Plan, overrides: Sequence[str], kinds: Iterable[list[Change]], headroom: float
) -> list[Remedy]:
    """Plan the smallest change of each kind that fits, or else the best if it takes less memory.

    A larger change of a kind mostly takes less memory than a smaller one. More pipeline ranks may take more,
    so the smallest is tried, too.
    """
    before = plan.job

    @cache
    def composed(change: Change) -> PlanJob | None:
        """The changed job; None if it is illegal or the same."""
        try:
            job: PlanJob = composer.job([*overrides, *change])
        except ConfigError:
            return None
        return None if job.plain == before else job

    @cache
    def remedy(change: Change) -> Remedy:
        job = composed(change)
        assert job is not None, "only legal changes are planned"
        numbers, more = differing_numerics(before, job.plain), job.world_size > before.world_size
        made = make_plan(job.plain, calibration_of(job))
        return Remedy((change,), with_headroom(made, headroom), bool(numbers), more)

    def placed(change: Change) -> tuple[Job, tuple[int, int]] | None:
        """The changed job and its nodes, however they are given."""
        if (job := composed(change)) is None:
            return None
        return replace(job.plain, cluster=before.cluster), job.cluster.nodes_for(job.world_size)

    found = []
    for legal in ([change for change in changes if composed(change)] for changes in kinds):
        if not legal:
            continue
        best = remedy(legal[-1])
        if best.plan.fits:
            first = bisect_left(legal[:-1], True, key=lambda change: remedy(change).plan.fits is True)
            best = remedy(legal[first])
        else:
            best = min(best, remedy(legal[0]), key=lambda each: each.plan.peak)
        if best.plan.peak < plan.peak:
            [change] = best.changes
            for each in change:
                # Leave out what the job would have anyway.
                fewer = tuple(other for other in change if other != each)
                change = fewer if placed(fewer) == placed(change) else change
            found.append(replace(best, changes=(change,)))
    return found


def with_headroom(plan: Plan, headroom: float) -> Plan:
    """Return a plan whose memory limit leaves a fraction of it free."""
    limit = plan.memory_limit
    return plan if limit is None or not headroom else replace(plan, memory_limit=(1 - headroom) * limit)


def render_remedies(plan: Plan, found: Sequence[Remedy]) -> str:
    """Format what makes a job fit, and what comes closest."""
    enough = [each for each in found if each.plan.fits]
    others = [each for each in found if not each.plan.fits]
    closest = others[:CLOSEST]
    if not enough:
        title = "no change makes it fit" + ("; the closest are\n" if closest else "\n")
        return f"{title}{_table(plan, closest)}search=true tries every layout of these ranks\n"
    alone = any(len(each.changes) == 1 for each in enough)
    title = (
        "each of these makes it fit" if alone else "no single change makes it fit, but each of these pairs"
    )
    text = f"{title}; cheapest first\n{_table(plan, enough)}"
    if closest:
        named = ", ".join(f"{each.typed} ({gib(each.plan.peak)} GiB)" for each in closest)
        more = f", and {len(others) - len(closest)} others" if len(others) > len(closest) else ""
        text += f"not enough alone: {named}{more}\n"
    return text


def _table(plan: Plan, found: Sequence[Remedy]) -> str:
    unit, before, ranks = device_name(plan), plan.speed, plan.job.world_size
    columns = [
        *(Column("change", "change"), Column("memory_peak", "GiB", gib)),
        Column("rate", f"tokens/s a {unit}", str),
        *(Column("faster", "speed", "+.1%"), Column("besides", "besides")),
    ]
    rows = []
    for each, data in zip(found, remedies_as_dict(found), strict=True):
        besides = [f"{data['world_size']} {unit}s"] if data["world_size"] != ranks else []
        besides += ["changes the numbers"] if each.changes_numbers else []
        rate = "unknown" if each.rate is None else figure(each.rate)
        row = data | {"change": each.typed, "rate": rate, "besides": ", ".join(besides)}
        if each.rate is not None and before is not None:
            row["faster"] = each.rate / before.tokens_per_second_per_rank - 1
        rows.append(row)
    return to_text(Table(columns, rows, missing=""), "  ")


def remedies_as_dict(found: Sequence[Remedy]) -> list[dict[str, Any]]:
    """The changes as plain containers for JSON."""
    return [
        {
            "overrides": each.overrides,
            "fits": each.plan.fits,
            "memory_peak": each.plan.peak,
            "memory_limit": each.plan.memory_limit,
            "tokens_per_second_per_rank": each.rate,
            "world_size": each.plan.job.world_size,
            "changes_numbers": each.changes_numbers,
        }
        for each in found
    ]


def what_would_fit(failed: NothingFits, overrides: Sequence[str]) -> Result:
    """Return a failed search, of the job of ``overrides``, as a result whose error says what would work."""
    found, space = failed.search, failed.search.space
    layout = failed.closest.overrides(space.base.parallelism)
    of_search = PLANNER_FIELDS - {"calibration"}
    typed = [each for each in overrides if (match := OVERRIDE.match(each)) and match["key"] not in of_search]
    closest = with_headroom(make_plan(failed.closest.job(space.base), found.calibration), found.headroom)
    changed = remedies(closest, [*typed, *layout], kinds_not_searched, found.headroom)
    ranks, more, best = more_ranks(found)
    works = []
    if best is not None:
        assert best.plan.speed is not None
        rate = figure(best.plan.speed.tokens_per_second_per_rank)
        works.append(
            f"{' '.join(more)} ({ranks} ranks: {mesh_of(best.plan.job.parallelism)}, {best.point.mode}, "
            f"{gib(best.plan.peak)} GiB, {rate} tokens/s a {device_name(best.plan)})"
        )
    for each in changed:
        if each.plan.fits:
            numbers = ", changes the numbers" if each.changes_numbers else ""
            works.append(f"{each.typed} (the closest layout then takes {gib(each.plan.peak)} GiB{numbers})")
    too_few = f"; up to {ranks:,} ranks are too few" if best is None and ranks > space.world else ""
    would_work = f"; would work: {', or '.join(works)}" if works else ""
    data = {
        "world_size": space.world,
        "best": [],
        "too_large": found.too_large,
        "illegal": dict(found.illegal.most_common()),
        "closest": {"overrides": layout, "memory_peak": closest.peak, "memory_limit": closest.memory_limit},
        "remedies": remedies_as_dict(changed),
        "more_ranks": {
            "tried": ranks,
            "overrides": list(more),
            "fits": best is not None,
            "layout": None if best is None else best.point.overrides(space.base.parallelism),
            "memory_peak": None if best is None else best.plan.peak,
            "step_seconds": None if best is None else best.seconds,
        },
    }
    return Result(data, error=UserError(f"{failed}{too_few}{would_work}"))


def more_ranks(failed: Search) -> tuple[int, Change, Candidate | None]:
    """Search for layouts of 2, 4, 8, ... times as many ranks, until one fits.

    Returns the most ranks that were tried, their overrides, and the fastest layout of those with the least
    memory; None if even these do not fit.
    """
    base, space = failed.space.base, failed.space
    fixed = {name: value for name, value in LEAST_MEMORY.items() if name not in space.typed}
    if base.training.seq_len < 2 * LEAST_CONTEXT and "parallelism.cp" not in space.typed:
        fixed["parallelism.cp"] = 1
    tried: tuple[int, Change] = (space.world, ())
    for factor in FACTORS_OF_RANKS:
        change = multiply_ranks(base.cluster, space.world, factor)
        if change is None:
            break
        larger = base
        numbers = (override.split("=") for override in change)
        for name, value in (fixed | {name: int(number) for name, number in numbers}).items():
            larger = with_value(larger, name, value)
        world = space.world * factor
        wider = Space(larger, world, space.typed | set(fixed))
        try:
            return world, change, search(wider, 1, failed.calibration, failed.headroom).best[0]
        except ConfigError:
            break  # the network between nodes is unknown
        except UserError:
            tried = world, change  # no layout fits, or is legal
    return *tried, None
