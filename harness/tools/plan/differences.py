"""Compare the plans of two jobs line by line: ``harness plan ... against="parallelism.tp=8"``.

``A`` is the job of the command line, ``B`` the same job with the overrides of ``against``.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from harness.compose.composer import compose_job
from harness.config.fields import NUMERICS, leaves
from harness.config.job import Job
from harness.tools.plan.compare import ONE_PLAN
from harness.tools.plan.config import PlanJob
from harness.tools.plan.plan import KINDS, PARTS, Plan, Traffic
from harness.tools.plan.render import as_dict, devices, mesh_of, part_name
from harness.util.errors import ConfigError, UserError, as_typed
from harness.util.tables import aligned, aligned_facts, figure, gib, seconds, shortened

VALUE_CHARS = 40
MOST_NAMED = 3
"""Kinds of memory, or parts of a step, that a summary names."""
NEGLIGIBLE = 1e-6
"""Fraction of a step, or of the memory, below which a difference is rounding."""
Pair = tuple[Traffic | None, Traffic | None]


def job_against(job: PlanJob, overrides: Sequence[str]) -> PlanJob:
    """Compose the job to compare with.

    Args:
        job: the job of the command line, with ``against``.
        overrides: the overrides of the command line.

    Raises:
        UserError: naming the wrong field.
    """
    text = job.against or ""
    own = [each for each in overrides if each.partition("=")[0] != "against"]
    try:
        others = shlex.split(text)
    except ValueError as error:
        raise ConfigError("against", text, f"cannot be read: {error}", "'field=value field=value'") from None
    try:
        composed: PlanJob = compose_job([*own, *others], config_name="plan", schema=PlanJob)
    except UserError as error:
        raise UserError(f"against: {error}") from error
    for name in ONE_PLAN:
        if getattr(composed, name):
            raise ConfigError("against", text, f"compares plans, and {name} asks for more", "fields of a job")
    if composed == replace(job, against=None):
        raise ConfigError("against", text or "''", "does not change the job", "another value of a field")
    return composed


def changed_fields(a: Job, b: Job) -> list[tuple[str, bool, Any, Any]]:
    """Return name, whether it changes the numbers, and both values of each field that differs.

    Of two models only the name is listed.
    """
    first, second = ({name: (role, value) for name, role, value in leaves(job)} for job in (a, b))
    found = []
    for name in {**first, **second}:
        (role, x), (_, y) = first.get(name, ("", None)), second.get(name, ("", None))
        is_of_other_model = name.startswith("model.") and a.model.name != b.model.name
        if x != y and name != "name" and (name == "model.name" or not is_of_other_model):
            found.append((name, role == NUMERICS, x, y))
    return found


def traffic_pairs(a: Sequence[Traffic], b: Sequence[Traffic]) -> list[Pair]:
    """Pair the lines of communication by axis and collective; of several, first those of equal groups."""
    keys: list[Callable[[Traffic], Any]] = [
        lambda each: (each.axis, each.collective, each.ranks, each.link),
        lambda each: (each.axis, each.collective),
    ]
    left, partners = list(b), dict[int, Traffic]()
    for key in keys:
        for place, one in enumerate(a):
            other = next((each for each in left if key(each) == key(one)), None)
            if place not in partners and other is not None:
                partners[place] = other
                left.remove(other)
    pairs: list[Pair] = [(one, partners.get(place)) for place, one in enumerate(a)]
    return sorted(
        [*pairs, *((None, other) for other in left)], key=lambda pair: PARTS.index(_either(pair).axis)
    )


def cost_changes(a: Plan, b: Plan) -> dict[str, float]:
    """Return what each part of the step adds to the device time of a token, as a fraction of A's whole time.

    Unlike the time of a step, it compares steps of other sizes, and other numbers of ranks.
    """
    assert a.speed is not None and b.speed is not None
    slower = a.speed.tokens_per_second_per_rank / b.speed.tokens_per_second_per_rank
    before, after = (
        {part: speed.parts.get(part, 0.0) / speed.step_seconds for part in PARTS}
        for speed in (a.speed, b.speed)
    )
    return {part: after[part] * slower - before[part] for part in PARTS}


def render_differences(a: Plan, b: Plan) -> str:
    """Format the comparison: fields, memory, communication, the step, and what matters most."""
    jobs = [("A", a), ("B", b)]
    facts = [(name, _job_in_words(plan)) for name, plan in jobs]
    fields = [
        {"field": name, "A": _value(x), "B": _value(y), "changes": "numbers" if numerics else ""}
        for name, numerics, x, y in changed_fields(a.job, b.job)
    ]
    blocks = [
        aligned_facts(facts),
        aligned(fields, {"field", "A", "B", "changes"}),
        "memory at its peak, GiB on the fullest rank\n" + aligned(_memory(a, b), {"kind"}),
    ]
    if a.traffic or b.traffic:
        title = "communication in a step, of the busiest rank\n"
        left = {"axis", "collective", "A over", "B over"}
        blocks.append(title + aligned([_line(pair) for pair in traffic_pairs(a.traffic, b.traffic)], left))
    if a.speed is not None and b.speed is not None:
        title = "a step, predicted; change: of A's device time for a token\n"
        blocks.append(title + aligned(_parts(a, b), {"part"}))
    blocks.append(aligned(_totals(a, b), {""}, indent=""))
    blocks.append(aligned_facts(_summary(a, b)))
    return "\n".join(blocks)


def differences_as_dict(a: Plan, b: Plan) -> dict[str, Any]:
    """The comparison as plain containers for JSON; ``cost_change`` is in fractions of A's device time."""
    known = a.speed is not None and b.speed is not None
    return {
        "a": as_dict(a),
        "b": as_dict(b),
        "fields": [
            {"name": name, "numerics": numerics, "a": x, "b": y}
            for name, numerics, x, y in changed_fields(a.job, b.job)
        ],
        "memory_change": {kind: after - before for kind, before, after in _kinds(a, b)},
        "cost_change": cost_changes(a, b) if known else None,
    }


def _job_in_words(plan: Plan) -> str:
    world = plan.job.world_size
    layout = f": {mesh_of(plan.job.parallelism)}" if world > 1 else ""
    return f"{plan.job.name} on {devices(plan, world)}{layout}"


def _either(pair: Pair) -> Traffic:
    one = pair[0] or pair[1]
    assert one is not None
    return one


def _value(value: object) -> str:
    return shortened(as_typed(value), VALUE_CHARS)


def _signed(change: float, form: Callable[[float], str]) -> str:
    return "-" if change == 0 else f"{'+' if change > 0 else '-'}{form(abs(change))}"


def _percent(change: float) -> str:
    return f"{change:+.1%}"


def _kinds(a: Plan, b: Plan) -> list[tuple[str, float, float]]:
    """Bytes of each kind on the fullest ranks, and their sum."""
    first, second = (max(plan.memory, key=lambda rank: rank.peak) for plan in (a, b))
    kinds = [(kind, first.kinds.get(kind, 0.0), second.kinds.get(kind, 0.0)) for kind in KINDS]
    return [*(each for each in kinds if any(each[1:])), ("peak", first.peak, second.peak)]


def _memory(a: Plan, b: Plan) -> list[dict[str, str]]:
    rows = _kinds(a, b)
    if a.memory_limit is not None and b.memory_limit is not None:
        rows.append(("left", a.memory_limit - a.peak, b.memory_limit - b.peak))
    return [
        {
            "kind": kind,
            "A": _signed(before, gib).removeprefix("+"),
            "B": _signed(after, gib).removeprefix("+"),
            "B - A": _signed(after - before if abs(after - before) > NEGLIGIBLE * a.peak else 0.0, gib),
        }
        for kind, before, after in rows
    ]


def _line(pair: Pair) -> dict[str, str]:
    cells = {"axis": _either(pair).axis, "collective": _either(pair).collective}
    columns: list[tuple[str, Callable[[Traffic], str]]] = [
        ("over", lambda each: f"{each.ranks} {each.link}"),
        ("GiB", lambda each: gib(each.bytes)),
        ("time", lambda each: seconds(each.seconds)),
        ("exposed", lambda each: seconds(each.exposed_seconds)),
    ]
    for title, form in columns:
        for name, one in zip("AB", pair, strict=True):
            cells[f"{name} {title}"] = "" if one is None else form(one)
    exposed = [0.0 if one is None else one.exposed_seconds for one in pair]
    before, after = exposed
    cells["B - A"] = "" if before is None or after is None else _signed(after - before, seconds)
    return cells


def _parts(a: Plan, b: Plan) -> list[dict[str, str]]:
    assert a.speed is not None and b.speed is not None
    changes = cost_changes(a, b)
    rows = [
        (part_name(part), a.speed.parts.get(part, 0.0), b.speed.parts.get(part, 0.0), changes[part])
        for part in PARTS
    ]
    rows.append(("the step", a.speed.step_seconds, b.speed.step_seconds, sum(changes.values())))
    return [
        {"part": name, "A": seconds(x), "B": seconds(y), "change": _percent(change)}
        for name, x, y, change in rows
        if max(x, y) > NEGLIGIBLE * a.speed.step_seconds
    ]


def _totals(a: Plan, b: Plan) -> list[dict[str, str]]:
    """Throughput, MFU, whether it fits, and the cost of all steps."""
    fits = {None: "unknown", True: "yes", False: "NO"}
    rows: list[dict[str, str]] = []
    if a.speed is not None and b.speed is not None:
        unit = "GPU" if a.accelerator is not None and b.accelerator is not None else "rank"
        x, y = a.speed.tokens_per_second_per_rank, b.speed.tokens_per_second_per_rank
        rows += [
            _total(f"tokens/s a {unit}", x, y),
            _total("tokens/s in all", x * a.job.world_size, y * b.job.world_size),
            {"": "MFU", "A": _share(a.speed.mfu), "B": _share(b.speed.mfu), "change": ""},
        ]
        if a.gpu_hours is not None and b.gpu_hours is not None:
            rows.append(_total(f"{unit}-hours of all steps", a.gpu_hours, b.gpu_hours))
        if a.dollars is not None and b.dollars is not None:
            rows.append(_total("dollars", a.dollars, b.dollars))
        if a.kwh is not None and b.kwh is not None:
            rows.append(_total("kWh, GPUs alone", a.kwh, b.kwh))
    return [*rows, {"": "fits", "A": fits[a.fits], "B": fits[b.fits], "change": ""}]


def _total(name: str, a: float, b: float) -> dict[str, str]:
    return {"": name, "A": figure(a), "B": figure(b), "change": _percent(b / a - 1)}


def _share(mfu: float | None) -> str:
    return "" if mfu is None else f"{mfu:.1%}"


def _summary(a: Plan, b: Plan) -> list[tuple[str, str]]:
    """What matters most, in words."""
    rows = []
    if a.speed is None or b.speed is None:
        unknown = " and ".join(name for name, plan in (("A", a), ("B", b)) if plan.speed is None)
        rows.append(("time", f"unknown for {unknown}; a plan without against says what to set"))
    else:
        changes = {part_name(part): change for part, change in cost_changes(a, b).items()}
        slower = sum(changes.values())
        size = f"{abs(slower):.1%} {_more(slower)}"
        rows.append(("time", f"B takes {size} device time for a token{_largest(changes, _percent)}"))
    *kinds, (_, before, after) = _kinds(a, b)
    named = _largest({kind: y - x for kind, x, y in kinds}, lambda change: _signed(change, gib))
    rows.append(("memory", f"B takes {gib(abs(after - before))} GiB {_more(after - before)}{named}"))
    return rows


def _more(change: float) -> str:
    return "less" if change < 0 else "more"


def _largest(changes: dict[str, float], form: Callable[[float], str]) -> str:
    """Name the largest changes, without those that are a hundredth of the largest."""
    ordered = sorted(changes.items(), key=lambda item: -abs(item[1]))[:MOST_NAMED]
    floor = abs(ordered[0][1]) / 100
    named = ", ".join(f"{name} {form(change)}" for name, change in ordered if abs(change) > floor)
    return f": {named}" if named else ""
