"""Rehearsed ranks compared with their plan, as text and as JSON (no torch)."""

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from harness.tools.plan.machine import machine_of
from harness.tools.plan.parameters import parameters_of
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import mesh_of
from harness.tools.plan.step_time import StepModel
from harness.tools.rehearse.figures import OUT_OF_MEMORY, RankFigures
from harness.util.tables import Table, to_text
from harness.util.words import gib, seconds

SHOWN = 6
"""Products and kernels that are listed."""
HOST_KINDS = {"exchange": "all_to_all"}
"""NCCL's names of collectives, and the plan's."""
FORMS = {
    "bytes": gib,
    "seconds": seconds,
    "FLOPs": lambda value: f"{value / 1e12:,.4g} T",
    "count": lambda value: f"{value:,.0f}",
}


class Quantity(NamedTuple):
    """One quantity, rehearsed and planned.

    Attributes:
        unit: ``bytes``, ``FLOPs``, ``count`` or ``seconds``.
        planned: None if the plan does not predict it.
    """

    name: str
    unit: str
    rehearsed: float
    planned: float | None = None

    @property
    def difference(self) -> float | None:
        """Rehearsed over planned, less one; None if nothing was planned."""
        return self.rehearsed / self.planned - 1 if self.planned else None


def render(plan: Plan, ranks: Sequence[RankFigures]) -> str:
    """Return the text that ``harness rehearse`` prints."""
    job = plan.job
    head = f"{job.name}, {mesh_of(job.parallelism)} ({job.world_size} ranks)"
    text = f"rehearsed: {head} on a virtual {ranks[0].device}\n"
    for figures in ranks:
        stage = f", pipeline rank {figures.pp_rank}" if job.parallelism.pp > 1 else ""
        text += f"\nrank {figures.rank}{stage}\n"
        failure = figures.failure
        if failure is not None:
            when = "while the model was built"
            if failure.step is not None:
                when = f"in step {failure.step + 1}"
            name = "OUT OF MEMORY" if failure.kind == OUT_OF_MEMORY else f"FAILED ({failure.kind})"
            message = " ".join(failure.message.split())
            text += f"  {name} {when} at {failure.where}: {message}\n"
        for title, lines in compared(figures, plan).items():
            if lines:
                text += _table(title, lines)
        if failure is None:
            text += "".join(f"  {line}\n" for line in _facts(plan, figures))
    return text


def as_dict(plan: Plan, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """Return the same as plain containers, in bytes, seconds and FLOPs."""
    job = plan.job
    shown = []
    for rank in ranks:
        against_plan: list[dict[str, Any]] = []
        for lines in compared(rank, plan).values():
            against_plan += [{**each._asdict(), "difference": each.difference} for each in lines]
        shown.append(dataclasses.asdict(rank) | {"against_plan": against_plan})
    return {"job": {"id": job.id, **job.to_dict()}, "world_size": job.world_size, "ranks": shown}


def compared(figures: RankFigures, plan: Plan) -> dict[str, list[Quantity]]:
    """Return the quantities of each table; of a rank that failed, only its memory."""
    tables = {"memory, GiB": memory_lines(figures, plan)}
    if figures.failure is None:
        # The planned time is the GPU's.
        step = None if plan.speed is None else plan.speed.step_seconds
        tables["a step"] = [
            Quantity("kernels", "count", figures.launches),
            Quantity("products", "count", figures.product_count),
            Quantity("launched by the host", "count", figures.host_launches),
            Quantity("products", "FLOPs", figures.product_flops),
            Quantity("host (planned: GPU)", "seconds", figures.host_seconds, step),
            Quantity("host CPU (planned: GPU)", "seconds", figures.cpu_seconds, step),
        ]
        tables["collectives"] = traffic_lines(figures, plan)
    return tables


def memory_lines(figures: RankFigures, plan: Plan) -> list[Quantity]:
    """Compare the device memory: parameters, gradients, optimizer state and the peaks."""
    memory = plan.memory[figures.pp_rank]
    planned = {
        "parameters": memory.kinds["parameters"],
        "gradients": parameters_of(plan.job, figures.pp_rank).parameter_bytes,
        "optimizer": memory.kinds["optimizer"],
        "allocated": memory.allocated,
        "reserved": memory.peak,
    }
    return [
        Quantity(name, "bytes", figures.memory[name], value)
        for name, value in planned.items()
        if name in figures.memory
    ]


def traffic_lines(figures: RankFigures, plan: Plan) -> list[Quantity]:
    """Compare a rank's collectives and their bytes, by axis and kind, with those planned for its stages."""
    here: dict[tuple[str, str, str], float] = defaultdict(float)
    planned: dict[tuple[str, str, str], float] = defaultdict(float)
    for each in figures.collectives:
        kind = HOST_KINDS.get(each.kind, each.kind)
        here[each.axis, kind, "count"] += each.count
        here[each.axis, kind, "bytes"] += each.bytes
    machine = machine_of(plan.job)
    traffic = [] if machine is None else StepModel(plan.job, machine).traffic(figures.pp_rank)
    for expected in traffic:
        # The plan does not know in how many rounds Muon exchanges its volume.
        if expected.axis != "optimizer":
            planned[expected.axis, expected.collective, "count"] += expected.count
        planned[expected.axis, expected.collective, "bytes"] += expected.bytes
    pairs = sorted({key[:2] for key in [*here, *planned]})
    return [
        Quantity(f"{axis} {kind}", unit, here[axis, kind, unit], planned.get((axis, kind, unit)))
        for axis, kind in pairs
        for unit in ("count", "bytes")
    ]


def _table(title: str, lines: Sequence[Quantity]) -> str:
    # If all lines are in bytes, the title names the unit.
    units = {"FLOPs": ", FLOPs", "bytes": ", GiB sent"} if "GiB" not in title else {}
    rows = []
    for line in lines:
        form = FORMS[line.unit]
        planned = "" if line.planned is None else form(line.planned)
        difference = "" if line.difference is None else f"{line.difference:+.1%}"
        name = f"{line.name}{units.get(line.unit, '')}"
        rows.append((name, form(line.rehearsed), planned, difference))
    headings = (title, "rehearsed", "planned", "difference")
    return to_text(Table.of_cells(headings, rows, right=(1, 2, 3)), "  ")


def _facts(plan: Plan, figures: RankFigures) -> list[str]:
    lines = []
    step = None if plan.speed is None else plan.speed.step_seconds
    if step is not None and figures.cpu_seconds > step:
        took = f"a step takes {seconds(figures.cpu_seconds)} of CPU time here, and {seconds(step)} of the GPU"
        lines.append(f"THE HOST WOULD KEEP THE GPU WAITING: {took} by the plan")
    kernels = Counter[str]()
    for name, count in figures.kernels.items():
        kernels[short_name(name)] += count
    products = []
    for each in figures.products:
        batch = f"{each.batch} x " if each.batch > 1 else ""
        shape = f"{batch}[{each.rows}, {each.inner}] [{each.inner}, {each.columns}] {each.formats}"
        products.append(f"{each.count} x {shape}, {each.flops / 1e12:.4g} TFLOP")
    compiled = []
    if figures.graphs:
        took = f"{figures.graphs} graphs in {seconds(figures.compile_seconds)}"
        compiled.append(f"{took}, {figures.recompilations} again after the first step")
    waits = [f"{wait.where} {wait.count} x ({wait.what})" for wait in figures.waits]
    facts = {
        "kernels": _some([f"{count} x {name}" for name, count in kernels.most_common()]),
        "products": _some(products),
        "host waits for the device": waits or ["never"],
        "copies": [
            f"{copy.how} {copy.count} x, {copy.bytes / 2**10:,.1f} KiB" for copy in figures.copies
        ],
        "compiled": compiled,
        "communicators made in this step": figures.communicators,
        "calls that the stand-in does not implement (they failed)": figures.unknown,
    }
    lines += [f"{title}: {'; '.join(items)}" for title, items in facts.items() if items]
    if figures.allocation_retries:
        lines.append(f"the allocator released its cache {figures.allocation_retries} times")
    lines.append(
        f"built in {seconds(figures.build_seconds)}, first step {seconds(figures.first_step_seconds)}, "
        f"{figures.steps} steps"
    )
    return lines


def _some(items: list[str]) -> list[str]:
    more = [f"{len(items) - SHOWN} more"] if len(items) > SHOWN else []
    return items[:SHOWN] + more


# The functor in the name of one of torch's elementwise kernels, but for those that only call
# another one.
_INNER = re.compile(
    r"\b(?!gpu_kernel_impl|ReduceOp\b|[AB]?(?:Unary|Binary)Functor\b)"
    r"(?:\w*[Ff]unctor\w*|\w+_kernel(?:_impl|_cuda)?|launch_\w+|\w*Ops?)\b"
)


def short_name(kernel: str) -> str:
    """Return a kernel's name without namespaces and arguments; of a template also its functor."""
    plain = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    outer, _, arguments = plain.partition("<")
    outer = outer.partition("(")[0].rsplit("::", 1)[-1]
    found = _INNER.search(arguments)
    return f"{outer}<{found[0]}>" if found else outer
