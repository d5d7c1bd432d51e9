"""One step of a rank on fake tensors: the peak of bytes alive, FLOPs, and bytes sent by axis.

What is run is what training runs: FSDP, DTensor, recomputation and the optimizer, operation by operation.
Equal blocks are not run all: a step's counts and peaks are linear in how many there are, so they are taken at
two depths and drawn out (``drawn_out``).
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from harness.data.loader import Batch
from harness.job import Job
from harness.model.decoder import Decoder
from harness.optimizer.build import build_optimizer
from harness.optimizer.in_backward import UpdateInBackward
from harness.parallelism.balance import Balance
from harness.parallelism.chunked_loss import ChunkedLoss
from harness.parallelism.clip import clip_gradients, local_squares, settle_gradients
from harness.parallelism.context import local_positions, take_share
from harness.parallelism.execute import DirectExecutor
from harness.parallelism.loss import TokenLoss
from harness.parallelism.materialize import allocate
from harness.parallelism.mesh import Mesh, build_mesh
from harness.parallelism.parallelize import lay_out
from harness.parallelism.pipeline import boundary, build_schedule
from harness.parallelism.stages import split_modules, stages_of_rank
from harness.plan.fake import CPU, fake_tensors, pretending, stages_in, without_values
from harness.plan.meter import Meter
from harness.plan.order import pipeline_order, that_gather
from harness.plan.plan import Action
from harness.precision.swap import precompute_scales

Figures = dict[tuple[str, ...], float]
"""What is counted, by ("peak", phase), ("flops",), ("sent", axis), ("kept", stage) and ("rest",); stages are
those of the rank, from 0."""
FORWARD, BACKWARD = ("early forward", "late forward"), ("early backward", "late backward")
"""The phases of passes, see ``drawn_out``."""


@dataclass(frozen=True)
class FakeStep:
    """What one rank's step takes, its attention counted as ``Meter`` says."""

    peak: float
    """Most bytes of tensors alive. With a pipeline: while as many microbatches are in flight as the schedule
    has. What forward leaves for backward is counted for each of them, measured on one; what stages receive
    into, which torch allocates for all microbatches at once, is left out."""
    peak_of_one: float
    """The same with one microbatch in flight; without a pipeline, the same as ``peak``."""
    rest: float
    """Bytes alive between steps: parameters, optimizer state, buffers."""
    flops: float
    """FLOPs of forward and backward passes of one optimizer step, recomputation included."""
    sent: dict[str, float]
    """Bytes that the rank sends in one optimizer step, by axis."""


def fake_steps(job: Job) -> list[FakeStep]:
    """Runs a step of the first rank of every pipeline rank, once for those that do the same.

    A backward pass that the schedule splits in two is run as one. FSDP gathers a stage once for all
    microbatches of a pass, as torch's schedules have it for up to three stages a rank.

    Args:
        job: one that ``fake.stand_in`` gave.
    """
    known: dict[Any, Figures] = {}
    steps = []
    for pp_rank in range(job.parallelism.pp):
        work = _work_of(job, pp_rank)
        if work not in known:
            known[work] = drawn_out(job, pp_rank)
        steps.append(_summed_up(job, pp_rank, known[work]))
    return steps


def _work_of(job: Job, pp_rank: int) -> Any:
    """What makes a pipeline rank's figures: two ranks of equal work have the same."""
    names = split_modules(job.parallelism, job.model.n_layers)
    own = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
    microbatches = Counter(action.stage for action in _passes(job, pp_rank) if action.kind == "F")
    work = []
    for stage in own:
        blocks = tuple(_kind(job, layer) for layer in _layers(names[stage]))
        others = tuple(name for name in names[stage] if not name.startswith("layers."))
        work.append((blocks, others, microbatches[stage], stage - 1 in own, stage + 1 in own))
    return tuple(work)


def _summed_up(job: Job, pp_rank: int, figures: Figures) -> FakeStep:
    one = max(value for key, value in figures.items() if key[0] == "peak")
    return FakeStep(
        peak=max(one, _peak_in_flight(job, pp_rank, figures)),
        peak_of_one=one,
        rest=figures["rest",],
        flops=figures["flops",],
        sent={key[1]: value for key, value in figures.items() if key[0] == "sent"},
    )


def _peak_in_flight(job: Job, pp_rank: int, figures: Figures) -> float:
    """Follows the schedule: what is kept for backward of all microbatches that are in flight adds up."""
    if job.parallelism.pp == 1:
        return 0.0
    own = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
    in_flight, peak = 0.0, 0.0
    for action in _passes(job, pp_rank):
        place = str(own.index(action.stage))
        kept = figures["kept", place]
        # What a phase's peak was measured with, it had itself kept.
        phases, others = (FORWARD, in_flight) if action.kind == "F" else (BACKWARD, in_flight - kept)
        peak = max(peak, *(others + figures.get(("peak", f"{place} {phase}"), 0.0) for phase in phases))
        # Of a split backward the second half frees.
        in_flight += {"F": kept, "I": 0.0}.get(action.kind, -kept)
    return peak


def _passes(job: Job, pp_rank: int) -> list[Action]:
    microbatches = job.local_batch_size // job.parallelism.pp_microbatch_size
    return pipeline_order(job.parallelism, job.model.n_layers, microbatches)[pp_rank]


# Which blocks are run.


LEAST_BLOCKS = 2
"""Blocks behind the first cycle, at least: one's backward runs while another's gradients are reduced."""


@dataclass(frozen=True)
class Cycle:
    """How a stage's blocks repeat themselves: after some that do not, the same few over and over."""

    start: int
    period: int
    blocks: int

    @property
    def least(self) -> int:
        """Blocks of the shallowest stage that stands for it, ending within a cycle where the whole ends."""
        over = (self.blocks - self.start) % self.period
        cycles = 1 + max(1, -(-(LEAST_BLOCKS - over) // self.period))
        return min(self.blocks, self.start + over + cycles * self.period)

    @property
    def more(self) -> float:
        """How many cycles the whole has more than that; 0 or 1 are run and not drawn out."""
        return (self.blocks - self.least) / self.period


def cycle_of(kinds: Sequence[Any]) -> Cycle:
    """The shortest description of a sequence of blocks, equal ones being of equal kind."""
    n = len(kinds)
    for length in range(1, n):
        for period in range(1, length + 1):
            start = length - period
            if all(kinds[i] == kinds[i + period] for i in range(start, n - period)):
                return Cycle(start, period, n)
    return Cycle(0, max(1, n), n)


def drawn_out(job: Job, pp_rank: int) -> Figures:
    """The figures of a step with all blocks, from steps with few.

    Every figure is linear in the number of cycles of each stage: counts because equal blocks count the same,
    and peaks because a phase's peak falls on the same moment whatever the depth. Passes have two phases each,
    which a block divides, the last of the first cycle: forward up to it, and on to the loss, when all
    activations are there; backward down to it, and on to the end, when all gradients are.
    """
    stages = split_modules(job.parallelism, job.model.n_layers)
    own = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
    cycles = {stage: _cycle_of_stage(job, stages[stage]) for stage in own}
    depths = {stage: cycle.least if cycle.more > 1 else cycle.blocks for stage, cycle in cycles.items()}
    figures = base = figures_of(job, pp_rank, depths)
    for stage, cycle in cycles.items():
        if cycle.more > 1:
            deeper = figures_of(job, pp_rank, depths | {stage: depths[stage] + cycle.period})
            figures = {key: figures[key] + cycle.more * (deeper[key] - base[key]) for key in base}
    return figures


def _cycle_of_stage(job: Job, names: list[str]) -> Cycle:
    return cycle_of([_kind(job, layer) for layer in _layers(names)])


def _layers(names: Sequence[str]) -> list[int]:
    return [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]


def _kind(job: Job, layer: int) -> tuple[Any, ...]:
    """What blocks differ in."""
    model, recompute = job.model, job.activation_checkpoint
    recomputed = recompute.mode == "selective_layer" and layer % recompute.every_nth_layer == 0
    return model.has_experts(layer), model.span(layer), model.attention.is_rotated(layer), recomputed


# A step.


def figures_of(job: Job, pp_rank: int, depths: dict[int, int] | None = None) -> Figures:
    """The figures of a step in which stages have only the first so many of their blocks.

    Args:
        job: one that ``fake.stand_in`` gave.
        pp_rank: place on the pipeline axis.
        depths: how many blocks stages have, by their indices; the others, and without it all, are whole.
    """
    layout, depths = job.parallelism, depths or {}
    stages = split_modules(layout, job.model.n_layers)
    cycles = {stage: _cycle_of_stage(job, names) for stage, names in enumerate(stages)}
    named = [
        [name for name in names if name not in _deeper(names, depths.get(stage))]
        for stage, names in enumerate(stages)
    ]
    job = replace(job, parallelism=replace(layout, pp_modules_per_stage=named))
    with pretending(pp_rank * (job.world_size // layout.pp), job.world_size):
        mesh = build_mesh(layout, CPU, has_experts=job.model.moe.enabled)
        parts = lay_out(job, mesh, CPU)
        indices = stages_of_rank(job.parallelism, job.model.n_layers, pp_rank)
        with fake_tensors(), Meter(mesh) as meter:
            for place, (index, part) in enumerate(zip(indices, parts, strict=True)):
                without_values(part)
                allocate(part, CPU, CPU)
                _mark_phases(meter, part, place, cycles[index])
            step = _Step(job, mesh, parts, meter)
            # The first step makes what stays: optimizer state, and buffers of FSDP's.
            step.run()
            gc.collect()
            meter.reset()
            rest = meter.live
            step.run()
            return {
                ("rest",): float(rest),
                ("flops",): meter.flops,
                **{("peak", phase): float(peak) for phase, peak in meter.peaks.items()},
                **{("sent", axis): sent for axis, sent in meter.sent.items()},
                **{("kept", str(place)): kept for place, kept in step.kept.items()},
            }


def _deeper(names: list[str], depth: int | None) -> set[str]:
    """Blocks of a stage that are not among its first ones."""
    return set() if depth is None else {f"layers.{layer}" for layer in _layers(names)[depth:]}


def _mark_phases(meter: Meter, part: Decoder, place: int, cycle: Cycle) -> None:
    """Has a part say where it stands in a pass."""

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


class _Step:
    """An optimizer step of a rank, as the engine does it, without values."""

    def __init__(self, job: Job, mesh: Mesh, parts: list[Decoder], meter: Meter) -> None:
        self.job, self.mesh, self.parts, self.meter = job, mesh, parts, meter
        self.kept: dict[int, float] = {}
        split_logits = job.parallelism.tp > 1 and job.parallelism.loss_parallel
        vocabulary = mesh.axis("tp") if split_logits else None
        self.loss = TokenLoss(job.model.vocab_size, vocabulary)
        for part in parts:
            if part.output is not None and job.training.loss_chunks > 1:
                part.output.loss = ChunkedLoss(self.loss, job.training.loss_chunks, vocabulary, None)
        self.balance = Balance(job, parts, CPU)
        named = [pair for part in parts for pair in part.named_parameters()]
        self.parameters: list[Tensor] = [parameter for _, parameter in named]
        self.optimizer = build_optimizer(job.optimizer, named)
        in_backward = job.optimizer.in_backward
        self.updater = UpdateInBackward(self.optimizer, self.parameters, mesh, CPU) if in_backward else None
        layout, self.positions = job.parallelism, None
        if layout.cp > 1:
            self.positions = local_positions(layout, job.training.seq_len, mesh.rank("cp"))
        self.schedule = None if layout.pp == 1 else build_schedule(job, mesh, parts, self.loss, CPU)

    def run(self) -> None:
        precision = self.job.precision
        if precision.enable_fsdp_float8_all_gather and (
            precision.precompute_float8_dynamic_scale_for_fsdp or self.job.parallelism.tp > 1
        ):
            precompute_scales(self.parts)
        if self.schedule is None:
            self._run_batches()
        else:
            self._run_stages()
        self._update()

    def _run_batches(self) -> None:
        """Without a pipeline: all passes but the last are alike."""
        executor = DirectExecutor(self.job, self.parts[0], self.loss, self.positions)
        again = self.job.accumulation_steps - 1
        for last, times in (False, again), (True, 1):
            if times:
                self.meter.times = times
                executor.forward_backward(self._batch(self.job.local_batch_size), last=last)
        self.meter.times = 1

    def _run_stages(self) -> None:
        """With one: every stage takes a microbatch at a time, forward and at once backward."""
        stages, passes = stages_in(self.schedule), _passes(self.job, self.mesh.rank("pp"))
        own, frees = [stage.stage_index for stage in stages], self.job.parallelism.reshards_after_forward
        microbatches = Counter(action.stage for action in passes if action.kind == "F")
        gathering = that_gather(passes) if frees else set()
        gathers = Counter((action.stage, action.kind) for action in gathering)
        for again in (False, True):
            # The first gathers parameters, the others find them gathered.
            for place, stage in enumerate(stages):
                index = stage.stage_index
                forward = backward = 1
                if frees:
                    forward, backward = gathers[index, "F"], gathers[index, "B"] + gathers[index, "I"]
                if again:
                    forward, backward = microbatches[index] - forward, microbatches[index] - backward
                if forward or backward:
                    self._run_microbatch(stage, place, own, forward, backward, gathered=again)
        for stage in stages:
            self._gather(stage, gathers[stage.stage_index, "W"], anew=True)
        self.meter.times = self.job.accumulation_steps
        for place, stage in enumerate(stages):
            self.meter.begin(f"{place} reduce")
            stage.perform_reduce_grad(1)
        self.meter.times = 1

    def _gather(self, stage: Any, times: int, *, anew: bool = False) -> None:
        """Gathers a stage's parameters, if they are freed; counted so often."""
        self.meter.times = times * self.job.accumulation_steps
        modules = [module for module in stage.submod.modules() if isinstance(module, FSDPModule)]
        for module in modules:
            if anew and times:
                module.reshard()
            module.unshard()

    def _run_microbatch(
        self, stage: Any, place: int, own: list[int], forward: int, backward: int, *, gathered: bool
    ) -> None:
        """Runs a microbatch forward and backward.

        Args:
            stage: torch's stage.
            place: the stage's place among those of the rank.
            own: the stages of the rank.
            forward: how many forward passes of a local batch it stands for.
            backward: the same of backward passes.
            gathered: whether both find the parameters gathered.
        """
        if gathered:
            self._gather(stage, 0)
        self.meter.times = forward * self.job.accumulation_steps
        index, part, before = stage.stage_index, stage.submod, self.meter.live
        batch = self._batch(self.job.parallelism.pp_microbatch_size)
        batch = take_share(batch, self.positions)
        x = batch.inputs_BT if stage.is_first else self._boundary(part, index, entering=True)
        in_head = part.output is not None and self.job.training.loss_chunks > 1
        with self.loss.context():
            out = part(x, batch.labels_BT) if in_head else part(x)
            if part.output is not None and not in_head:
                out = self.loss(out, batch.labels_BT)
            self.kept[place] = self.meter.live - before
            gradient = None if part.output is not None else torch.empty_like(out)
            self._send(index + 1, own, gradient)
            if gathered:
                self._gather(stage, 0)
            self.meter.times = backward * self.job.accumulation_steps
            passed = {"stage_output": out, "output_grads": gradient, "input_values": [x]}
            (gradient, *_), _ = stage.backward_maybe_with_nosync("full", passed)
            self._send(index - 1, own, gradient)

    def _send(self, to: int, own: list[int], tensor: Tensor | None) -> None:
        """Counts what goes to another stage, unless that is on this rank."""
        if tensor is not None and to not in own:
            self.meter.sent["pp"] += self.meter.times * tensor.numel() * tensor.element_size()

    def _boundary(self, part: Decoder, index: int, *, entering: bool) -> Tensor:
        said = boundary(self.job, self.mesh, part, index, entering=entering)
        return torch.empty(said.shape, dtype=said.dtype, requires_grad=said.requires_grad)

    def _batch(self, rows: int) -> Batch:
        shape = rows, self.job.training.seq_len
        return Batch(torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64))

    def _update(self) -> None:
        self.meter.begin("update")
        if self.updater is not None:
            self.updater.take_squares()
        else:
            settle_gradients(self.parameters)
            square = local_squares(self.parameters, self.mesh, CPU).sum()
            if self.job.world_size > 1:
                dist.all_reduce(square)
            clip_gradients(self.parameters, square.sqrt(), self.job.training.max_norm)
            self.optimizer.step()
        self.balance.settle()
        self.optimizer.zero_grad()
