"""Peak memory of the passes of one pipeline stage, or of the full model.

FSDP2's part follows its source (torch/distributed/fsdp/_fully_shard, torch 2.13). Gathered
parameters are copied out of the gather buffer, so in forward a group is in memory twice. Backward
gathers the next group before it computes one; with expert parallel so does forward. Gradients are
copied, in precision.reduce_dtype, into the input of a reduce-scatter, which is freed when the next
group is reduced. A pipeline keeps gathered parameters, and accumulates unsharded gradients in
reduce_dtype over all microbatches (torch/distributed/pipelining/stage.py,
backward_maybe_with_nosync and perform_reduce_grad).
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, pairwise

from harness.config.job import Job
from harness.tools.plan.machine import on_cpu
from harness.tools.plan.memory_parts import ActivationBytes, LogitBytes, PartBytes, logit_bytes
from harness.tools.plan.parameters import BYTES, HeldModule, HeldTensor, Memo, groups_of

Bytes = dict[str, float]
"""Bytes by kind of memory: a moment. Three kinds are separate because they belong to other CUDA streams
or pools: ``shards``, the gradients of shards; ``buffers``, FSDP's gather buffers; ``reducing``, the
inputs of its reduce-scatters. Another one, ``unusable``, is free memory that the allocator cannot
use."""

IN_ATTENTION = re.compile(r"\.(\w+_)?(attention|attn)\.")
"""Names of tensors whose gradients are computed last in a block's backward."""


def heaviest(moments: Iterable[Bytes], *ignored: str) -> Bytes:
    """The moment with the most bytes, without those of ``ignored`` kinds."""

    def size(moment: Bytes) -> float:
        return sum(moment.values()) - sum(moment.get(kind, 0.0) for kind in ignored)

    return max(moments, key=size)


def kinds_apart(job: Job) -> tuple[str, ...]:
    """Kinds of a step's memory that CUDA's allocator keeps apart: other kinds cannot use it."""
    if job.fsdp_ranks == 1 or on_cpu(job):
        return ()
    if job.parallelism.fsdp_buffers == "default":
        return ("shards", "buffers")
    return ("shards", "buffers", "reducing")


@dataclass(frozen=True)
class Module:
    """One step of a stage's forward. Its parameters are one FSDP group, or two with experts."""

    part: PartBytes
    freed: bool
    """Whether gathered parameters are freed after forward."""
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


class StageMemory(Memo):
    """Memory of the passes of one stage, for one microbatch, on its rank with the most memory.

    ``held`` are its modules by name.
    """

    def __init__(
        self, activations: ActivationBytes, stage: int, held: Mapping[str, HeldModule]
    ) -> None:
        super().__init__()
        job = activations.job
        layout = job.parallelism
        pipelined = layout.pp > 1
        self.job = job
        self.fsdp = job.uses_fsdp
        self.activations = activations
        self.has_head = "output" in held
        self.logits = logit_bytes(job, activations) if self.has_head else LogitBytes()
        self.modules = list(self._modules(held))
        # A pipeline has the ends on different ranks.
        if activations.software.joint_ends and self.fsdp and not pipelined:
            self._join_ends()
        modules = self.modules
        self.boundary = activations.stream
        """Bytes of one microbatch's stream between stages."""
        kept = sum(module.part.kept for module in modules)
        if stage > 0:
            # The first block's input is the receive buffer, which is counted with the boundaries.
            kept -= min(self.boundary, modules[0].part.kept)
        if not self.has_head:
            kept += self.boundary  # the schedule keeps a stage's output
        self.kept = {"activations": kept, "logits": self.logits.kept}
        """Memory that a microbatch saves from its forward to its backward."""
        recomputed = sum(max(module.part.kept, module.part.backward) for module in modules)
        self.kept_for_weights = {"activations": recomputed}
        """Memory between backward for inputs and for weights: recomputed blocks have all of their tensors."""
        output = self.logits.outputs if self.has_head else self.boundary
        self.left = {"activations": output + (self.boundary if stage > 0 else 0.0)}
        """Memory that a microbatch leaves after its backward with ``Software.keeps_outputs``."""
        self.accumulated = sum(module.accumulated for module in modules)
        # While one module's parameters are copied out of their buffer, the next ones are gathered.
        buffers = [module.buffer for module in modules]
        self.prefetched = layout.fsdp_prefetch
        self.buffers = max(sum(buffers[i : i + 1 + self.prefetched]) for i in range(len(buffers)))
        if layout.fsdp_buffers != "default":
            # Blocks may be in the embedding's memory when the head needs it.
            self.buffers += min(buffers[0], buffers[-1])
        # One reduce-scatter is in flight while the input of the next one is filled.
        reduced = chain.from_iterable(module.reduced for module in modules)
        self.reduction = max(map(sum, pairwise([0.0, *reduced])), default=0.0)
        self.reduced = max(sum(module.reduced) for module in modules)
        self.resident = 0.0
        """Bytes of parameters that a pipeline gathers before the first pass, and keeps."""
        if pipelined:
            self.resident = sum(module.gathered for module in modules)
            self.modules = [replace(module, gathered=0.0, buffer=0.0) for module in modules]

    def _modules(self, held: Mapping[str, HeldModule]) -> Iterator[Module]:
        activations = self.activations
        model = self.job.model
        ends = groups_of(module for name, module in held.items() if not name.startswith("layers."))
        for name, module in held.items():
            if name == "tok_embeddings":
                yield self._module(name, activations.embedding(), [ends.get(name, [])])
            elif name.startswith("layers."):
                part = activations.block(int(name.removeprefix("layers.")))
                yield self._module(name, part, module.groups.values())
        if self.has_head and model.mtp.depth:
            yield self._module("mtp", activations.prediction(), [ends["mtp"]])
            groups = ends["mtp.block"], ends.get("mtp.block.experts", [])
            yield self._module("mtp.block", activations.block(model.n_layers), groups)
        if self.has_head:
            group = [*ends.get("head", []), *ends.get("root", [])]
            yield self._module("head", activations.head(), [group])

    def _module(self, name: str, part: PartBytes, groups: Iterable[list[HeldTensor]]) -> Module:
        layout = self.job.parallelism
        precision = self.job.precision
        groups = [group for group in groups if group]
        tensors = list(chain.from_iterable(groups))
        compute = BYTES[precision.param_dtype]
        reduce = BYTES[precision.reduce_dtype]
        master = BYTES[precision.master_dtype]
        elements = sum(tensor.gathered_elements for tensor in tensors)
        # Backward of a feed-forward computes the gradient of w2 first.
        first = sum(t.gathered_elements for t in tensors if t.name.endswith((".w2", ".w2.weight")))
        late = sum(t.gathered_elements for t in tensors if not IN_ATTENTION.search(t.name))
        sharded = master * sum(tensor.held_elements for tensor in tensors)
        gathered = 0
        reduced: list[int] = []
        if self.fsdp:
            in_float8 = self.activations.gathered_in_float8
            for tensor in tensors:
                narrow = tensor.spec.is_matrix and tensor.spec.module in in_float8
                gathered += tensor.padded_elements * (BYTES["float8"] if narrow else compute)
            # A rank that is alone reduces in place: the input becomes the gradients of the shards.
            copied = reduce if self.job.fsdp_ranks > 1 else 0
            reduced += [copied * sum(t.padded_elements for t in group) for group in groups]
        # Without FSDP, gradients are those of the parameters themselves.
        computed = compute if self.fsdp else master
        return Module(
            part,
            freed=layout.frees(name),
            gathered=gathered,
            buffer=gathered if layout.parameter_shards > 1 else 0,
            gradients=computed * elements,
            first_gradients=computed * first,
            late_gradients=computed * late,
            accumulated=(reduce if self.fsdp else master) * elements,
            reduced=tuple(reduced),
            sharded=0 if self.activations.offloads else sharded,
        )

    def _join_ends(self) -> None:
        """Make the first module and the head one FSDP group, and let the last block stay gathered."""
        first, *blocks, last, head = self.modules
        joint = replace(
            first,
            freed=False,
            gathered=first.gathered + head.gathered,
            buffer=first.buffer + head.buffer,
            reduced=(sum(first.reduced) + sum(head.reduced),),
            sharded=first.sharded + head.sharded,
        )
        head = replace(head, gathered=0.0, buffer=0.0, reduced=(), sharded=0.0)
        self.modules = [joint, *blocks, replace(last, freed=False), head]

    def peaks(self, kind: str, gradients_there: bool, accumulates: bool) -> list[Bytes]:
        """The moments of a pass with the most bytes: in use, and in the memory that all kinds share.

        A forward pass adds them to the memory before it, a backward pass also has what its
        microbatch has saved. Gradients of earlier passes are not included: the caller counts them.
        If the pass ``accumulates``, its gradients stay unsharded.
        """

        def find() -> list[Bytes]:
            moments = self._forward()
            if kind != "F":
                moments = self._backward(gradients_there, accumulates)
            every = list(moments)
            return [heaviest(every, "unusable"), heaviest(every, *kinds_apart(self.job))]

        return self.once((kind == "F", gradients_there, accumulates), find)

    def _forward(self) -> Iterator[Bytes]:
        layout = self.job.parallelism
        explicit = layout.pp == 1 and (layout.ep > 1 or self.prefetched > 1)
        held = gathered = 0.0
        for module in self.modules:
            yield {
                "activations": held + module.part.forward,
                "gathered": gathered + module.gathered,
                "buffers": self.buffers if explicit else module.buffer,
            }
            held += module.part.kept
            if not module.freed:
                gathered += module.gathered
        yield {"activations": held, "gathered": gathered, "logits": self.logits.forward}

    def _backward(self, gradients_there: bool, accumulates: bool) -> Iterator[Bytes]:
        precision = self.job.precision
        held = self.kept["activations"]
        gathered = sum(module.gathered for module in self.modules if not module.freed)
        # Gradients of later modules, unsharded and sharded; input of the reduce-scatter in flight.
        unsharded = shards = reducing = 0.0
        yield {
            "activations": held,
            "gathered": gathered,
            "logits": self.logits.backward,
            "unusable": self.logits.unusable,
        }
        logits = self.logits.gradient
        # A gradient that is added to an existing one is freed at once; a quarter is counted.
        new = 0.25 if gradients_there and not self.fsdp else 1.0
        for index, module in reversed(list(enumerate(self.modules))):
            part = module.part
            held -= part.kept
            if module.freed:
                gathered += module.gathered
            before = self.modules[max(0, index - self.prefetched) : index]
            base = {
                "gathered": gathered,
                "buffers": sum(each.buffer for each in before if each.freed),
                "shards": shards,
                "reducing": reducing,
                "logits": logits,
            }
            for activations, gradients in (
                (part.backward, module.first_gradients),
                (part.late_backward, module.late_gradients),
                (0.0, module.gradients),
            ):
                moment = {
                    "activations": held + activations,
                    "gradients": unsharded + new * gradients,
                }
                yield base | moment
            logits = 0.0
            gathered -= module.gathered
            base |= {"activations": held, "gathered": gathered, "logits": 0.0}
            if accumulates:
                if self.fsdp and precision.reduce_dtype != precision.param_dtype:
                    # Converted tensor by tensor, so both copies exist.
                    yield base | {"gradients": unsharded + module.gradients + module.accumulated}
                if not gradients_there:
                    unsharded += module.accumulated
                continue
            reducing = sum(module.reduced)
            yield base | {
                "gradients": unsharded + module.gradients,
                "shards": shards + module.sharded,
                "reducing": reducing,
            }
            if not module.reduced:
                unsharded += module.gradients  # they are reduced with those of another module
            if not gradients_there:
                shards += module.sharded


def stage_memory(
    activations: ActivationBytes, stage: int, held: Mapping[str, HeldModule]
) -> StageMemory:
    """The memory of a stage; stages of a job with equal blocks share it."""
    checkpointing = activations.job.activation_checkpoint
    blocks = [
        (module.name, checkpointing.covers(int(name.removeprefix("layers."))))
        if name.startswith("layers.")
        else name
        for name, module in held.items()
    ]
    key = "stage", stage > 0, *blocks
    return activations.once(key, lambda: StageMemory(activations, stage, held))
