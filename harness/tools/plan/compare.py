"""Plans of several jobs: a table of points, and two jobs line by line.

``harness plan -m parallelism.tp=1,2,4`` and ``harness plan ... against="parallelism.tp=8"``, where
``A`` is the job of the command line, ``B`` the same job with the overrides of ``against``.
"""

import shlex
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from harness.compose.composer import Composed, compose_job
from harness.compose.verb import Result
from harness.config.fields import leaves
from harness.config.job import Job, differing_numerics
from harness.metrics.console import progress
from harness.tools.plan.config import ALONE, PlanJob
from harness.tools.plan.make import calibration_of, make_plan
from harness.tools.plan.plan import PARTS, Plan, Speed
from harness.tools.plan.render import as_dict, devices, figure_columns, in_short, mesh_of, part_name
from harness.util.errors import ConfigError, UserError, as_typed
from harness.util.tables import Column, Table, aligned_facts, columns_of, to_text
from harness.util.words import counted, dollars, figure, formatted, gib, seconds, shortened, summed

REASON_CHARS = 120
VALUE_CHARS = 40
NEGLIGIBLE = 1e-6
"""Fraction of a step, or of the memory, below which a difference is rounding."""
ONE_PLAN = (*ALONE, "picture")
"""Fields that ask for more than a plan."""
FITS = {None: "unknown", True: "yes", False: "NO"}

_SIZES = columns_of("""
    parameters                parameters  counted
    non_embedding_parameters  non-emb.    counted
    tokens                    tokens      counted
    flops                     FLOPs       .3g
""")
_COSTS = columns_of("""
    gpu_hours                 GPU-hours   figure
    dollars                   price       dollars
""")


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
    data = list[dict[str, Any]]()
    rows = list[dict[str, Any]]()
    with progress(len(points), seconds=10.0) as begin:
        for point in points:
            own = [override for override in point.overrides if override not in common]
            name = " ".join(own) or "-"
            begin(name)
            if point.job is None:
                data.append({"overrides": point.overrides, "legal": False, "reason": point.reason})
                reason = shortened(point.reason, REASON_CHARS)
                rows.append({"point": name, "fits": f"illegal: {reason}"})
                continue
            plan = make_plan(point.job.plain, calibration_of(point.job))
            figures = in_short(plan)
            data.append({"overrides": point.overrides, "legal": True, **figures})
            layout = mesh_of(plan.job.parallelism)
            rows.append({"point": name, "layout": layout, **figures, "fits": FITS[plan.fits]})
    known = [figures for figures in data if figures["legal"]]
    total: dict[str, Any] = {"points": len(known)}
    for name in ("tokens", "flops", "gpu_hours", "dollars"):
        total[name] = summed(figures[name] for figures in known)
    sizes_differ = len({(figures["parameters"], figures["tokens"]) for figures in known}) > 1
    columns = [
        Column("point", "point"),
        Column("layout", "layout"),
        *figure_columns("tokens/s each"),
        Column("fits", "fits"),
    ]
    if sizes_differ:
        columns += _SIZES
    if sizes_differ or any(figures["dollars"] is not None for figures in known):
        columns += _COSTS
    notes = []
    if sizes_differ:
        hours = "hours unknown"
        if total["gpu_hours"] is not None:
            hours = f"{figure(total['gpu_hours'])} GPU-hours"
        if total["dollars"] is not None:
            hours += f", {dollars(total['dollars'])}"
        sums = f"{counted(total['tokens'])} tokens, {total['flops']:.3g} FLOPs, {hours}"
        notes = [f"all {total['points']}: {sums}", "FLOPs: those of MFU, with full attention"]
    table = Table(columns, rows, notes=notes, missing="")
    return Result({"points": data, "total": total}, to_text(table))


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


def changed_fields(a: Job, b: Job) -> list[dict[str, Any]]:
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
            found.append({"name": name, "numerics": name in numerics, "a": x, "b": y})
    return found


def render_differences(a: Plan, b: Plan) -> str:
    """Format the comparison: fields, memory, communication, the step, and what all steps cost."""
    facts = []
    for name, plan in (("A", a), ("B", b)):
        layout = f": {mesh_of(plan.job.parallelism)}" if plan.job.world_size > 1 else ""
        facts.append((name, f"{plan.job.name} on {devices(plan)}{layout}"))
    fields = []
    for each in changed_fields(a.job, b.job):
        values = [shortened(as_typed(each[plan]), VALUE_CHARS) for plan in "ab"]
        fields.append((each["name"], *values, "numbers" if each["numerics"] else ""))
    first = _memory(a)
    second = _memory(b)
    if a.memory_limit is not None and b.memory_limit is not None:
        first["left"] = a.memory_limit - a.peak
        second["left"] = b.memory_limit - b.peak
    blocks = [
        aligned_facts(facts),
        to_text(Table.of_cells(("field", "A", "B", "changes"), fields), "  "),
        _sizes("memory at its peak, GiB on the fullest rank", "kind", first, second),
    ]
    if a.traffic or b.traffic:
        title = "communication in a step, GiB that the busiest rank sends"
        blocks.append(_sizes(title, "axis", _sent(a), _sent(b)))
    if a.speed is not None and b.speed is not None:
        blocks.append(_step(a.speed, b.speed))
    else:
        blocks.append("a step: unknown; a plan without against says what to set\n")
    blocks.append(_totals(a, b))
    return "\n".join(blocks)


def differences_as_dict(a: Plan, b: Plan) -> dict[str, Any]:
    """The comparison as plain containers for JSON."""
    return {"a": as_dict(a), "b": as_dict(b), "fields": changed_fields(a.job, b.job)}


def _step(a: Speed, b: Speed) -> str:
    """A table of the parts of a step.

    The change is what a part adds to the device time of a token, as a fraction of A's whole time. It compares
    steps of other sizes, and other numbers of ranks.
    """
    slower = a.tokens_per_second_per_rank / b.tokens_per_second_per_rank
    rows = list[tuple[str, ...]]()
    for part in PARTS:
        x = a.parts[part]
        y = b.parts[part]
        change = slower * y / b.step_seconds - x / a.step_seconds
        if max(x, y) > NEGLIGIBLE * a.step_seconds:
            rows.append((part_name(part), seconds(x), seconds(y), f"{change:+.1%}"))
    steps = (seconds(a.step_seconds), seconds(b.step_seconds))
    rows.append(("the step", *steps, f"{slower - 1:+.1%}"))
    title = "a step, predicted; change: of A's device time for a token\n"
    return title + _table("part", rows, "change")


def _memory(plan: Plan) -> dict[str, float]:
    """Bytes of each kind on the fullest rank, and their sum, ``peak``."""
    fullest = max(plan.memory, key=lambda rank: rank.peak)
    return {**fullest.kinds, "peak": fullest.peak}


def _sent(plan: Plan) -> dict[str, float]:
    """Bytes that the busiest rank sends, by axis and collective."""
    sent: dict[str, float] = defaultdict(float)
    for line in plan.traffic:
        sent[f"{line.axis} {line.collective}"] += line.bytes
    return sent


def _table(name: str, rows: Sequence[Sequence[str]], change: str, indent: str = "  ") -> str:
    headings = (name, "A", "B", change)
    return to_text(Table.of_cells(headings, rows, right=(1, 2, 3)), indent)


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
            rows.append((name, gib(before), gib(after), sign + gib(change)))
    return f"{title}\n" + _table(heading, rows, "B - A")


def _totals(a: Plan, b: Plan) -> str:
    first = _figures(a)
    second = _figures(b)
    rows = []
    for name in first | second:
        x = first.get(name)
        y = second.get(name)
        form = ".1%" if name == "MFU" else figure
        cells = [formatted(value, form, "unknown") for value in (x, y)]
        change = f"{y / x - 1:+.1%}" if x and y else ""
        if x or y:
            rows.append((name, *cells, change))
    rows.append(("fits", FITS[a.fits], FITS[b.fits], ""))
    return _table("", rows, "change", indent="")


def _figures(plan: Plan) -> dict[str, float | None]:
    """Figures of the job as a whole, by their display names; none without a known time."""
    if plan.speed is None:
        return {}
    rate = plan.speed.tokens_per_second_per_rank
    return {
        "tokens/s per GPU": rate,
        "tokens/s in all": rate * plan.job.world_size,
        "MFU": plan.speed.mfu,
        "GPU-hours of all steps": plan.gpu_hours,
        "dollars": plan.dollars,
    }
