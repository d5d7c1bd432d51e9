"""Bytes of activations, logits and the loss per microbatch, given layout, recomputation and compiler."""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.config.job import Job
from harness.model.accounting import DELTA_CHUNK
from harness.model.architecture import block_kinds
from harness.precision.linears import sort_linears
from harness.tools.plan.activations import (
    INNER,
    PARTIAL,
    RECEIVED,
    ROUTED,
    ROUTED_INNER,
    STREAM,
    WHOLE,
    PartActivations,
    SavedBy,
    SavedTensor,
    prediction_activations,
)
from harness.tools.plan.constants import DEFAULTS, Software
from harness.tools.plan.costs import costs_of
from harness.tools.plan.loads import known_imbalance
from harness.tools.plan.machine import on_cpu
from harness.tools.plan.parameters import BYTES, Memo

FLOAT32 = 4
GROUPED = ("moe.gate", "moe.up", "moe.outputs")
"""Products of experts."""


GATHERED = ("k", "v")
"""Saved tensors that context parallel by gathering has of all ranks."""
GATHERED_GRADIENTS = 3
"""Gradients of all ranks' keys and values that exist at once (by rehearsal)."""


@dataclass(frozen=True)
class PartBytes:
    """Bytes of activations of one part and one microbatch."""

    kept: float
    """Saved from forward to backward."""
    forward: float
    """Peak of its forward, including saved tensors."""
    backward: float
    """Peak of its backward, including recomputed tensors."""
    late_backward: float
    """Peak of the second half of its backward: for a block, attention."""


class ActivationBytes(Memo):
    """Converts declared activations into bytes for a job."""

    def __init__(self, job: Job, software: Software = DEFAULTS.software) -> None:
        super().__init__()
        self.job = job
        self.cpu = on_cpu(job)
        layout = job.parallelism
        self.software = software
        self.offloads = layout.cpu_offload and not self.cpu
        """Whether shards, their gradients and the optimizer's state are in the host's memory."""
        self.tokens = job.microbatch_size * job.training.seq_len // layout.cp
        """Tokens of one microbatch on a rank, before tensor parallel shards them."""
        stream = layout.tp if layout.uses_sequence_parallel else 1
        routed = 1 if layout.splits_experts else stream
        computed = known_imbalance(job, software) or 1.0
        self.degree = {
            STREAM: stream,
            WHOLE: 1,
            PARTIAL: 1,
            INNER: layout.tp,
            ROUTED: routed,
            RECEIVED: routed / computed,
            ROUTED_INNER: (layout.tp if layout.splits_experts else routed) / computed,
        }
        self.costs = costs_of(job.model)
        # Blocks that are compiled in pieces save the same tensors.
        self.compiled = job.compile.blocks and job.compile.backend != "eager"
        compute = BYTES[job.precision.param_dtype]
        self.sizes = {
            "compute": compute,
            "float32": 4,
            "int64": 8,
            "norm": 4 if self.cpu else compute,
            "widened": 0 if compute == 4 else 4,
        }
        """Bytes per value of each format of ``SavedTensor``."""
        dim = job.model.dim
        self.stream = self.bytes_of(SavedTensor("stream", dim, STREAM))
        self.summand = self.bytes_of(SavedTensor("stream", dim, PARTIAL))
        in_float8 = job.precision.enable_fsdp_float8_all_gather
        self.gathered_in_float8 = frozenset(
            sort_linears(job.model, job.precision).converted if in_float8 else ()
        )
        """Names of the linears whose weights FSDP gathers in float8."""

    def total(self, tensors: Iterable[SavedTensor], *, in_block: bool = True) -> float:
        """Sum the bytes, per microbatch, of those tensors that are saved.

        Compiled code saves fewer, and only blocks are compiled.
        """
        left_out = set[SavedBy]() if self.cpu else {SavedBy.COMPOSITE_NORM}
        if in_block and self.compiled:
            left_out = {SavedBy.EAGER, SavedBy.COMPOSITE_NORM}
        return sum(self.bytes_of(each) for each in tensors if each.by not in left_out)

    def bytes_of(self, tensor: SavedTensor) -> float:
        return self.tokens * tensor.width * self.sizes[tensor.dtype] / self.degree[tensor.cut]

    def block(self, layer: int) -> PartBytes:
        """Bytes of a block, under the job's recomputation and compiler."""
        covered = self.job.activation_checkpoint.covers(layer)
        key = block_kinds(self.job.model)[layer], covered
        return self.once(key, lambda: self._block(layer, covered))

    def _block(self, layer: int, covered: bool) -> PartBytes:
        declared = self._declared(layer)
        everything = self._without_recomputation(declared, layer)
        gradients = self.total(declared.backward)
        late = self.total(declared.late_backward)
        if not self.job.model.is_delta(layer):
            late += self._ring() + self._gathered_gradients()
        if not covered:
            forward = everything + self.stream + self.summand
            return PartBytes(everything, forward, everything + gradients, late)
        kept, extra = self._recomputed(declared, layer, everything)
        forward = kept + self.total(declared.forward)
        return PartBytes(kept, forward, everything + extra + gradients, late + extra)

    def _declared(self, layer: int) -> PartActivations:
        """What a block saves; where keys and values are gathered, those of all ranks."""
        job = self.job
        declared = self.costs.block_activations(
            job.model, layer, job.training.seq_len, on_cpu=self.cpu
        )
        if job.model.is_delta(layer):
            return self._of_fragments(declared)
        if not job.parallelism.gathers_keys:
            return declared
        kept = []
        for each in declared.kept:
            ranks = job.parallelism.cp if each.name in GATHERED else 1
            kept.append(replace(each, width=each.width * ranks))
        if job.parallelism.balances_context or self._by_block:
            # Attention of each piece saves its own result.
            attended = job.model.n_heads * job.model.value_width
            kept.append(SavedTensor("attended by piece", attended, INNER))
        # The values' own product is not what attention saves.
        products = [
            replace(each, name="wv") if each.name == "v" else each for each in declared.products
        ]
        return replace(declared, kept=tuple(kept), products=tuple(products))

    def _of_fragments(self, declared: PartActivations) -> PartActivations:
        """What Gated DeltaNet saves, with what context parallel adds: factors of earlier states, and the ends
        of all fragments."""
        layout = self.job.parallelism
        if layout.cp == 1:
            return declared
        of = self.job.model.delta
        read = of.value_heads * of.key_head_dim
        of_token = 2 * read + of.value_width + read * of.key_head_dim / DELTA_CHUNK
        fragments = layout.cp * (2 if layout.balances_context else 1)
        ends = fragments * read * (of.key_head_dim + of.value_head_dim)
        width = of_token + ends * layout.cp / self.job.training.seq_len
        added = SavedTensor("delta.factors and ends", width, INNER, "float32")
        return replace(declared, kept=(*declared.kept, added))

    @property
    def _by_block(self) -> bool:
        """Whether attention is computed block by block (``VarlenKernel``)."""
        job = self.job
        return job.parallelism.balances_documents and job.training.attention == "varlen"

    def _gathered_gradients(self) -> float:
        """Bytes of gradients of gathered keys and values: of all pieces of queries, and their sum."""
        model = self.job.model
        layout = self.job.parallelism
        if not layout.gathers_keys:
            return 0.0
        both = model.n_kv_heads * (model.head_width + model.value_width)
        gradients = GATHERED_GRADIENTS
        if self._by_block:
            gradients = layout.document_blocks(self.job.training.seq_len) + 1
        values = gradients * layout.cp * both
        return self.tokens * values * self.sizes["compute"] / self.degree[INNER]

    def _ring(self) -> float:
        """Bytes of a ring's own tensors in backward (torch, _templated_ring_attention_backward).

        In the compute dtype they are the keys and values that are sent, those of all ranks or of the
        last two, and the gradients of one step: of queries, keys and values. In float32 they are the
        sums of these gradients. Those of keys and values exist three times: also as sent, and as
        received.
        """
        layout = self.job.parallelism
        model = self.job.model
        if layout.cp == 1 or layout.cp_method != "ring":
            return 0.0
        queries = model.n_heads * model.head_width
        stored = model.n_kv_heads * 2 * model.head_width  # values are as wide as keys
        both = 2 * queries if self.software.repeats_keys else stored  # keys and values
        copies = layout.cp if layout.cp_rotate_method == "allgather" else 2
        compute = self.sizes["compute"]
        each = compute * (queries + (copies + 2) * both) + FLOAT32 * (queries + 3 * both)
        each += 2 * compute * (both - stored)  # what repetition adds, and its gradients
        return self.tokens * each / self.degree[INNER]

    def _without_recomputation(self, declared: PartActivations, layer: int) -> float:
        """Bytes that a block saves if it is not recomputed.

        With 8-bit products the compiler saves results of products in place of their inputs,
        which backward computes and casts again. Of the last product it saves the input, cast.
        """
        everything = self.total(declared.kept)
        mode = self.job.activation_checkpoint.mode
        chosen = self.compiled and mode not in ("full", "selective_op")
        if not chosen or self.job.precision.linear == "none":
            return everything
        last = self.total(each for each in declared.kept if each.name.endswith(".product"))
        width = BYTES["float8"] / self.sizes["compute"]
        return min(everything, self._results(declared, layer) + width * last)

    def _results(self, declared: PartActivations, layer: int) -> float:
        """Bytes of a compiled block's input, and of results of products that its backward reads."""
        needed = replace(declared, products=declared.products[:-1])
        saved = [*declared.choices, *self._saved_results(needed, layer, 1)]
        return self.stream + self.total(saved)

    def _recomputed(
        self, declared: PartActivations, layer: int, everything: float
    ) -> tuple[float, float]:
        """Return the bytes that a recomputed block saves, and those of them that it does not recompute too.

        ``everything`` are the bytes that it saves without recomputation.
        """
        ac = self.job.activation_checkpoint
        entering = self.stream
        if ac.mode == "memory_budget":
            # torch's partitioner fills a budget: a fraction between the minimum it has to save and
            # what it saves without recomputation. Below 1 it recomputes all that is not a result of
            # a product first (torch/_functorch/partitioners.py, choose_saved_values_set,
            # more_aggressive_options).
            filled = entering + ac.memory_budget * (everything - entering)
            if ac.memory_budget < 1:
                filled = min(filled, self._results(declared, layer))
            return filled, 0.0
        choices = self.total(declared.choices)
        if ac.mode != "selective_op":
            return entering + choices, 0.0
        # In pieces both halves are recomputed, each from its own input.
        if self._in_pieces(layer):
            entering *= 2
        saved = self._saved_results(declared, layer, ac.save_every_nth_matmul)
        recomputed = {tensor.name for tensor in declared.kept}
        extra = self.total(tensor for tensor in saved if tensor.name not in recomputed)
        return entering + choices + self.total(saved), extra

    def _in_pieces(self, layer: int) -> bool:
        """Whether a block is compiled in pieces (compile.py), since other ranks have its experts."""
        has_experts = self.job.model.has_experts(layer)
        return self.compiled and has_experts and self.job.parallelism.compiles_in_pieces

    def _saved_results(self, declared: PartActivations, layer: int, nth: int) -> list[SavedTensor]:
        """Results that a block saves: of attention, of sums and exchanges, and of every n-th product."""
        model = self.job.model
        layout = self.job.parallelism
        products = declared.products
        if self.job.precision.linear == "none":
            products = self._fused(products)
        halves = [products]
        if self._in_pieces(layer):
            # Those of the router and of shared experts are inside of compiled pieces.
            attention = tuple(each for each in products if not each.name.startswith("moe."))
            halves = [attention, tuple(each for each in products if each.name in GROUPED)]
        chosen: list[SavedTensor] = []
        if nth:  # 0 saves no product
            for half in halves:
                chosen += half[nth - 1 :: nth]
        # The compiler drops a summand whose sum is saved.
        if self.compiled and layout.tp > 1:
            chosen = [each for each in chosen if each.cut is not PARTIAL]
        saved = [*declared.always_saved, *chosen]
        # Collectives, but not gathers.
        if layout.tp > 1:
            saved += [SavedTensor("sum", model.dim, STREAM)] * 2
        if layout.ep > 1:
            # In one graph the compiler drops outputs that are then exchanged.
            if self.compiled and not self._in_pieces(layer):
                saved = [each for each in saved if each.name != "moe.outputs"]
            rows = model.moe.top_k * model.dim
            # There and back. Messages of a fixed size are as large on both ways.
            back = RECEIVED if layout.fixes_messages else ROUTED
            saved += [SavedTensor("exchange", rows, cut) for cut in (RECEIVED, back)]
            if back is ROUTED:
                # Experts' own results, before they are sent back.
                saved = [
                    replace(each, cut=RECEIVED) if each.name == "moe.outputs" else each
                    for each in saved
                ]
        return saved

    def _fused(self, products: Iterable[SavedTensor]) -> tuple[SavedTensor, ...]:
        """Join the results of each module's fused product, at the place of the first."""
        joined: dict[str, SavedTensor] = {}
        for each in products:
            key = each.fused or each.name
            first = joined.get(key)
            if first is not None:
                share = self.degree[first.cut] / self.degree[each.cut]
                each = replace(first, width=first.width + each.width * share)
            joined[key] = each
        return tuple(joined.values())

    def embedding(self) -> PartBytes:
        """Bytes of the modules before the blocks; their output is the first block's input."""
        declared = self.costs.entry_activations(self.job.model, self.job.training.seq_len)
        kept = self.total(declared.kept, in_block=False)
        return PartBytes(kept, kept + self.stream + self.summand, kept + self.summand, 0.0)

    def head(self) -> PartBytes:
        """Bytes of the final norm and the output projection's input, without logits."""
        declared = self.costs.head_activations(self.job.model, self.job.training.seq_len)
        kept = self.total(declared.kept, in_block=False) * (1 + self.job.model.mtp.depth)
        gradients = self.total(declared.backward, in_block=False)
        return PartBytes(kept, kept, kept + gradients, kept)

    def prediction(self) -> PartBytes:
        """Bytes of multi-token prediction, without its block."""
        kept = self.total(prediction_activations(self.job.model).kept, in_block=False)
        return PartBytes(kept, kept, kept, kept)


@dataclass(frozen=True)
class LogitBytes:
    """Logits of one microbatch on a rank, from the output projection to their gradient."""

    outputs: float = 0.0
    """The logits themselves."""
    kept: float = 0.0
    """Saved from forward to backward."""
    forward: float = 0.0
    """Peak of the loss."""
    backward: float = 0.0
    """Peak of its backward."""
    gradient: float = 0.0
    """During backward of the output projection."""
    unusable: float = 0.0
    """Bytes that are free in backward of the loss, but too small for its tensors."""


def logit_bytes(job: Job, activations: ActivationBytes) -> LogitBytes:
    """Compute the logits' memory.

    The plain loss (``parallelism/loss.py``) has them in param_dtype and float32, and saves the
    log-softmax. Its backward has three float32 tensors at once: the log-softmax, its gradient, and
    the gradient of the logits. torch's loss with a sharded vocabulary
    (torch/distributed/tensor/parallel/loss.py) is made of single operations, with four tensors at
    once. Compiled by inductor, the loss saves the logits themselves and writes only their gradient;
    with a sharded vocabulary it saves the log-softmax. In chunks (``parallelism/loss.py``) only one
    chunk exists at a time, and gradients are saved: of the stream, and of the projection in
    float32.

    CUDA's allocator cannot use the memory of the plain loss's logits in backward: they are freed
    after they are copied to float32, and all tensors that follow are twice as large.
    """
    layout = job.parallelism
    model = job.model
    streams = 1 + model.mtp.depth
    split = layout.tp > 1 and layout.loss_parallel
    outputs = costs_of(model).outputs(model)
    vocabulary = -(-outputs // layout.tp) if split else outputs
    compute = activations.sizes["compute"]
    copy = FLOAT32 if compute < FLOAT32 else 0
    numbers = float(activations.tokens * vocabulary)
    if job.training.loss_in_head:
        chunk = numbers / job.training.loss_chunks
        weight = float(vocabulary * model.dim)
        stream = activations.tokens * model.dim
        kept = streams * (FLOAT32 * weight + compute * stream)
        # The saved gradients are multiplied by the gradient of the loss; a CPU copies them to
        # float32.
        copies = FLOAT32 if activations.cpu else 0
        if model.logits_cap is not None:
            copy += FLOAT32  # the slope of the cap
        return LogitBytes(
            outputs=compute * numbers,
            kept=kept,
            # The gradient of a chunk is freed after the next one's is allocated.
            forward=kept + (2 * compute + copy) * chunk,
            backward=kept + (copies or compute) * weight + (copies + compute) * stream,
        )
    held = compute if layout.pp > 1 else 0  # a schedule keeps the last stage's output
    plain = not (job.compile.loss and job.compile.backend == "inductor")
    # Bytes per logit: saved, at the peak of the loss, at that of its backward.
    kept = FLOAT32 + held
    forward = compute + 2 * FLOAT32
    backward = FLOAT32 + compute + held
    if plain:
        others = 3 if split else 2
        forward = compute + copy + FLOAT32 * (others - 1)
        backward = FLOAT32 * (others + 1) + held
    elif not split:
        # With a split vocabulary, collectives between maximum, sum and difference keep the loss
        # from being one kernel.
        kept = compute
        forward = backward = 2 * compute
    if model.logits_cap is not None:
        # Its tanh is saved, and logits before and after it exist at once.
        kept += compute
        forward += 2 * compute
        backward += compute
    wasted = plain and copy and not held and not activations.cpu
    # Without the parallel loss, the ranks' columns are gathered.
    columns = compute * numbers / layout.tp if layout.tp > 1 and not split else 0.0
    # Several streams run one after another, also in backward.
    more = (streams - 1) * numbers
    return LogitBytes(
        outputs=compute * numbers,
        kept=streams * kept * numbers,
        forward=forward * numbers + more * (compute + kept) + columns,
        backward=backward * numbers + more * max(kept, compute),
        gradient=streams * compute * numbers + columns,
        unusable=compute * numbers if wasted else 0.0,
    )
