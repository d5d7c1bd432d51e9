"""Comparison of a rehearsed rank with its plan (no torch)."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from harness.config.job import Job
from harness.config.pipeline import split_modules, stages_of_rank
from harness.model.spec import block_tensors
from harness.tools.plan.costs import costs_of
from harness.tools.plan.machine import machine_of
from harness.tools.plan.parameters import parameters_of, planned_update, tp_of
from harness.tools.plan.plan import Plan
from harness.tools.plan.step_time import StepModel
from harness.tools.rehearse.figures import RankFigures

HOST_KINDS = {"exchange": "all_to_all"}
"""NCCL's names of collectives, and the plan's."""


@dataclass(frozen=True)
class Line:
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


def memory_lines(figures: RankFigures, plan: Plan) -> list[Line]:
    """Compare the device memory: parameters, gradients, optimizer state and the peaks."""
    memory = plan.memory[figures.pp_rank]
    planned = {
        "parameters": memory.kinds["parameters"],
        "gradients": parameters_of(plan.job, figures.pp_rank).gradient_bytes,
        "optimizer": memory.kinds["optimizer"],
        "allocated": memory.allocated,
        "reserved": memory.peak,
    }
    return [
        Line(name, "bytes", figures.memory[name], planned[name]) for name in planned if name in figures.memory
    ]


def work_lines(figures: RankFigures, plan: Plan) -> list[Line]:
    """Compare launches and FLOPs of a step, and the host's time with the planned time of the GPU."""
    step = None if plan.speed is None else plan.speed.step_seconds
    return [
        Line("kernels", "count", figures.launches, None),
        Line("products", "count", figures.product_count, None),
        Line("products", "FLOPs", figures.product_flops, product_flops(plan.job, figures.pp_rank)),
        Line("host (planned: GPU)", "seconds", figures.host_seconds, step),
        Line("host CPU (planned: GPU)", "seconds", figures.cpu_seconds, step),
    ]


def traffic_lines(figures: RankFigures, plan: Plan) -> list[Line]:
    """Compare a rank's collectives and their bytes, by axis and kind, with those planned for its stages."""
    here: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for each in figures.collectives:
        found = here[each.axis, HOST_KINDS.get(each.kind, each.kind)]
        found[0] += each.count
        found[1] += each.bytes
    planned: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    machine = machine_of(plan.job)
    for expected in [] if machine is None else StepModel(plan.job, machine).traffic(figures.pp_rank):
        planned[expected.axis, expected.collective][0] += expected.count
        planned[expected.axis, expected.collective][1] += expected.bytes
    lines = []
    for key in sorted({*here, *planned}):
        for place, unit in enumerate(("count", "bytes")):
            value = planned[key][place] if key in planned else None
            lines.append(Line(" ".join(key), unit, here[key][place], value))
    return lines


def product_flops(job: Job, pp_rank: int) -> float:
    """Return the FLOPs of a rank's cuBLAS products: forward, backward without recomputation, and update.

    Attention and experts run in other kernels.
    """
    layout, model = job.parallelism, job.model
    modules = split_modules(layout, model.n_layers)
    own = [name for stage in stages_of_rank(layout, model.n_layers, pp_rank) for name in modules[stage]]
    layers = [int(name.removeprefix("layers.")) for name in own if name.startswith("layers.")]
    costs, values = costs_of(model), 0.0
    for layer in layers:
        for tensor in block_tensors(model, layer):
            if tensor.is_matrix and not tensor.is_expert:
                share = costs.row_share(model, tensor, job.training.seq_len)
                values += share * tensor.size / tp_of(layout, tensor)
    if "output" in own:
        values += costs.outputs(model) * model.dim / layout.tp
    rows = job.global_batch_size // layout.data_parallel * job.training.seq_len / layout.cp
    update = planned_update(job, parameters_of(job, pp_rank))
    return 6.0 * rows * values + (0.0 if update is None else update.flops)
