"""Peak memory of every pipeline rank, in closed form (torch only for a pipeline's order).

The passes of a rank are followed in the order of its schedule. The memory at a moment is the sum of
persistent memory (parameters, optimizer state, gathered parameters of a pipeline), activations of
microbatches that wait for their backward, the gradients so far, and the peak of the current pass
(``StageMemory``). The kinds of the largest moment are reported. Maxima of different moments are not
added, except where CUDA's allocator does so (``RankStep._as_reserved``).

FSDP2's part follows its source (torch/distributed/fsdp/_fully_shard, torch 2.13). Gathered
parameters are copied out of the gather buffer, so in forward a group is in memory twice. Backward
gathers the next group before it computes one; with expert parallel so does forward. Gradients are
copied, in precision.reduce_dtype, into the input of a reduce-scatter, which is freed when the next
group is reduced. A pipeline keeps gathered parameters, and accumulates unsharded gradients in
reduce_dtype over all microbatches (torch/distributed/pipelining/stage.py,
backward_maybe_with_nosync and perform_reduce_grad).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import chain, pairwise

from harness.config.job import Job
from harness.config.optimizer import EIGHT_BIT
from harness.config.pipeline import split_modules
from harness.tools.plan.constants import Software
from harness.tools.plan.costs import costs_of
from harness.tools.plan.machine import on_cpu
from harness.tools.plan.memory_parts import ActivationBytes, LogitBytes, PartBytes
from harness.tools.plan.order import Moment, fullest, passes_of_rank
from harness.tools.plan.parameters import (
    BYTES,
    HeldModule,
    HeldTensor,
    Memo,
    groups_of,
    muon_update,
    parameters_of,
)
from harness.tools.plan.plan import KINDS, RankMemory
from harness.util.hardware import Accelerator
from harness.util.words import GIB

Bytes = dict[str, float]
"""Bytes by kind of memory. Three kinds are separate because they belong to other CUDA streams or pools:
``shards``, the gradients of shards; ``buffers``, FSDP's gather buffers; ``reducing``, the inputs of
its reduce-scatters. Another one, ``unusable``, is free memory that the allocator cannot use."""
SHOWN_AS = {  # the kinds of a plan that these four are added to
    "shards": "gradients",
    "buffers": "gathered",
    "reducing": "communication",
    "unusable": "runtime",
}

IN_ATTENTION = re.compile(r"\.(\w+_)?(attention|attn)\.")
"""Names of tensors whose gradients are computed last in a block's backward."""


def plus(*parts: Bytes) -> Bytes:
    total = dict(parts[0])
    for part in parts[1:]:
        for kind, size in part.items():
            total[kind] = total.get(kind, 0.0) + size
    return total


def heaviest(moments: Iterable[Bytes], ignored: Collection[str] = ()) -> Bytes:
    """Return the moment with the most bytes. Bytes of ``ignored`` kinds do not count."""
    if not ignored:
        return max(moments, key=lambda moment: sum(moment.values()))
    return max(
        moments,
        key=lambda moment: sum(size for kind, size in moment.items() if kind not in ignored),
    )


def kinds_apart(job: Job) -> tuple[str, ...]:
    """Kinds of a step's memory that CUDA's allocator keeps apart: other kinds cannot use it."""
    if job.fsdp_ranks == 1 or on_cpu(job):
        return ()
    if job.parallelism.fsdp_buffers == "default":
        return ("shards", "buffers")
    return ("shards", "buffers", "reducing")


@dataclass(frozen=True)
class ModuleParameters:
    """Bytes of a module's parameters and gradients: one FSDP group, or two with experts."""

    gathered: float
    """Gathered parameters, in the compute dtype."""
    buffer: float
    """Gather buffer; 0 without sharding."""
    gradients: float
    """Unsharded gradients, as backward computes them."""
    first_gradients: float
    """Unsharded gradients that exist at the peak of backward."""
    late_gradients: float
    """Unsharded gradients that exist in backward of attention."""
    accumulated: float
    """Unsharded gradients, as they are accumulated over passes."""
    reduced: tuple[float, ...]
    """Inputs of the reduce-scatters: one, or that of the experts too; none if another module's has
    them."""
    sharded: float
    """Gradients of the shards."""


@dataclass(frozen=True)
class Module:
    """One step of a stage's forward."""

    name: str
    part: PartBytes
    parameters: ModuleParameters
    freed: bool
    """Whether gathered parameters are freed after forward."""


class StageMemory:
    """Memory of the passes of one stage, for one microbatch, on its rank with the most memory.

    ``held`` are its modules by name; ``joint_ends`` is that of ``Software``.
    """

    def __init__(
        self,
        job: Job,
        held: Mapping[str, HeldModule],
        stage: int,
        activations: ActivationBytes,
        joint_ends: bool,
    ) -> None:
        layout = job.parallelism
        self.job = job
        self.stage = stage
        self.fsdp = job.uses_fsdp
        self.pipelined = layout.pp > 1
        self.activations = activations
        self.apart = kinds_apart(job)
        self._backward: dict[tuple[bool, bool], list[Bytes]] = {}
        names = split_modules(layout, job.model.n_layers)[stage]
        self.has_head = "output" in names
        self.logits = LogitBytes(job, activations) if self.has_head else None
        self.modules = self._modules(names, held)
        # A pipeline has the ends on different ranks.
        if joint_ends and self.fsdp and not self.pipelined:
            self._join_ends()
        self.boundary = activations.stream
        """Bytes of one microbatch's stream between stages."""
        output = self.boundary if self.logits is None else self.logits.compute * self.logits.numbers
        self.left = {"activations": output + (self.boundary if stage > 0 else 0.0)}
        """Memory that a microbatch leaves after its backward with ``Software.keeps_outputs``."""
        self.resident = sum(
            m.parameters.gathered for m in self.modules if self.pipelined or not m.freed
        )
        """Gathered bytes that stay from forward to backward; in a pipeline until the end of the
        step."""
        parameters = [module.parameters for module in self.modules]
        self.accumulated = sum(each.accumulated for each in parameters)
        # While one module's parameters are copied out of their buffer, the next ones are gathered.
        buffers = [each.buffer for each in parameters]
        self.prefetched = layout.fsdp_prefetch
        self.buffers = max(sum(buffers[i : i + 1 + self.prefetched]) for i in range(len(buffers)))
        if layout.fsdp_buffers != "default":
            # Blocks may be in the embedding's memory when the head needs it.
            self.buffers += min(buffers[0], buffers[-1])
        # One reduce-scatter is in flight while the input of the next one is filled.
        reduced = chain.from_iterable(each.reduced for each in parameters)
        self.reduction = max(map(sum, pairwise([0.0, *reduced])), default=0.0)
        self.reduced = max(sum(each.reduced) for each in parameters)

    def _modules(self, names: Sequence[str], held: Mapping[str, HeldModule]) -> list[Module]:
        job = self.job
        activations = self.activations
        ends = groups_of(module for name, module in held.items() if not name.startswith("layers."))
        modules = []

        def add(name: str, part: PartBytes, parameters: ModuleParameters) -> None:
            modules.append(Module(name, part, parameters, job.parallelism.frees(name)))

        for name in names:
            if name == "tok_embeddings":
                add(name, activations.embedding(), self._parameters(ends.get(name, [])))
            elif name.startswith("layers."):
                layer = int(name.removeprefix("layers."))
                add(name, activations.block(layer), self._block_parameters(held[name]))
        if self.has_head:
            if job.model.mtp.depth:
                groups = ends["mtp.block"], ends.get("mtp.block.experts", [])
                block = activations.block(job.model.n_layers)
                add("mtp", activations.prediction(), self._parameters(ends["mtp"]))
                add("mtp.block", block, self._parameters(*groups))
            group = [*ends.get("head", []), *ends.get("root", [])]
            add("head", activations.head(), self._parameters(group))
        return modules

    def _join_ends(self) -> None:
        """Make the first module and the head one FSDP group, and let the last block stay gathered."""
        first, *blocks, head = self.modules
        early = first.parameters
        late = head.parameters
        joint = replace(
            early,
            gathered=early.gathered + late.gathered,
            buffer=early.buffer + late.buffer,
            reduced=(sum(early.reduced) + sum(late.reduced),),
            sharded=early.sharded + late.sharded,
        )
        late = replace(late, gathered=0.0, buffer=0.0, reduced=(), sharded=0.0)
        blocks[-1] = replace(blocks[-1], freed=False)
        first = replace(first, parameters=joint, freed=False)
        self.modules = [first, *blocks, replace(head, parameters=late)]

    def _block_parameters(self, block: HeldModule) -> ModuleParameters:
        """Those of a block; the same for equal blocks of all jobs that hold it."""
        key = self.fsdp, self.job.fsdp_ranks > 1, self.job.parallelism.cpu_offload
        return block.once(key, lambda: self._parameters(*block.groups.values()))

    def _parameters(self, *groups: list[HeldTensor]) -> ModuleParameters:
        layout = self.job.parallelism
        precision = self.job.precision
        tensors = list(chain.from_iterable(groups))
        compute = BYTES[precision.param_dtype]
        reduce = BYTES[precision.reduce_dtype]
        master = BYTES[precision.master_dtype]
        elements = sum(tensor.gathered_elements for tensor in tensors)
        # Backward of a feed-forward computes the gradient of w2 first.
        first = sum(t.gathered_elements for t in tensors if t.name.endswith((".w2", ".w2.weight")))
        late = sum(t.gathered_elements for t in tensors if not IN_ATTENTION.search(t.name))
        # Without FSDP, gradients are those of the parameters themselves.
        computed = compute if self.fsdp else master
        held = 0 if self.activations.offloads else sum(t.held_elements for t in tensors)
        gathered = 0.0
        reduced = []
        for group in groups if self.fsdp else ():
            padded = 0
            for tensor in group:
                # FSDP pads shards to the first one's length.
                shards = layout.expert_shards if tensor.spec.is_expert else layout.parameter_shards
                narrow = (
                    tensor.spec.is_matrix
                    and tensor.spec.module in self.activations.gathered_in_float8
                )
                gathered += tensor.held_elements * shards * (BYTES["float8"] if narrow else compute)
                padded += tensor.held_elements * shards
            # A rank that is alone reduces in place: the input becomes the gradients of the shards.
            copied = reduce if self.job.fsdp_ranks > 1 else 0.0
            if group:
                reduced.append(copied * padded)
        return ModuleParameters(
            gathered=gathered,
            buffer=gathered if layout.parameter_shards > 1 else 0,
            gradients=computed * elements,
            first_gradients=computed * first,
            late_gradients=computed * late,
            accumulated=(reduce if self.fsdp else master) * elements,
            reduced=tuple(reduced),
            sharded=float(master * held),
        )

    @cached_property
    def kept(self) -> Bytes:
        """Memory that a microbatch saves from its forward to its backward."""
        held = {"activations": sum(module.part.kept for module in self.modules)}
        if self.pipelined and self.stage > 0:
            # The first block's input is the receive buffer, which is counted with the boundaries.
            held["activations"] -= min(self.boundary, self.modules[0].part.kept)
        if self.pipelined and not self.has_head:
            held["activations"] += self.boundary  # the schedule keeps a stage's output
        if self.logits is not None:
            held["logits"] = self.logits.kept
        return held

    @cached_property
    def kept_for_weights(self) -> Bytes:
        """Memory between backward for inputs and for weights: recomputed blocks have all of their tensors."""
        return {
            "activations": sum(
                max(module.part.kept, module.part.backward) for module in self.modules
            )
        }

    def _peaks(self, moments: list[Bytes]) -> list[Bytes]:
        """Return the moments with the most bytes: in use, and in the memory that all kinds share."""
        return [heaviest(moments, ["unusable"]), heaviest(moments, self.apart)]

    @cached_property
    def forward(self) -> list[Bytes]:
        """Peaks of a forward pass, in addition to the memory before it."""
        moments = []
        held = 0.0
        gathered = 0.0
        explicit = self.job.parallelism.ep > 1 or self.prefetched > 1
        for module in self.modules:
            own = module.parameters
            moment = {"activations": held + module.part.forward, "gathered": gathered}
            if not self.pipelined:
                moment["gathered"] += own.gathered
                moment["buffers"] = self.buffers if explicit else own.buffer
            moments.append(moment)
            held += module.part.kept
            if not (module.freed or self.pipelined):
                gathered += own.gathered
        if self.logits is not None:
            moments.append(
                {"activations": held, "gathered": gathered, "logits": self.logits.forward}
            )
        return self._peaks(moments)

    def backward(self, *, gradients_there: bool, accumulates: bool) -> list[Bytes]:
        """Peaks of a backward pass, with what its microbatch has saved.

        Gradients of earlier passes are not included: the caller counts them. If the pass
        ``accumulates``, its gradients stay unsharded.
        """
        key = gradients_there, accumulates
        if key not in self._backward:
            self._backward[key] = self._peaks(self._backward_moments(*key))
        return self._backward[key]

    def _backward_moments(self, gradients_there: bool, accumulates: bool) -> list[Bytes]:
        moments = []
        held = self.kept.get("activations", 0.0)
        gathered = 0.0 if self.pipelined else self.resident
        # Gradients of later modules, unsharded and sharded; input of the reduce-scatter in flight.
        unsharded = shards = reducing = 0.0
        if self.logits is not None:
            loss = {"activations": held, "gathered": gathered, "logits": self.logits.backward}
            moments.append(loss | {"unusable": self.logits.unusable})
        for index, module in reversed(list(enumerate(self.modules))):
            part = module.part
            own = module.parameters
            arriving = 0.0
            if self.fsdp and not self.pipelined:
                if module.freed:
                    gathered += own.gathered
                before = self.modules[max(0, index - self.prefetched) : index]
                arriving = sum(each.parameters.buffer for each in before if each.freed)
            held -= part.kept
            base = {
                "gathered": gathered,
                "buffers": arriving,
                "shards": shards,
                "reducing": reducing,
            }
            logits = 0.0
            if self.logits is not None and module.name == "head":
                logits = self.logits.gradient
            # A gradient that is added to an existing one is freed at once; a quarter is counted.
            new = 0.25 if gradients_there and not self.fsdp else 1.0
            for activations, gradients in (
                (part.backward, own.first_gradients),
                (part.late_backward, own.late_gradients),
                (0.0, own.gradients),
            ):
                moment = {
                    "activations": held + activations,
                    "gradients": unsharded + new * gradients,
                    "logits": logits,
                }
                moments.append(base | moment)
            if not self.pipelined:
                gathered -= own.gathered
            base |= {"gathered": gathered, "activations": held}
            if accumulates:
                if self.fsdp and own.accumulated != own.gradients:
                    # Converted tensor by tensor, so both copies exist.
                    moments.append(
                        plus(base, {"gradients": unsharded + own.gradients + own.accumulated})
                    )
                if not gradients_there:
                    unsharded += own.accumulated
            else:
                base["reducing"] = reducing = sum(own.reduced)
                moments.append(
                    plus(base, {"gradients": unsharded + own.gradients, "shards": own.sharded})
                )
                if not own.reduced:
                    unsharded += own.gradients  # they are reduced with those of another module
                if not gradients_there:
                    shards += own.sharded
        return moments


MIB = 2**20

FRAGMENTATION = 0.03
"""Memory that CUDA's caching allocator reserves for free blocks that are too small for later requests, as a
fraction of the rest: allocated memory, memory of other streams, and what the loss leaves unusable.
Fitted to rehearsals of full-size jobs (experiments/rehearsal); 0.00 to 0.07 for most."""
CUBLAS_WORKSPACE = 32 * MIB
"""Workspace of cuBLAS on Hopper, per stream with matrix products (docs.nvidia.com/cuda/cublas,
cublasSetWorkspace)."""
HBM_LEFT = 0.99
"""Fraction of HBM that the driver leaves to programs (``harness/util/hardware.py``, memory_gib)."""
CUDA_CONTEXT = 0.5 * GIB
"""CUDA context and kernels of a process with torch's libraries loaded; not part of the allocator's
memory."""
NCCL_COMMUNICATOR = 0.1 * GIB
"""Buffers of one communicator (4 MiB per channel, protocol and peer, docs.nvidia.com/deeplearning/nccl,
NCCL_BUFFSIZE); not part of the allocator's memory either."""
CPU_PROCESS = 0.33 * GIB
"""Resident memory of a rank on a CPU before it builds a model: Python, torch and their
libraries."""
STAGES_GATHERED = 3
"""A pipeline schedule keeps the gathered parameters of at most this many of a rank's stages."""


def rank_memory(job: Job, software: Software | None = None) -> list[RankMemory]:
    """Compute the memory of every pipeline rank at its peak."""
    return list(ranks_in_turn(job, software, Memo()))


def ranks_in_turn(job: Job, software: Software | None, known: Memo) -> Iterator[RankMemory]:
    """Yield the memory of one pipeline rank after another: a search stops at the first that does not fit.

    ``known`` keeps what jobs with the same pipeline share.
    """
    software = software or Software()
    activations = ActivationBytes(job, repeats_keys=software.repeats_keys)
    for pp_rank in range(job.parallelism.pp):
        yield RankStep(job, pp_rank, activations, software, known).memory()


def memory_limit(job: Job, device: Accelerator | None) -> float | None:
    """Bytes of a device that a run can allocate; None for an unknown device and for CPUs.

    Memory of the driver, the CUDA context and NCCL is subtracted: neither
    ``torch.cuda.max_memory_reserved`` nor the plan counts it.
    """
    if device is None:
        return None
    layout = job.parallelism
    axes = [
        layout.pp,
        layout.dp_replicate,
        layout.parameter_shards,
        layout.cp,
        layout.tp,
        layout.ep,
    ]
    communicators = 1 + sum(degree > 1 for degree in axes) if job.world_size > 1 else 0
    total = device.memory_gib * GIB * HBM_LEFT
    return total - CUDA_CONTEXT - communicators * NCCL_COMMUNICATOR


class RankStep:
    """One pipeline rank's step. Equal stages share their memory, those of other ranks too."""

    def __init__(
        self, job: Job, pp_rank: int, activations: ActivationBytes, software: Software, known: Memo
    ) -> None:
        layout = job.parallelism
        self.job = job
        self.pp_rank = pp_rank
        self.parameters = parameters_of(job, pp_rank)
        self.cpu = on_cpu(job)
        self.fsdp = job.uses_fsdp
        self.apart = kinds_apart(job)
        self.pipelined = layout.pp > 1
        self.offloaded = activations.offloads
        self.gradients = 0.0 if self.offloaded else float(self.parameters.parameter_bytes)
        # With selective_layer the memory of a block depends on its number.
        by_layer = job.activation_checkpoint.mode == "selective_layer"
        first: dict[object, int] = {}
        equal = {}
        self.stages = {}
        for stage, held in self.parameters.modules.items():
            key = stage if by_layer else (stage > 0, *held.values())
            equal[stage] = first.setdefault(key, stage)
            make = partial(StageMemory, job, held, stage, activations, software.joint_ends)
            self.stages[stage] = activations.once(key, make)
        self.numbers = Counter(equal.values())
        """How many stages are like each of the first ones."""

        def find() -> list[Moment]:
            order = passes_of_rank(layout, job.model.n_layers, job.microbatches, pp_rank)
            return fullest(order, equal, keeps_outputs=software.keeps_outputs)

        pipeline = (layout.pp, layout.pp_schedule, layout.pp_layers_per_stage, job.microbatches)
        self.passes = known.once((pp_rank, *pipeline, *equal.items()), find)

    def memory(self) -> RankMemory:
        moments = list(self._moments())
        peak = heaviest(self._as_reserved(moment) for moment in moments)
        kinds = {kind: float(peak.get(kind, 0.0)) for kind in KINDS}
        allocated = max(sum(moment.values()) - moment.get("unusable", 0.0) for moment in moments)
        if self.cpu:
            kinds["runtime"] += CPU_PROCESS
        else:
            fragmented = sum(kinds.values())
            if self.apart:
                fragmented -= self.gradients
            kinds["runtime"] += FRAGMENTATION * fragmented + 2 * CUBLAS_WORKSPACE
            allocated += 2 * CUBLAS_WORKSPACE  # torch allocates them as tensors
        return RankMemory(self.pp_rank, tuple(self.stages), kinds, allocated)

    def _as_reserved(self, moment: Bytes) -> Bytes:
        """Convert a moment to the displayed kinds, with the memory that CUDA's allocator reserves per stream.

        FSDP2 allocates sharded gradients on its reduce stream, and gather buffers on its gather
        stream (_fsdp_collectives.py, foreach_reduce and foreach_all_gather). The allocator does not
        reuse freed memory on other streams, so this memory counts at any moment. With
        ``fsdp_buffers`` this is true of inputs of reduce-scatters too: they are in the pool of
        NCCL's memory.
        """
        stages = self.stages.values()
        buffers = max(each.buffers for each in stages)
        reducing = max(each.reduced for each in stages)
        whole = {"shards": self.gradients, "buffers": buffers, "reducing": reducing}
        moment = moment | {kind: whole[kind] for kind in self.apart}
        displayed = {kind: size for kind, size in moment.items() if kind in KINDS}
        return plus(displayed, {name: moment.get(kind, 0.0) for kind, name in SHOWN_AS.items()})

    def _moments(self) -> Iterator[Bytes]:
        always = self._always()
        passes = self.job.accumulation_steps
        # The first pass starts without gradients; later passes except the last are like the second.
        for number in {0, min(1, passes - 1), passes - 1}:
            yield from self._pass(always, number, last=number + 1 == passes)
        exchanged = {"communication": muon_update(self.job, self.parameters).buffers}
        updating = max(self._rounding(), exchanged, key=lambda kinds: sum(kinds.values()))
        yield plus(always, {"shards": self.gradients}, updating)

    def _always(self) -> Bytes:
        """Bytes that stay for the complete step, from the second step on (the optimizer has its state)."""
        job = self.job
        held = self.parameters
        # The batch of all passes; cosines and sines of this rank's positions, float32, one table
        # per stage.
        rows = job.global_batch_size // job.parallelism.data_parallel
        length = job.training.seq_len / job.parallelism.cp
        buffers = held.buffer_bytes + len(self.stages) * 4 * length * job.model.rotated_width
        # The stages' receive buffers, for all microbatches (PipelineStage, args_recv_info).
        boundaries = 0.0
        if self.pipelined:
            boundaries += sum(stage.boundary for index, stage in self.stages.items() if index > 0)
            boundaries += sum(s.boundary for s in self.stages.values() if not s.has_head)
        return {
            "parameters": buffers + (0 if self.offloaded else held.parameter_bytes),
            "optimizer": 0.0 if self.offloaded else held.optimizer_bytes,
            "activations": rows * costs_of(job.model).sample_bytes(job.model, job.training.seq_len),
            "communication": job.microbatches * boundaries,
        }

    def _pass(self, always: Bytes, number: int, *, last: bool) -> Iterator[Bytes]:
        scatters = self.fsdp and (self.job.parallelism.parameter_shards > 1 or self.pipelined)
        reduces = self.fsdp and not self.pipelined and (scatters or last)
        # Gradients that earlier passes accumulated: of shards, or unsharded.
        sharded_before = self.gradients if number and scatters else 0.0
        unsharded = {stage: self.stages[stage].accumulated for stage in self.numbers}
        before = unsharded if number and not scatters else dict.fromkeys(self.numbers, 0.0)
        after = before if reduces else unsharded
        for moment in self.passes:
            stage = self.stages[moment.stage]
            counts = moment.counts
            gradients = (
                counts["gradients", each] * after[each]
                + (count - counts["gradients", each]) * before[each]
                for each, count in self.numbers.items()
            )
            gathered = self._gathered({each: counts["ran", each] for each in self.numbers})
            base = {"gathered": gathered, "gradients": sum(gradients), "shards": sharded_before}
            kept = plus(always, base)
            # What microbatches keep: before their backward, before its second half, and after it.
            for each in self.numbers:
                waiting = self.stages[each]
                kinds = {"F": waiting.kept, "I": waiting.kept_for_weights, "left": waiting.left}
                for done, saved in kinds.items():
                    if count := counts.get((done, each), 0):
                        kept = plus(kept, {kind: count * size for kind, size in saved.items()})
            peaks = stage.forward
            if moment.kind != "F":
                earlier = after if moment.again else before
                there = sharded_before > 0 if reduces else earlier[moment.stage] > 0
                peaks = stage.backward(gradients_there=there, accumulates=not reduces)
            yield from (plus(kept, peak) for peak in peaks)
        if self.pipelined and self.fsdp:
            # Group by group: unsharded gradients are freed as their shards are allocated.
            accumulated = sum(count * after[stage] for stage, count in self.numbers.items())
            reduction = {"gathered": self._gathered(self.numbers), "gradients": accumulated}
            reducing = max(stage.reduction for stage in self.stages.values())
            yield plus(always, reduction, {"shards": sharded_before, "reducing": reducing})

    def _gathered(self, ran: Mapping[int, int]) -> float:
        """Bytes of gathered parameters that a pipeline rank holds at once; ``ran`` counts stages that ran."""
        if not self.pipelined:
            return 0.0
        sizes: list[float] = []
        for stage, count in ran.items():
            sizes += [self.stages[stage].resident] * count
        return sum(sorted(sizes, reverse=True)[:STAGES_GATHERED])

    def _rounding(self) -> Bytes:
        """Temporary memory of torch's updates, and of ours: value, means, gradient and root in float32."""
        largest = self.parameters.largest
        implementation = self.job.optimizer.implementation
        if {"bfloat16", EIGHT_BIT} & {
            self.job.precision.master_dtype,
            self.job.optimizer.state_dtype,
        }:
            return {"runtime": 5.0 * 4 * largest if self.cpu else 0.0}  # optimizer/elementwise.py
        if implementation == "foreach":
            # The roots of all second moments.
            return {"runtime": float(self.parameters.parameter_bytes)}
        return {"runtime": 2.0 * 4 * largest if implementation == "for-loop" else 0.0}
