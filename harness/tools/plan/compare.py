"""Plans of several jobs: a table of points, and two jobs line by line.

``harness plan -m parallelism.tp=1,2,4`` and ``harness plan ... against="parallelism.tp=8"``, where
``A`` is the job of the command line, ``B`` the same job with the overrides of ``against``.
"""

import shlex
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

from harness.compose.composer import Composed, compose_job
from harness.compose.scale import count
from harness.compose.verb import Result
from harness.config.fields import leaves
from harness.config.job import Job, differing_numerics
from harness.metrics.console import progress
from harness.tools.plan.config import PlanJob
from harness.tools.plan.make import calibration_of, make_plan
from harness.tools.plan.plan import PARTS, Plan, Speed
from harness.tools.plan.render import as_dict, devices, figure_columns, in_short, mesh_of, part_name
from harness.util.errors import ConfigError, UserError, as_typed
from harness.util.tables import Column, Table, aligned_facts, to_text
from harness.util.words import counted, dollars, figure, formatted, gib, seconds, shortened, summed

REASON_CHARS = 120
VALUE_CHARS = 40
NEGLIGIBLE = 1e-6
"""Fraction of a step, or of the memory, below which a difference is rounding."""
ONE_PLAN = ("search", "rehearse", "calibrate", "picture", "against")
"""Fields that ask for more than a plan."""
FITS = {None: "unknown", True: "yes", False: "NO"}


def compare(points: list[Composed]) -> Result:
    """Plan the points of a multirun, in one table; points that break a rule have it in the place of values.

    Raises:
        UserError: no point is legal.
        ConfigError: a field asks for more than a plan.
    """
    legal = [point.job for point in points if point.job is not None]
    if not legal:
        raise UserError(points[0].reason)
    for name in ONE_PLAN:
        if value := getattr(legal[0], name):
            rule = "works on one job, and -m has several"
            raise ConfigError(name, value, rule, f"{name} without -m")
    common = set.intersection(*(set(point.overrides) for point in points))
    plans = list[Plan]()
    data = list[dict[str, Any]]()
    rows = list[dict[str, Any]]()
    with progress(len(points), seconds=10.0) as begin:
        for point in points:
            own = [override for override in point.overrides if override not in common]
            row: dict[str, Any] = {"point": " ".join(own) or "-"}
            begin(row["point"])
            rows.append(row)
            if point.job is None:
                data.append({"overrides": point.overrides, "legal": False, "reason": point.reason})
                row["fits"] = f"illegal: {shortened(point.reason, REASON_CHARS)}"
                continue
            plan = make_plan(point.job.plain, calibration_of(point.job))
            figures = in_short(plan)
            plans.append(plan)
            data.append({"overrides": point.overrides, "legal": True, **figures})
            row |= {"layout": mesh_of(plan.job.parallelism), **figures, "fits": FITS[plan.fits]}
    known = [figures for figures in data if figures["legal"]]
    total: dict[str, Any] = {"points": len(known)}
    for name in ("tokens", "flops", "gpu_hours", "dollars"):
        total[name] = summed(figures[name] for figures in known)
    sizes_differ = len({(figures["parameters"], figures["tokens"]) for figures in known}) > 1
    unit = "rank" if any(plan.accelerator is None for plan in plans) else "GPU"
    columns = [
        Column("point", "point"),
        Column("layout", "layout"),
        *figure_columns("tokens/s each"),
        Column("fits", "fits"),
    ]
    if sizes_differ:
        columns += [
            Column("parameters", "parameters", counted),
            Column("non_embedding_parameters", "non-emb.", counted),
            Column("tokens", "tokens", counted),
            Column("flops", "FLOPs", ".3g"),
        ]
    if sizes_differ or any(figures["dollars"] is not None for figures in known):
        columns += [
            Column("gpu_hours", f"{unit}-hours", figure),
            Column("dollars", "price", dollars),
        ]
    notes = _total_in_words(total, plans, unit) if sizes_differ else ()
    table = Table(columns, rows, notes=notes, missing="")
    return Result({"points": data, "total": total}, to_text(table))


def _total_in_words(total: dict[str, Any], plans: Sequence[Plan], unit: str) -> tuple[str, str]:
    hours = "hours unknown"
    if total["gpu_hours"] is not None:
        hours = f"{figure(total['gpu_hours'])} {unit}-hours"
    if total["dollars"] is not None:
        hours += f", {dollars(total['dollars'])}"
    ratios = [
        6 * count(plan.job.model, "active") / plan.accounting.flops_per_token_full for plan in plans
    ]
    return (
        f"all {total['points']}: {counted(total['tokens'])} tokens, {total['flops']:.3g} FLOPs, {hours}",
        "FLOPs: those of MFU, with full attention; 6 x non-embedding parameters x tokens is "
        f"{min(ratios):.0%} to {max(ratios):.0%} of them",
    )


def job_against(job: PlanJob, overrides: Sequence[str]) -> PlanJob:
    """Compose the job to compare with: that of the command line, ``overrides``, with those of ``against``."""
    text = job.against or ""
    own = [override for override in overrides if override.partition("=")[0] != "against"]
    try:
        composed: PlanJob = compose_job(
            [*own, *shlex.split(text)], config_name="plan", schema=PlanJob
        )
    except ValueError as error:
        rule = f"cannot be read: {error}"
        raise ConfigError("against", text, rule, "'field=value field=value'") from None
    except UserError as error:
        raise UserError(f"against: {error}") from error
    for name in ONE_PLAN:
        if getattr(composed, name):
            rule = f"compares plans, and {name} asks for more"
            raise ConfigError("against", text, rule, "fields of a job")
    if composed == replace(job, against=None):
        rule = "does not change the job"
        raise ConfigError("against", text or "''", rule, "another value of a field")
    return composed


def changed_fields(a: Job, b: Job) -> list[tuple[str, bool, Any, Any]]:
    """Return name, whether it changes the numbers, and both values of each field that differs.

    Of two models only the name is listed.
    """
    first, second = ({name: value for name, _, value in leaves(job)} for job in (a, b))
    numerics = differing_numerics(a, b)
    found = []
    for name in first | second:
        x = first.get(name)
        y = second.get(name)
        is_of_other_model = name.startswith("model.") and a.model.name != b.model.name
        if x != y and name != "name" and (name == "model.name" or not is_of_other_model):
            found.append((name, name in numerics, x, y))
    return found


def cost_changes(a: Speed, b: Speed) -> dict[str, float]:
    """Return what each part of the step adds to the device time of a token, as a fraction of A's whole time.

    Unlike the time of a step, it compares steps of other sizes, and other numbers of ranks.
    """
    slower = a.tokens_per_second_per_rank / b.tokens_per_second_per_rank
    changes = {}
    for part in PARTS:
        before = a.parts[part] / a.step_seconds
        changes[part] = slower * b.parts[part] / b.step_seconds - before
    return changes


def render_differences(a: Plan, b: Plan) -> str:
    """Format the comparison: fields, memory, communication, the step, and what all steps cost."""
    facts = []
    for name, plan in (("A", a), ("B", b)):
        layout = f": {mesh_of(plan.job.parallelism)}" if plan.job.world_size > 1 else ""
        facts.append((name, f"{plan.job.name} on {devices(plan)}{layout}"))
    fields = []
    for name, numerics, x, y in changed_fields(a.job, b.job):
        values = [shortened(as_typed(value), VALUE_CHARS) for value in (x, y)]
        fields.append((name, *values, "numbers" if numerics else ""))
    memory, sent = zip(*(_bytes_of(plan) for plan in (a, b)), strict=True)
    if a.memory_limit is not None and b.memory_limit is not None:
        memory[0]["left"] = a.memory_limit - a.peak
        memory[1]["left"] = b.memory_limit - b.peak
    blocks = [
        aligned_facts(facts),
        _table(("field", "A", "B", "changes"), fields, right=()),
        _sizes("memory at its peak, GiB on the fullest rank", "kind", *memory),
    ]
    if a.traffic or b.traffic:
        title = "communication in a step, GiB that the busiest rank sends"
        blocks.append(_sizes(title, "axis", *sent))
    if a.speed is not None and b.speed is not None:
        changes = cost_changes(a.speed, b.speed)
        parts = list[tuple[str, ...]]()
        for part, change in changes.items():
            x, y = (speed.parts[part] for speed in (a.speed, b.speed))
            if max(x, y) > NEGLIGIBLE * a.speed.step_seconds:
                parts.append((part_name(part), seconds(x), seconds(y), f"{change:+.1%}"))
        steps = [seconds(speed.step_seconds) for speed in (a.speed, b.speed)]
        parts.append(("the step", *steps, f"{sum(changes.values()):+.1%}"))
        title = "a step, predicted; change: of A's device time for a token\n"
        blocks.append(title + _table(("part", "A", "B", "change"), parts))
    else:
        blocks.append("a step: unknown; a plan without against says what to set\n")
    blocks.append(_totals(a, b))
    return "\n".join(blocks)


def differences_as_dict(a: Plan, b: Plan) -> dict[str, Any]:
    """The comparison as plain containers for JSON; ``cost_change`` is in fractions of A's device time."""
    first, second = (_bytes_of(plan)[0] for plan in (a, b))
    return {
        "a": as_dict(a),
        "b": as_dict(b),
        "fields": [
            {"name": name, "numerics": numerics, "a": x, "b": y}
            for name, numerics, x, y in changed_fields(a.job, b.job)
        ],
        "memory_change": {kind: second[kind] - size for kind, size in first.items()},
        "cost_change": cost_changes(a.speed, b.speed) if a.speed and b.speed else None,
    }


def _bytes_of(plan: Plan) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes of each kind on the fullest rank and their sum, ``peak``; and what the busiest rank sends."""
    fullest = max(plan.memory, key=lambda rank: rank.peak)
    sent: dict[str, float] = defaultdict(float)
    for line in plan.traffic:
        sent[f"{line.axis} {line.collective}"] += line.bytes
    return {**fullest.kinds, "peak": fullest.peak}, sent


def _table(
    headings: Sequence[str],
    cells: Sequence[Sequence[str]],
    right: Collection[int] = (1, 2, 3),
    indent: str = "  ",
) -> str:
    return to_text(Table.of_cells(headings, cells, right), indent)


def _sizes(title: str, heading: str, a: dict[str, float], b: dict[str, float]) -> str:
    """A table of bytes of both plans, and what the second one has more."""
    rows = []
    for name in a | b:
        before = a.get(name, 0.0)
        after = b.get(name, 0.0)
        change = after - before
        if abs(change) <= NEGLIGIBLE * max(before, after):
            change = 0.0
        if before or after:
            sign = "+" if change > 0 else ""
            rows.append((name, *map(_signed, (before, after)), sign + _signed(change)))
    return f"{title}\n" + _table((heading, "A", "B", "B - A"), rows)


def _signed(size: float) -> str:
    return f"-{gib(-size)}" if size < 0 else gib(size)


def _totals(a: Plan, b: Plan) -> str:
    unit = "GPU" if a.accelerator is not None and b.accelerator is not None else "rank"
    first, second = (in_short(plan) for plan in (a, b))
    for plan, figures in ((a, first), (b, second)):
        rate = figures["tokens_per_second_per_rank"]
        figures["in_all"] = None if rate is None else rate * plan.job.world_size
    rows = []
    for name, key in (
        (f"tokens/s a {unit}", "tokens_per_second_per_rank"),
        ("tokens/s in all", "in_all"),
        ("MFU", "mfu"),
        (f"{unit}-hours of all steps", "gpu_hours"),
        ("dollars", "dollars"),
    ):
        x = first[key]
        y = second[key]
        form = ".1%" if key == "mfu" else figure
        if x is not None or y is not None:
            cells = [formatted(value, form, "unknown") for value in (x, y)]
            rows.append((name, *cells, "" if None in (x, y) else f"{y / x - 1:+.1%}"))
    rows.append(("fits", FITS[a.fits], FITS[b.fits], ""))
    return _table(("", "A", "B", "change"), rows, indent="")
