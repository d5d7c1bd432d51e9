"""Rehearsed ranks compared with their plan, as text and as JSON (no torch)."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from harness.config.job import Job
from harness.config.pipeline import split_modules, stages_of_rank
from harness.model.spec import block_tensors
from harness.tools.plan.costs import costs_of
from harness.tools.plan.machine import machine_of
from harness.tools.plan.order import pipeline_order
from harness.tools.plan.parameters import muon_update, parameters_of, tp_of
from harness.tools.plan.plan import Plan
from harness.tools.plan.render import mesh_of
from harness.tools.plan.step_time import StepModel
from harness.tools.rehearse.figures import OUT_OF_MEMORY, RankFigures
from harness.util.tables import aligned
from harness.util.words import GIB, gib, seconds

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
    shown = [_as_dict(plan, rank) for rank in ranks]
    return {"job": {"id": job.id, **job.to_dict()}, "world_size": job.world_size, "ranks": shown}


def _as_dict(plan: Plan, figures: RankFigures) -> dict[str, Any]:
    lines = [
        dataclasses.asdict(line) | {"difference": line.difference} for line in _lines(plan, figures)
    ]
    return dataclasses.asdict(figures) | {"against_plan": lines}


def _lines(plan: Plan, figures: RankFigures) -> list[Quantity]:
    lines = memory_lines(figures, plan)
    if figures.failure is None:
        lines += [*work_lines(figures, plan), *traffic_lines(figures, plan)]
    return lines


def _rank(plan: Plan, figures: RankFigures) -> str:
    blocks = [
        f"rank {figures.rank}"
        + (f", pipeline rank {figures.pp_rank}" if plan.job.parallelism.pp > 1 else "")
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


def _table(title: str, lines: Sequence[Quantity]) -> str:
    if not lines:
        return ""
    # If all lines are in bytes, the title names the unit.
    units = (
        {"FLOPs": ", FLOPs", "bytes": ", GiB sent"}
        if len({line.unit for line in lines}) > 1
        else {}
    )
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
    lines = []
    step = None if plan.speed is None else plan.speed.step_seconds
    if step is not None and figures.cpu_seconds > step:
        host = seconds(figures.cpu_seconds)
        gpu = seconds(step)
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


def _size(value: float) -> str:
    return f"{value / GIB:.2f} GiB" if value >= 0.01 * GIB else f"{value / 2**10:,.1f} KiB"


HOST_KINDS = {"exchange": "all_to_all"}
"""NCCL's names of collectives, and the plan's."""


@dataclass(frozen=True)
class Quantity:
    """One quantity, rehearsed and planned."""

    name: str
    unit: str
    """``bytes``, ``FLOPs``, ``count`` or ``seconds``."""
    rehearsed: float
    planned: float | None
    """None if the plan does not predict it."""

    @property
    def difference(self) -> float | None:
        """Rehearsed over planned, less one; None if nothing was planned."""
        return self.rehearsed / self.planned - 1 if self.planned else None


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
        Quantity(name, "bytes", figures.memory[name], planned[name])
        for name in planned
        if name in figures.memory
    ]


def work_lines(figures: RankFigures, plan: Plan) -> list[Quantity]:
    """Compare launches and FLOPs of a step, and the host's time with the planned time of the GPU."""
    step = None if plan.speed is None else plan.speed.step_seconds
    return [
        Quantity("kernels", "count", figures.launches, None),
        Quantity("products", "count", figures.product_count, None),
        Quantity("launched by the host", "count", figures.host_launches, None),
        Quantity(
            "products", "FLOPs", figures.product_flops, product_flops(plan.job, figures.pp_rank)
        ),
        Quantity("host (planned: GPU)", "seconds", figures.host_seconds, step),
        Quantity("host CPU (planned: GPU)", "seconds", figures.cpu_seconds, step),
    ]


def traffic_lines(figures: RankFigures, plan: Plan) -> list[Quantity]:
    """Compare a rank's collectives and their bytes, by axis and kind, with those planned for its stages."""
    here: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in figures.collectives:
        found = here[each.axis, HOST_KINDS.get(each.kind, each.kind)]
        found[0] += each.count
        found[1] += each.bytes
    planned: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    machine = machine_of(plan.job)
    for expected in (
        [] if machine is None else StepModel(plan.job, machine).traffic(figures.pp_rank)
    ):
        planned[expected.axis, expected.collective][0] += expected.count
        planned[expected.axis, expected.collective][1] += expected.bytes
    lines = []
    for key in sorted({*here, *planned}):
        for place, unit in enumerate(("count", "bytes")):
            # The plan does not know in how many rounds Muon exchanges its volume.
            rounds = unit == "count" and key[0] == "optimizer"
            value = planned[key][place] if key in planned and not rounds else None
            lines.append(Quantity(" ".join(key), unit, here[key][place], value))
    return lines


def product_flops(job: Job, pp_rank: int) -> float:
    """Return the FLOPs of a rank's cuBLAS products: forward, backward with recomputation, and update.

    Attention and experts run in other kernels. What the compiler recomputes for a budget is not
    counted.
    """
    layout = job.parallelism
    model = job.model
    modules = split_modules(layout, model.n_layers)
    costs = costs_of(model)
    values = 0.0
    order = pipeline_order(layout, model.n_layers, job.microbatches)[pp_rank]
    passes = Counter((action.stage, action.kind) for action in order)
    for stage in stages_of_rank(layout, model.n_layers, pp_rank):
        # Either half of a split backward pass calls all of a compiled block's; the first stage has
        # one half.
        split = passes[stage, "I"] / job.microbatches if job.compile.blocks and stage > 0 else 0.0
        blocks = (name for name in modules[stage] if name.startswith("layers."))
        for layer in (int(name.removeprefix("layers.")) for name in blocks):
            around = _is_around(job, layer)
            recomputed = _recomputed(job, layer, whole=job.compile.blocks and around)
            again = 1.0 if around else 1 + split
            for tensor in block_tensors(model, layer):
                if tensor.is_matrix and not tensor.is_expert:
                    share = costs.row_share(model, tensor, job.training.seq_len)
                    times = 1 + 2 * (1 + split) + (again if tensor.name in recomputed else 0)
                    values += times * share * tensor.size / tp_of(layout, tensor)
        if "output" in modules[stage]:
            values += 3 * costs.outputs(model) * model.dim / layout.tp
    rows = job.global_batch_size // layout.data_parallel * job.training.seq_len / layout.cp
    return 2.0 * rows * values + muon_update(job, parameters_of(job, pp_rank)).flops


def _is_around(job: Job, layer: int) -> bool:
    """Whether a block is recomputed around compiled code: once, where code that has it in it repeats it."""
    layout = job.parallelism
    in_pieces = layout.has_expert_mesh and job.model.has_experts(layer)
    return job.activation_checkpoint.mode != "selective_op" and (layout.tp > 1 or in_pieces)


def _recomputed(job: Job, layer: int, *, whole: bool) -> set[str]:
    """Names of the matrices of a block whose products backward computes again; ``whole``: to its end."""
    recomputation = job.activation_checkpoint
    if recomputation.mode == "memory_budget" or not recomputation.covers(layer):
        return set()
    names = [tensor.name for tensor in block_tensors(job.model, layer) if tensor.is_matrix]
    if recomputation.mode == "selective_op" and recomputation.save_every_nth_matmul:
        # A feed-forward computes w2 after w3.
        parents = [_parent(name) for name in names]
        names.sort(key=lambda name: (parents.index(_parent(name)), ".w2" in name))
        del names[recomputation.save_every_nth_matmul - 1 :: recomputation.save_every_nth_matmul]
    # Backward does not need a block's last result.
    last = () if whole else ("feed_forward.w2.weight", "shared_experts.w2.weight")
    return {name for name in names if not name.endswith(last)}


def _parent(tensor: str) -> str:
    return tensor.removesuffix(".weight").rpartition(".")[0]
