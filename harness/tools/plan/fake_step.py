"""One step of a rank on fake tensors: the peak of bytes alive, FLOPs, and bytes sent by axis.

The step runs the code of training: FSDP, DTensor, recomputation and the optimizer. Of equal blocks only a few
are run: counts and peaks are linear in the number of blocks, so they are measured at two depths and
extrapolated (``extrapolated``).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from harness.config.job import Job
from harness.config.pipeline import split_modules, stages_of_rank
from harness.data.loader import Batch
from harness.model.architecture import architecture_of
from harness.model.part import ModelPart
from harness.model.spec import tensors
from harness.optimizer.settings import exchanges
from harness.parallelism.context import local_positions_of
from harness.parallelism.execute import Executor, PipelineExecutor
from harness.parallelism.materialize import allocate
from harness.parallelism.mesh import Mesh, build_mesh
from harness.parallelism.parallelize import build_on_meta
from harness.parallelism.pipeline import boundary
from harness.tools.plan.costs import costs_of
from harness.tools.plan.fake import CPU, fake_process_group, fake_tensors, replace_modules, stages_in
from harness.tools.plan.meter import Meter
from harness.tools.plan.order import gathering_passes, pipeline_order
from harness.tools.plan.plan import Action
from harness.train.engine import Engine

Statistics = dict[tuple[str, ...], float]
"""Measured values by ("peak", phase), ("flops",), ("sent", axis), ("kept", stage) and ("rest",). Stages are
numbered within the rank, from 0."""
FORWARD, BACKWARD = ("early forward", "late forward"), ("early backward", "late backward")
"""The phases of passes, see ``extrapolated``."""


@dataclass(frozen=True)
class FakeStep:
    """Memory, FLOPs and traffic of one rank's step; attention is counted as in ``Meter``."""

    peak: float
    """Peak bytes of live tensors. With a pipeline, the microbatches in flight follow the schedule: each
    counts the bytes saved for backward, measured on one. Receive buffers of stages, which torch allocates for
    all microbatches at once, are left out."""
    peak_of_one: float
    """Peak with one microbatch in flight; without a pipeline equal to ``peak``."""
    rest: float
    """Bytes alive between steps: parameters, optimizer state, buffers."""
    flops: float
    """FLOPs of forward and backward passes of one optimizer step, recomputation included."""
    sent: dict[str, float]
    """Bytes that the rank sends in one optimizer step, by axis."""


def fake_steps(job: Job) -> list[FakeStep]:
    """Run a step of the first rank of every pipeline rank, once for pipeline ranks with equal work.

    A split backward pass is run as one. FSDP gathers a stage once for all microbatches of a pass, as in
    torch's schedules for up to three stages per rank.

    Args:
        job: a job from ``fake.cpu_version``.
    """
    known: dict[Any, Statistics] = {}
    steps = []
    for pp_rank in range(job.parallelism.pp):
        work = _work_of(job, pp_rank)
        if work not in known:
            known[work] = extrapolated(job, pp_rank)
        steps.append(_summed_up(job, pp_rank, known[work]))
    return steps


def _work_of(job: Job, pp_rank: int) -> Any:
    """Describe the work of a pipeline rank; ranks with equal work have the same statistics."""
    names = split_modules(job.parallelism, job.model.n_layers)
    own = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
    microbatches = Counter(action.stage for action in _passes(job, pp_rank) if action.kind == "F")
    work = []
    for stage in own:
        blocks = tuple(_kind(job, layer) for layer in _layers(names[stage]))
        others = tuple(name for name in names[stage] if not name.startswith("layers."))
        work.append((blocks, others, microbatches[stage], stage - 1 in own, stage + 1 in own))
    return tuple(work)


def _summed_up(job: Job, pp_rank: int, statistics: Statistics) -> FakeStep:
    one = max(value for key, value in statistics.items() if key[0] == "peak")
    return FakeStep(
        peak=max(one, _peak_in_flight(job, pp_rank, statistics)),
        peak_of_one=one,
        rest=statistics["rest",],
        flops=statistics["flops",],
        sent={key[1]: value for key, value in statistics.items() if key[0] == "sent"},
    )


def _peak_in_flight(job: Job, pp_rank: int, statistics: Statistics) -> float:
    """Follow the schedule: bytes saved for backward add up over the microbatches in flight."""
    if job.parallelism.pp == 1:
        return 0.0
    own = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
    in_flight, peak = 0.0, 0.0
    for action in _passes(job, pp_rank):
        place = str(own.index(action.stage))
        kept = statistics["kept", place]
        # The measured peak of a backward phase includes the bytes its own forward saved.
        phases, others = (FORWARD, in_flight) if action.kind == "F" else (BACKWARD, in_flight - kept)
        peak = max(peak, *(others + statistics.get(("peak", f"{place} {phase}"), 0.0) for phase in phases))
        # In a split backward, the second half frees.
        in_flight += {"F": kept, "I": 0.0}.get(action.kind, -kept)
    return peak


def _passes(job: Job, pp_rank: int) -> list[Action]:
    return pipeline_order(job.parallelism, job.model.n_layers, job.microbatches)[pp_rank]


# Extrapolation from few blocks.


LEAST_BLOCKS = 2
"""Minimum of blocks after the first cycle: one's backward runs while another's gradients are reduced."""


@dataclass(frozen=True)
class Cycle:
    """How a stage's blocks repeat: from index ``start``, with a period of ``period`` blocks."""

    start: int
    period: int
    blocks: int

    @property
    def least(self) -> int:
        """Blocks of the shallowest stage to extrapolate from; it ends at the same point of a cycle."""
        over = (self.blocks - self.start) % self.period
        cycles = 1 + max(1, -(-(LEAST_BLOCKS - over) // self.period))
        return min(self.blocks, self.start + over + cycles * self.period)

    @property
    def more(self) -> float:
        """Number of cycles beyond ``least``; up to 1 is run instead of extrapolated."""
        return (self.blocks - self.least) / self.period


def cycle_of(kinds: Sequence[Any]) -> Cycle:
    """Find the shortest description of a sequence of kinds of blocks."""
    n = len(kinds)
    for length in range(1, n):
        for period in range(1, length + 1):
            start = length - period
            if all(kinds[i] == kinds[i + period] for i in range(start, n - period)):
                return Cycle(start, period, n)
    return Cycle(0, max(1, n), n)


def extrapolated(job: Job, pp_rank: int) -> Statistics:
    """Compute the statistics of a step with all blocks from steps with few.

    Every value is linear in the number of cycles of each stage: counts because equal blocks count the same,
    and peaks because a phase's peak is at the same moment at every depth. The last block of the first cycle
    divides each pass into two phases: forward up to this block, and from there to the loss, when all
    activations are live; backward down to it, and from there to the end, when all gradients are live.
    """
    stages = split_modules(job.parallelism, job.model.n_layers)
    own = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
    cycles = {stage: _cycle_of_stage(job, stages[stage]) for stage in own}
    depths = {stage: cycle.least if cycle.more > 1 else cycle.blocks for stage, cycle in cycles.items()}
    statistics = base = statistics_of(job, pp_rank, depths)
    for stage, cycle in cycles.items():
        if cycle.more > 1:
            deeper = statistics_of(job, pp_rank, depths | {stage: depths[stage] + cycle.period})
            statistics = {key: statistics[key] + cycle.more * (deeper[key] - base[key]) for key in base}
    return statistics


def _cycle_of_stage(job: Job, names: list[str]) -> Cycle:
    return cycle_of([_kind(job, layer) for layer in _layers(names)])


def _layers(names: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]


def _kind(job: Job, layer: int) -> tuple[Any, ...]:
    """Properties in which blocks differ."""
    model, recompute = job.model, job.activation_checkpoint
    recomputed = recompute.mode == "selective_layer" and layer % recompute.every_nth_layer == 0
    return architecture_of(model).block_kind(model, layer), recomputed


# A step.


def statistics_of(job: Job, pp_rank: int, depths: dict[int, int] | None = None) -> Statistics:
    """Measure a step in which stages have only their first blocks.

    Args:
        job: a job from ``fake.cpu_version``.
        pp_rank: rank on the pipeline axis.
        depths: number of blocks by stage index; other stages, or all stages if None, have all their blocks.
    """
    layout, depths = job.parallelism, depths or {}
    stages = split_modules(layout, job.model.n_layers)
    cycles = {stage: _cycle_of_stage(job, names) for stage, names in enumerate(stages)}
    named = [
        [name for name in names if name not in _deeper(names, depths.get(stage))]
        for stage, names in enumerate(stages)
    ]
    job = replace(job, parallelism=replace(layout, pp_modules_per_stage=named))
    with fake_process_group(pp_rank * (job.world_size // layout.pp), job.world_size):
        mesh = build_mesh(layout, CPU, has_experts=job.model.moe.enabled)
        parts = build_on_meta(job, mesh, CPU)
        indices = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
        values = costs_of(job.model).without_values()
        with fake_tensors(), values, Meter(mesh) as meter:
            for place, (index, part) in enumerate(zip(indices, parts, strict=True)):
                replace_modules(part)
                allocate(part, CPU, CPU)
                _mark_phases(meter, part, place, cycles[index])
            engine = Engine(job, CPU, (mesh, parts))
            engine.executor = passes = _Passes(job, mesh, engine.executor, meter)
            # The first step creates persistent tensors: optimizer state and FSDP's buffers.
            _run_step(engine, 1, meter, updates=True)
            gc.collect()
            meter.reset()
            rest = meter.live
            # All passes over local batches but the last are equal.
            # What an update exchanges is not linear in the number of blocks; ``verify.py`` measures it.
            updates = exchanges(job.optimizer, tensors(job.model).values()) is None
            _run_step(engine, min(2, job.accumulation_steps), meter, updates=updates)
            return {
                ("rest",): float(rest),
                ("flops",): meter.flops,
                **{("peak", phase): float(peak) for phase, peak in meter.peaks.items()},
                **{("sent", axis): sent for axis, sent in meter.sent.items()},
                **{("kept", str(place)): kept for place, kept in passes.kept.items()},
            }


def _deeper(names: list[str], depth: int | None) -> set[str]:
    """Names of a stage's blocks beyond the first ``depth``."""
    return set() if depth is None else {f"layers.{layer}" for layer in _layers(names)[depth:]}


def _mark_phases(meter: Meter, part: ModelPart, place: int, cycle: Cycle) -> None:
    """Make a model part report the phases of its passes to the meter."""

    def begin(phase: str) -> None:
        meter.begin(f"{place} {phase}")

    def on_gradient(phase: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            tensor = output[0] if isinstance(output, tuple) else output
            tensor.register_hook(lambda _: begin(phase))

        return hook

    part.register_forward_pre_hook(lambda *_: begin(FORWARD[0]))
    part.register_forward_hook(on_gradient(BACKWARD[0]))
    blocks = list(part.blocks.values())
    if blocks:
        dividing = blocks[min(cycle.start + cycle.period, len(blocks)) - 1]
        dividing.register_forward_hook(on_gradient(BACKWARD[1]))
        dividing.register_forward_hook(lambda *_: begin(FORWARD[1]))


def _run_step(engine: Engine, local_batches: int, meter: Meter, *, updates: bool) -> None:
    job = engine.job
    batch = costs_of(job.model).fake_batch(job, local_batches * job.local_batch_size)
    engine.gradients(batch)
    if updates:
        meter.begin("update")
        engine.update(1.0)


class _Passes:
    """The engine's executor: it runs one of several equal passes, and the meter counts it as all of them."""

    def __init__(self, job: Job, mesh: Mesh, executor: Executor, meter: Meter) -> None:
        self.job, self.mesh, self.executor, self.meter = job, mesh, executor, meter
        self.kept: dict[int, float] = {}

    def forward_backward(self, batch: Batch, *, last: bool) -> Tensor:
        loss = torch.zeros(1)
        if isinstance(self.executor, PipelineExecutor):
            self._run_stages(self.executor, batch)
        else:
            self.meter.times = 1 if last else self.job.accumulation_steps - 1
            loss = self.executor.forward_backward(batch, last=last)
        self.meter.times = 1
        return loss

    def forward(self, batch: Batch) -> Tensor:
        return self.executor.forward(batch)

    def score(self, batch: Batch) -> Tensor:
        return self.executor.score(batch)

    def _run_stages(self, executor: PipelineExecutor, batch: Batch) -> None:
        """Run the passes of a pipeline: every stage runs a microbatch forward, then immediately backward."""
        stages, passes = stages_in(executor.schedule), _passes(self.job, self.mesh.rank("pp"))
        rows = slice(self.job.parallelism.pp_microbatch_size)
        batch = local_positions_of(batch.each(itemgetter(rows)), executor.positions)
        own, frees = [stage.stage_index for stage in stages], self.job.parallelism.reshards_after_forward
        microbatches = Counter(action.stage for action in passes if action.kind == "F")
        gathering = gathering_passes(passes) if frees else set()
        gathers = Counter((action.stage, action.kind) for action in gathering)
        for again in (False, True):
            # The first microbatch gathers parameters, the others find them gathered.
            for place, stage in enumerate(stages):
                index = stage.stage_index
                forward = backward = 1
                if frees:
                    forward, backward = gathers[index, "F"], gathers[index, "B"] + gathers[index, "I"]
                if again:
                    forward, backward = microbatches[index] - forward, microbatches[index] - backward
                if forward or backward:
                    self._run_microbatch(executor, batch, place, own, forward, backward, gathered=again)
        for stage in stages:
            self._gather(stage, gathers[stage.stage_index, "W"], again=True)
        self.meter.times = 1
        for place, stage in enumerate(stages):
            self.meter.begin(f"{place} reduce")
            stage.perform_reduce_grad(1)

    def _gather(self, stage: Any, times: int, *, again: bool = False) -> None:
        """Gather a stage's parameters, counted ``times`` times; ``again``: even if they are gathered."""
        self.meter.times = times
        modules = [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            if again and times:
                module.reshard()
            module.unshard()

    def _run_microbatch(
        self,
        executor: PipelineExecutor,
        batch: Batch,
        place: int,
        own: list[int],
        forward: int,
        backward: int,
        *,
        gathered: bool,
    ) -> None:
        """Run a microbatch forward and backward.

        Args:
            executor: has torch's stages.
            batch: the microbatch.
            place: index of the stage within the rank.
            own: stages of the rank.
            forward: number of forward passes of a local batch that this pass counts for.
            backward: number of backward passes that it counts for.
            gathered: whether both passes find the parameters gathered.
        """
        stage = stages_in(executor.schedule)[place]
        if gathered:
            self._gather(stage, 0)
        self.meter.times = forward
        index, part, before = stage.stage_index, stage.submod, self.meter.live
        x = batch.inputs_BT if stage.is_first else self._boundary(part, index, entering=True)
        in_head = part.output is not None and executor.in_head
        with executor.loss.context():
            out = part(x, batch.labels_BT) if in_head else part(x)
            if part.output is not None and not in_head:
                out = executor.loss(out, batch.labels_BT)
            self.kept[place] = self.meter.live - before
            gradient = None if part.output is not None else torch.empty_like(out)
            self._send(index + 1, own, gradient)
            if gathered:
                self._gather(stage, 0)
            self.meter.times = backward
            passed = {"stage_output": out, "output_grads": gradient, "input_values": [x]}
            (gradient, *_), _ = stage.backward_maybe_with_nosync("full", passed)
            self._send(index - 1, own, gradient)

    def _send(self, to: int, own: list[int], tensor: Tensor | None) -> None:
        """Count the bytes sent to another stage, unless it is on this rank."""
        if tensor is not None and to not in own:
            self.meter.sent["pp"] += self.meter.times * tensor.numel() * tensor.element_size()

    def _boundary(self, part: ModelPart, index: int, *, entering: bool) -> Tensor:
        meta = boundary(self.job, self.mesh, part, index, entering=entering)
        return torch.empty(meta.shape, dtype=meta.dtype, requires_grad=meta.requires_grad)
