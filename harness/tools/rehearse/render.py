"""Rehearsed ranks as text and as JSON."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

from harness.tools.plan.plan import Plan
from harness.tools.plan.render import mesh_of
from harness.tools.rehearse.comparison import Line, memory_lines, traffic_lines, work_lines
from harness.tools.rehearse.figures import OUT_OF_MEMORY, RankFigures
from harness.util.tables import GIB, aligned, gib, seconds

SHOWN = 6
"""Products and kernels that are listed."""
SMALLEST = 0.01 * GIB
"""Bytes below this are shown as less than it."""


def render(plan: Plan, ranks: Sequence[RankFigures]) -> str:
    """Return the text that ``harness rehearse`` prints."""
    job = plan.job
    head = f"{job.name}, {mesh_of(job.parallelism)} ({job.world_size} ranks)"
    return "\n".join(
        [f"rehearsed: {head} on a virtual {ranks[0].device}\n", *(_rank(plan, r) for r in ranks)]
    )


def as_dict(plan: Plan, ranks: Sequence[RankFigures]) -> dict[str, Any]:
    """Return the same as plain containers, in bytes, seconds and FLOPs."""
    job = plan.job
    return {
        "job": {"id": job.id, **job.to_dict()},
        "world_size": job.world_size,
        "ranks": [
            dataclasses.asdict(rank)
            | {
                "against_plan": [
                    dataclasses.asdict(line) | {"difference": line.difference} for line in _lines(plan, rank)
                ]
            }
            for rank in ranks
        ],
    }


def _lines(plan: Plan, figures: RankFigures) -> list[Line]:
    lines = memory_lines(figures, plan)
    if figures.failure is None:
        lines += [*work_lines(figures, plan), *traffic_lines(figures, plan)]
    return lines


def _rank(plan: Plan, figures: RankFigures) -> str:
    blocks = [
        f"rank {figures.rank}" + (f", pipeline rank {figures.pp_rank}" if plan.job.parallelism.pp > 1 else "")
    ]
    if figures.failure is not None:
        blocks.append(_failure(figures))
    blocks.append(_table("memory, GiB", memory_lines(figures, plan)))
    if figures.failure is None:
        blocks.append(_table("a step", work_lines(figures, plan)))
        lines = traffic_lines(figures, plan)
        if lines:
            blocks.append(_table("collectives", lines))
        blocks.append(_facts(plan, figures))
    return "".join(block if block.endswith("\n") else f"{block}\n" for block in blocks)


def _failure(figures: RankFigures) -> str:
    failure = figures.failure
    assert failure is not None
    when = "while the model was built" if failure.step is None else f"in step {failure.step + 1}"
    name = "OUT OF MEMORY" if failure.kind == OUT_OF_MEMORY else f"FAILED ({failure.kind})"
    message = " ".join(failure.message.split())
    return f"  {name} {when} at {failure.where}: {message}\n"


def _table(title: str, lines: Sequence[Line]) -> str:
    if not lines:
        return ""
    # If all lines are in bytes, the title names the unit.
    units = {"FLOPs": ", FLOPs", "bytes": ", GiB sent"} if len({line.unit for line in lines}) > 1 else {}
    rows = [
        {
            title: f"{line.name}{units.get(line.unit, '')}",
            "rehearsed": _figure(line.unit, line.rehearsed),
            "planned": "" if line.planned is None else _figure(line.unit, line.planned),
            "difference": "" if line.difference is None else f"{line.difference:+.1%}",
        }
        for line in lines
    ]
    return aligned(rows, left={title})


def _figure(unit: str, value: float) -> str:
    if unit == "bytes":
        return gib(value) if value == 0 or value >= SMALLEST else f"<{gib(SMALLEST)}"
    if unit == "seconds":
        return seconds(value)
    return f"{value / 1e12:,.4g} T" if unit == "FLOPs" else f"{value:,.0f}"


def _facts(plan: Plan, figures: RankFigures) -> str:
    """Return the lines that are not compared with the plan."""
    lines = []
    step = None if plan.speed is None else plan.speed.step_seconds
    if step is not None and figures.cpu_seconds > step:
        host, gpu = seconds(figures.cpu_seconds), seconds(step)
        took = f"a step takes {host} of CPU time here, and {gpu} of the GPU by the plan"
        lines.append(f"THE HOST WOULD KEEP THE GPU WAITING: {took}")
    kernels = Counter[str]()
    for name, count in figures.kernels.items():
        kernels[short_name(name)] += count
    lines += _some("kernels", [f"{count} x {name}" for name, count in kernels.most_common()])
    lines += _some(
        "products",
        [
            f"{p.count} x {f'{p.batch} x ' if p.batch > 1 else ''}[{p.rows}, {p.inner}] "
            f"[{p.inner}, {p.columns}] {p.formats}, {p.flops / 1e12:.4g} TFLOP"
            for p in figures.products
        ],
    )
    waits = [f"{wait.where} {wait.count} x ({wait.what})" for wait in figures.waits]
    lines.append(f"host waits for the device: {'; '.join(waits) or 'never'}")
    copies = [f"{copy.how} {copy.count} x, {_size(copy.bytes)}" for copy in figures.copies]
    lines.append(f"copies: {'; '.join(copies) or 'none'}")
    if figures.graphs:
        lines.append(
            f"compiled: {figures.graphs} graphs in {seconds(figures.compile_seconds)}, "
            f"{figures.recompilations} again after the first step"
        )
    if figures.allocation_retries:
        lines.append(f"the allocator released its cache {figures.allocation_retries} times")
    if figures.communicators:
        lines.append(f"communicators made in this step: {'; '.join(figures.communicators)}")
    if figures.unknown:
        lines.append(
            f"calls that the stand-in does not implement (they failed): {', '.join(figures.unknown)}"
        )
    lines.append(
        f"built in {seconds(figures.build_seconds)}, first step {seconds(figures.first_step_seconds)}, "
        f"{figures.steps} steps"
    )
    return "".join(f"  {line}\n" for line in lines)


def _some(title: str, items: list[str]) -> list[str]:
    more = f"; {len(items) - SHOWN} more" if len(items) > SHOWN else ""
    return [f"{title}: {'; '.join(items[:SHOWN])}{more}"] if items else []


# The functor in the name of one of torch's elementwise kernels.
_INNER = re.compile(r"\w*(?:[Ff]unctor|_kernel_cuda|_cuda_kernel|Ops|Op)\b(?:_\w+)?")


def short_name(kernel: str) -> str:
    """Return a kernel's name without namespaces and arguments; of a template also its functor."""
    plain = kernel.replace("(anonymous namespace)::", "").removeprefix("void ")
    outer, _, arguments = plain.partition("<")
    outer = outer.partition("(")[0].rsplit("::", 1)[-1]
    found = _INNER.search(arguments)
    return f"{outer}<{found[0]}>" if found else outer


def _size(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= 0.01 * GIB else f"{value / 2**10:,.1f} KiB"
