"""Peak memory of every pipeline rank, in closed form (torch only for a pipeline's order).

The passes of a rank are followed in the order of its schedule. The memory at a moment is the sum of
persistent memory (parameters, optimizer state, gathered parameters of a pipeline), activations of
microbatches that wait for their backward, the gradients so far, and the peak of the current pass
(``memory_stage.py``). The kinds of the largest moment are reported. Maxima of different moments are not
added, except where CUDA's allocator does so (``_as_reserved``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from harness.config.job import Job
from harness.tools.plan.constants import Software
from harness.tools.plan.costs import costs_of
from harness.tools.plan.machine import on_cpu
from harness.tools.plan.memory_activations import ActivationBytes
from harness.tools.plan.memory_stage import Bytes, StageMemory, heaviest, plus
from harness.tools.plan.order import Moment, fullest, pipeline_order
from harness.tools.plan.parameters import RankParameters, parameters_of_ranks
from harness.tools.plan.plan import KINDS, RankMemory
from harness.tools.plan.update import planned_update
from harness.util.hardware import Accelerator
from harness.util.tables import GIB

MIB = 2**20

FRAGMENTATION = 0.03
"""Memory that CUDA's caching allocator reserves for free blocks that are too small for later requests, as a
fraction of the rest: allocated memory, memory of other streams, and what the loss leaves unusable. Fitted to
rehearsals of full-size jobs (experiments/rehearsal); 0.00 to 0.07 for most."""
CUBLAS_WORKSPACE = 32 * MIB
"""Workspace of cuBLAS on Hopper, per stream with matrix products (docs.nvidia.com/cuda/cublas,
cublasSetWorkspace)."""
HBM_LEFT = 0.99
"""Fraction of HBM that the driver leaves to programs (``harness/util/hardware.py``, memory_gib)."""
CUDA_CONTEXT = 0.5 * GIB
"""CUDA context and kernels of a process with torch's libraries loaded; not part of the allocator's memory."""
NCCL_COMMUNICATOR = 0.1 * GIB
"""Buffers of one communicator (4 MiB per channel, protocol and peer, docs.nvidia.com/deeplearning/nccl,
NCCL_BUFFSIZE); not part of the allocator's memory either."""
CPU_PROCESS = 0.33 * GIB
"""Resident memory of a rank on a CPU before it builds a model: Python, torch and their libraries."""
STAGES_GATHERED = 3
"""A pipeline schedule keeps the gathered parameters of at most this many of a rank's stages."""


def rank_memory(
    job: Job, parameters: Sequence[RankParameters] | None = None, software: Software | None = None
) -> list[RankMemory]:
    """Compute the memory of every pipeline rank at its peak.

    Args:
        job: the resolved job.
        parameters: the shards of every pipeline rank, if they are known.
        software: what the trainer runs, if it is another one.
    """
    order = pipeline_order(job.parallelism, job.model.n_layers, job.microbatches)
    prices = ActivationBytes(job, repeats_keys=software is not None and software.repeats_keys)
    keeps_outputs, memory = software is not None and software.keeps_outputs, []
    for held in parameters or parameters_of_ranks(job):
        equal = equal_stages(job, held)
        passes = fullest(order[held.pp_rank], equal, keeps_outputs=keeps_outputs)
        memory.append(RankStep(job, held, prices, equal, passes, software).memory())
    return memory


def memory_limit(job: Job, device: Accelerator | None) -> float | None:
    """Bytes of a device that a run can allocate; None for an unknown device and for CPUs.

    Memory of the driver, the CUDA context and NCCL is subtracted: neither ``torch.cuda.max_memory_reserved``
    nor the plan counts it.
    """
    if device is None:
        return None
    layout = job.parallelism
    axes = [layout.pp, layout.dp_replicate, layout.parameter_shards, layout.cp, layout.tp, layout.ep]
    communicators = 1 + sum(degree > 1 for degree in axes) if job.world_size > 1 else 0
    total = device.memory_gib * GIB * HBM_LEFT
    return total - CUDA_CONTEXT - communicators * NCCL_COMMUNICATOR


def equal_stages(job: Job, parameters: RankParameters) -> dict[int, int]:
    """The first of a rank's stages with the same modules as each."""
    by_layer = job.activation_checkpoint.mode == "selective_layer"
    first: dict[object, int] = {}
    return {
        stage: stage if by_layer else first.setdefault((stage > 0, *modules.values()), stage)
        for stage, modules in parameters.modules.items()
    }


class RankStep:
    """One pipeline rank's step.

    Args:
        job: the resolved job.
        parameters: the shards of the rank.
        prices: converts activations to bytes.
        equal: its ``equal_stages``, which share their memory.
        passes: the fullest passes of a local batch. With only those among the first passes, the result is a
            lower bound.
        software: what the trainer runs, if it is another one.
    """

    def __init__(
        self,
        job: Job,
        parameters: RankParameters,
        prices: ActivationBytes,
        equal: Mapping[int, int],
        passes: Sequence[Moment],
        software: Software | None = None,
    ) -> None:
        self.job, self.parameters, self.passes = job, parameters, passes
        joint_ends = software is not None and software.joint_ends
        made = {
            stage: StageMemory(job, parameters, stage, prices, joint_ends=joint_ends)
            for stage in set(equal.values())
        }
        self.stages = {stage: made[first] for stage, first in equal.items()}
        self.numbers = Counter(equal.values())
        self.cpu, self.fsdp = on_cpu(job), job.uses_fsdp
        self.pipelined = job.parallelism.pp > 1
        self.offloaded = job.parallelism.cpu_offload and not self.cpu

    def memory(self) -> RankMemory:
        """Memory of the rank at its peak."""
        moments = list(self._moments())
        fullest = heaviest(self._as_reserved(moment) for moment in moments)
        kinds = {kind: float(fullest.get(kind, 0.0)) for kind in KINDS}
        kinds["runtime"] += self._runtime(kinds)
        allocated = max(sum(moment.values()) - moment.get("unusable", 0.0) for moment in moments)
        allocated += 0 if self.cpu else 2 * CUBLAS_WORKSPACE  # tensors of torch
        return RankMemory(self.parameters.pp_rank, self.parameters.stages, kinds, allocated)

    def _as_reserved(self, moment: Bytes) -> Bytes:
        """Convert a moment to the displayed kinds, with the memory that CUDA's allocator reserves per stream.

        FSDP2 allocates sharded gradients on its reduce stream, and gather buffers on its gather stream
        (_fsdp_collectives.py, foreach_reduce and foreach_all_gather). The allocator does not reuse freed
        memory on other streams, so this memory counts at any moment.
        """
        shards, buffers = moment.get("shards", 0.0), moment.get("buffers", 0.0)
        if self.fsdp and not self.cpu:
            shards = self._gradients()
            buffers = max(stage.buffers for stage in self.stages.values())
        displayed = {kind: size for kind, size in moment.items() if kind in KINDS}
        unusable = moment.get("unusable", 0.0)
        return plus(displayed, {"gradients": shards, "gathered": buffers, "runtime": unusable})

    def _moments(self) -> Iterator[Bytes]:
        always = self._always()
        passes = self.job.accumulation_steps
        # The first pass starts without gradients; later passes except the last are like the second.
        for number in {0, min(1, passes - 1), passes - 1}:
            yield from self._pass(always, number, last=number + 1 == passes)
        yield plus(always, {"shards": self._gradients()}, self._update())

    def _always(self) -> Bytes:
        """Bytes that stay for the complete step, from the second step on (the optimizer has its state)."""
        buffers = self.parameters.buffer_bytes + self._rotation_table()
        return {
            "parameters": buffers + (0 if self.offloaded else self.parameters.parameter_bytes),
            "optimizer": 0.0 if self.offloaded else self.parameters.optimizer_bytes,
            "activations": self._batch(),
            "communication": self._boundaries(),
        }

    def _batch(self) -> float:
        """Bytes of the batch, of complete sequences, for all passes of a step."""
        rows = self.job.global_batch_size // self.job.parallelism.data_parallel
        model = self.job.model
        return rows * costs_of(model).sample_bytes(model, self.job.training.seq_len)

    def _rotation_table(self) -> float:
        """Bytes of cosines and sines of this rank's positions, float32, one table per stage."""
        length = self.job.training.seq_len / self.job.parallelism.cp
        return len(self.stages) * 4 * length * self.job.model.rotated_width

    def _boundaries(self) -> float:
        """Bytes of the stages' receive buffers, for all microbatches (PipelineStage, args_recv_info)."""
        if not self.pipelined:
            return 0.0
        entering = sum(stage.boundary for index, stage in self.stages.items() if index > 0)
        returning = sum(stage.boundary for stage in self.stages.values() if not stage.has_head)
        return self.job.microbatches * (entering + returning)

    def _pass(self, always: Bytes, number: int, *, last: bool) -> Iterator[Bytes]:
        """Yield the peaks of the passes over one local batch."""
        reduces = self.fsdp and not self.pipelined and (self.job.parallelism.parameter_shards > 1 or last)
        sharded_before = self._sharded_after(number)
        before = {stage: self._accumulated_after(number, stage) for stage in self.numbers}
        after = before if reduces else {stage: self.stages[stage].accumulated for stage in self.numbers}
        for moment in self.passes:
            stage, counts = self.stages[moment.stage], moment.counts
            gradients = (
                counts["gradients", each] * after[each] + (count - counts["gradients", each]) * before[each]
                for each, count in self.numbers.items()
            )
            base = {
                "gathered": self._gathered({each: counts["ran", each] for each in self.numbers}),
                "gradients": sum(gradients),
                "shards": sharded_before,
            }
            kept = plus(always, base, *self._waiting(counts))
            if moment.kind == "F":
                yield plus(kept, stage.forward)
                continue
            own = (after if moment.again else before)[moment.stage]
            has_gradients = sharded_before > 0 if reduces else own > 0
            for peak in stage.backward(gradients_there=has_gradients, accumulates=not reduces):
                yield plus(kept, peak)
        if self.pipelined and self.fsdp:
            # Group by group: unsharded gradients are freed as their shards are allocated.
            reduction = {
                "gathered": self._gathered(self.numbers),
                "gradients": sum(count * after[stage] for stage, count in self.numbers.items()),
                "shards": sharded_before,
                "communication": max(stage.reduction for stage in self.stages.values()),
            }
            yield plus(always, reduction)

    def _waiting(self, counts: dict[tuple[str, int], int]) -> Iterator[Bytes]:
        """Yield what microbatches keep: before their backward, before its second half, and after it."""
        for number in self.numbers:
            stage = self.stages[number]
            for kind, saved in (("F", stage.kept), ("I", stage.kept_for_weights), ("left", stage.left)):
                if count := counts.get((kind, number), 0):
                    yield {of: count * size for of, size in saved.items()}

    def _gathered(self, ran: Mapping[int, int]) -> float:
        """Bytes of gathered parameters that a pipeline rank holds at once; how many stages ran, by stage."""
        if not self.pipelined:
            return 0.0
        sizes = [size for stage, count in ran.items() for size in [self.stages[stage].resident] * count]
        return sum(sorted(sizes, reverse=True)[:STAGES_GATHERED])

    def _accumulated_after(self, passes: int, stage: int) -> float:
        """Bytes of a stage's unsharded gradients, accumulated by earlier passes."""
        layout = self.job.parallelism
        unsharded = not self.fsdp or (layout.parameter_shards == 1 and not self.pipelined)
        return self.stages[stage].accumulated if passes and unsharded else 0.0

    def _sharded_after(self, passes: int) -> float:
        """Bytes of sharded gradients, accumulated by earlier passes."""
        layout = self.job.parallelism
        scattered = self.fsdp and (layout.parameter_shards > 1 or self.pipelined)
        return self._gradients() if passes and scattered else 0.0

    def _gradients(self) -> float:
        """Bytes of sharded gradients on the device after backward."""
        if self.job.optimizer.in_backward or self.offloaded:
            return 0.0
        return self.parameters.gradient_bytes

    def _update(self) -> Bytes:
        """Temporary memory of the optimizer's update."""
        update = planned_update(self.job, self.parameters)
        exchanged = {} if update is None else {"communication": update.buffers}
        return max(self._rounding(), exchanged, key=lambda kinds: sum(kinds.values()))

    def _rounding(self) -> Bytes:
        """Temporary memory of torch's updates, and of ours in float32."""
        largest = self.parameters.largest
        how = self.job.optimizer.implementation
        if "bfloat16" in (self.job.precision.master_dtype, self.job.optimizer.state_dtype):
            return {"runtime": 5 * 4 * largest}  # optimizer/adamw.py: value, means, gradient and root
        if how == "foreach":
            return {"runtime": float(self.parameters.parameter_bytes)}  # roots of all second moments
        return {"runtime": 2.0 * 4 * largest if how == "for-loop" else 0.0}

    def _runtime(self, kinds: Bytes) -> float:
        if self.cpu:
            return CPU_PROCESS
        own = self._gradients() if self.fsdp else 0.0
        return FRAGMENTATION * (sum(kinds.values()) - own) + 2 * CUBLAS_WORKSPACE
