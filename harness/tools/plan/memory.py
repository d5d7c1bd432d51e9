"""Peak memory of every pipeline rank, in closed form (torch only for a pipeline's order).

The passes of a rank are followed in the order of its schedule. The memory at a moment is the sum of
persistent memory (parameters, optimizer state, gathered parameters of a pipeline), activations of
microbatches that wait for their backward, the gradients so far, and the peak of the current pass
(``StageMemory``). The kinds of the largest moment are reported. Maxima of different moments are not
added, except where CUDA's allocator does so (``RankStep.memory``).
"""

from collections.abc import Iterator
from operator import itemgetter

from harness.config.job import Job
from harness.config.optimizer import EIGHT_BIT
from harness.tools.plan.constants import DEFAULTS, Software
from harness.tools.plan.costs import costs_of
from harness.tools.plan.machine import on_cpu
from harness.tools.plan.memory_parts import ActivationBytes
from harness.tools.plan.order import passes_of_rank
from harness.tools.plan.parameters import muon_update, parameters_of
from harness.tools.plan.plan import KINDS, RankMemory
from harness.tools.plan.stage_memory import Bytes, heaviest, kinds_apart, stage_memory
from harness.util.hardware import Accelerator
from harness.util.words import GIB

SHOWN_AS = {  # kinds of a plan that other kinds of a moment are added to
    "shards": "gradients",
    "buffers": "gathered",
    "reducing": "communication",
    "unusable": "runtime",
}
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


def rank_memory(job: Job, software: Software = DEFAULTS.software) -> list[RankMemory]:
    """Compute the memory of every pipeline rank at its peak."""
    return list(ranks_in_turn(job, software))


def ranks_in_turn(job: Job, software: Software) -> Iterator[RankMemory]:
    """Yield the memory of one pipeline rank after another: a search stops at the first that does not fit."""
    activations = ActivationBytes(job, software)
    for pp_rank in range(job.parallelism.pp):
        yield RankStep(activations, pp_rank).memory()


def memory_limit(job: Job, device: Accelerator | None) -> float | None:
    """Bytes of a device that a run can allocate; None for an unknown device and for CPUs.

    Memory of the driver, the CUDA context and NCCL is subtracted: neither
    ``torch.cuda.max_memory_reserved`` nor the plan counts it.
    """
    if device is None:
        return None
    layout = job.parallelism
    degrees = layout.degrees | {"dp_shard": layout.parameter_shards, "ep": layout.ep}
    axes = sum(degree > 1 for degree in degrees.values())
    communicators = 1 + axes if job.world_size > 1 else 0
    total = device.memory_gib * GIB * HBM_LEFT
    return total - CUDA_CONTEXT - communicators * NCCL_COMMUNICATOR


class RankStep:
    """One pipeline rank's step."""

    def __init__(self, activations: ActivationBytes, pp_rank: int) -> None:
        self.job = activations.job
        self.software = activations.software
        self.pp_rank = pp_rank
        self.parameters = parameters_of(self.job, pp_rank)
        self.offloaded = activations.offloads
        self.gradients = 0.0 if self.offloaded else float(self.parameters.parameter_bytes)
        self.stages = {
            stage: stage_memory(activations, stage, held)
            for stage, held in self.parameters.modules.items()
        }
        resident = sorted(stage.resident for stage in self.stages.values())
        self.gathered = sum(resident[-STAGES_GATHERED:])

    def memory(self) -> RankMemory:
        """The memory at the rank's peak.

        FSDP2 allocates sharded gradients on its reduce stream, and gather buffers on its gather
        stream (_fsdp_collectives.py, foreach_reduce and foreach_all_gather). The allocator does not
        reuse freed memory on other streams, so this memory counts at any moment. With
        ``fsdp_buffers`` this is true of inputs of reduce-scatters too: they are in the pool of
        NCCL's memory.
        """
        stages = self.stages.values()
        whole = {
            "shards": self.gradients,
            "buffers": max(stage.buffers for stage in stages),
            "reducing": max(stage.reduced for stage in stages),
        }
        apart = {kind: whole[kind] for kind in kinds_apart(self.job)}
        moments = list(self._moments())
        highest = heaviest(moments, "unusable")
        allocated = sum(highest.values()) - highest.get("unusable", 0.0)
        kinds = dict.fromkeys(KINDS, 0.0)
        for kind, size in heaviest(moment | apart for moment in moments).items():
            kinds[SHOWN_AS.get(kind, kind)] += size
        if on_cpu(self.job):
            kinds["runtime"] += CPU_PROCESS
        else:
            fragmented = sum(kinds.values()) - apart.get("shards", 0.0)
            kinds["runtime"] += FRAGMENTATION * fragmented + 2 * CUBLAS_WORKSPACE
            allocated += 2 * CUBLAS_WORKSPACE  # torch allocates them as tensors
        return RankMemory(self.pp_rank, tuple(self.stages), kinds, allocated)

    def _moments(self) -> Iterator[Bytes]:
        always = self._always()
        last = self.job.accumulation_steps - 1
        # Any pass but the last one has no more than the second, which finds gradients.
        for number in {min(1, last), last}:
            yield from self._pass(always, later=number > 0, last=number == last)
        updating = {
            "runtime": self._rounding(),
            "communication": muon_update(self.job, self.parameters).buffers,
        }
        kind, size = max(updating.items(), key=itemgetter(1))
        yield plus(always, {"shards": self.gradients, kind: size})

    def _always(self) -> Bytes:
        """Bytes that stay for the complete step, from the second step on (the optimizer has its state)."""
        job = self.job
        held = self.parameters
        # The batch of all passes; cosines and sines of this rank's positions, float32, one table
        # per stage.
        rows = job.accumulation_steps * job.local_batch_size
        layout = job.parallelism
        length = job.training.seq_len / layout.cp
        if layout.balances_documents:
            length += job.training.seq_len  # of all positions, and of those of a pass
        tables = 1 if job.model.rope.local_theta is None else 2
        rotation = 4 * length * job.model.rotated_width * tables
        buffers = held.buffer_bytes + len(self.stages) * rotation
        # The stages' receive buffers, for all microbatches (PipelineStage, args_recv_info).
        boundaries = sum(stage.boundary for index, stage in self.stages.items() if index > 0)
        boundaries += sum(s.boundary for s in self.stages.values() if not s.has_head)
        return {
            "parameters": buffers + (0 if self.offloaded else held.parameter_bytes),
            "optimizer": 0.0 if self.offloaded else held.optimizer_bytes,
            "activations": rows * costs_of(job.model).sample_bytes(job.model, job.training.seq_len),
            "communication": job.microbatches * boundaries,
            "gathered": self.gathered,
        }

    def _pass(self, always: Bytes, *, later: bool, last: bool) -> Iterator[Bytes]:
        """The moments of one pass over a local batch, ``later`` than the first, that can be the highest."""
        layout = self.job.parallelism
        pipelined = layout.pp > 1
        fsdp = self.job.uses_fsdp
        scatters = fsdp and (layout.parameter_shards > 1 or pipelined)
        reduces = fsdp and not pipelined and (scatters or last)
        # Gradients that earlier passes accumulated: of shards, or unsharded.
        every = sum(stage.accumulated for stage in self.stages.values())
        unsharded = later and not scatters
        now = always | {
            "shards": self.gradients if later and scatters else 0.0,
            "gradients": every if unsharded else 0.0,
        }
        if pipelined and fsdp:
            # After the passes, group by group: unsharded gradients are freed as their shards are
            # allocated.
            reducing = max(stage.reduction for stage in self.stages.values())
            yield now | {"gradients": every, "reducing": reducing}
        # The fullest moment before the passes of each stage and kind, without the pass's microbatch.
        # Passes that find gradients of their stage are apart.
        fullest: dict[tuple[int, str, bool], tuple[float, Bytes]] = {}
        ended = set[int]()
        order = passes_of_rank(layout, self.job.model.n_layers, self.job.microbatches, self.pp_rank)
        for number, kind, *_ in order:
            stage = self.stages[number]
            if kind != "F":
                add(now, stage.kept_for_weights if kind == "W" else stage.kept, -1)
            alike = number, kind, number in ended
            size = sum(now.values())
            if alike not in fullest or size > fullest[alike][0]:
                fullest[alike] = size, dict(now)
            # What a microbatch keeps: before its backward, before its second half, and after it.
            if kind == "F":
                add(now, stage.kept)
            elif kind == "I":
                add(now, stage.kept_for_weights)
            else:
                if self.software.keeps_outputs:
                    add(now, stage.left)
                if number not in ended and not reduces and not unsharded:
                    add(now, {"gradients": stage.accumulated})
                ended.add(number)
        for (number, kind, again), (_, before) in fullest.items():
            there = again or (later and scatters == reduces)
            for peak in self.stages[number].peaks(kind, there, not reduces):
                yield plus(before, peak)

    def _rounding(self) -> float:
        """Temporary memory of torch's updates, and of ours: value, means, gradient and root in float32."""
        optimizer = self.job.optimizer
        largest = 4.0 * self.parameters.largest
        if {"bfloat16", EIGHT_BIT} & {self.job.precision.master_dtype, optimizer.state_dtype}:
            return 5 * largest if on_cpu(self.job) else 0.0  # optimizer/elementwise.py
        if optimizer.implementation == "foreach":
            return float(self.parameters.parameter_bytes)  # the roots of all second moments
        return 2 * largest if optimizer.implementation == "for-loop" else 0.0


def plus(first: Bytes, second: Bytes) -> Bytes:
    both = dict(first)
    add(both, second)
    return both


def add(moment: Bytes, more: Bytes, times: int = 1) -> None:
    for kind, size in more.items():
        moment[kind] = moment.get(kind, 0.0) + times * size
