"""Time and traffic of one block, and of the head, for one microbatch on one rank."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from harness.config.job import Job
from harness.model.spec import Split, TensorSpec
from harness.precision.linears import sort_linears
from harness.tools.plan.collectives import Collective, Pass, collective_of, context_parallel
from harness.tools.plan.costs import Operations, costs_of
from harness.tools.plan.loads import known_imbalance, routed_tokens
from harness.tools.plan.machine import Machine
from harness.tools.plan.parameters import BYTES, tp_of


@dataclass(frozen=True)
class ElementWise:
    """Element-wise operations in an eager forward, in bytes per 16-bit value; backward moves twice as much.

    Eager kernels are counted one by one; a compiled operation is one kernel that reads its inputs
    and writes its output.
    """

    norm: float = 4
    zero_centred: float = 4
    """Of a norm that is zero-centred, more."""
    residual: float = 6
    rotation: float = 20
    gate: float = 10
    clamped: float = 22
    """Of a gate that is clamped (``swiglu_clamped``), more."""
    bias: float = 10
    """Per output of an expert with biases: each row's is looked up and added."""
    bias_gradient: float = 64
    """The same in backward, as bytes that take the same time: rows are added up with atomics."""
    router: float = 6
    """Per value of the residual stream, which routers read in 32 bits."""
    sort: float = 18
    """Per value of a row of an expert: rows are copied in the experts' order, back, and added up in 32 bits,
    as in published runs. ``model/combine.py`` moves a third of it; what that saves, a GPU has to
    show."""
    exchanged: float = 8
    """The same, more: rows that came from other ranks are sorted by expert, and back
    (``parallelism/expert.py``)."""
    kernels: int = 15
    """Kernels of a block in forward other than products, for their fixed cost; backward has twice
    as many."""
    expert_kernels: int = 31
    """The same, more, if the block has experts: routing, sorting and counting."""


# A norm reads and writes; a sum of two streams takes 6; a rotation casts up, multiplies complex
# numbers and casts down (20); a gate is SiLU (4) and a product (6); a clamped one has two clamps, a
# factor, a sigmoid, a sum and two products (32). Experts' rows are copied twice (8), cast (6) and
# read by the product that adds them up (4). Kernels are those of rehearsals
# (experiments/rehearsal/TABLES.md: 1,900 and 992 for 32 blocks with half of a forward recomputed);
# those of compiled experts are assumed.
#
# Gradients of biases: of 1,571 ms of a step of GPT-OSS 20b another kernel saves 183 (MFU of 16.50
# and 18.68 %, github.com/pytorch/torchtitan/pull/2686), of which adding the biases takes 30: 6.4 ms
# for each of 24 layers of 32,768 rows.
EAGER = ElementWise()
COMPILED = replace(
    EAGER,
    zero_centred=0,
    residual=4,
    rotation=4,
    gate=6,
    clamped=0,
    bias=4,
    router=4,
    sort=10,
    kernels=8,
    expert_kernels=15,
)
# Before torch 2.9 (github.com/pytorch/pytorch/pull/153666) an eager norm casts up, squares,
# averages, scales, casts down and multiplies by the weight, one kernel each.
UNFUSED = replace(EAGER, norm=30)

# Logits, forward and backward: cast to 32 bits, softmax, the loss, its gradient, the cast back.
EAGER_LOGIT = 34.0
COMPILED_LOGIT = 14.0

# torch gathers and scatters along the first dimension; along the sequence, the tensor is copied
# before or after (torch/distributed/_functional_collectives.py): one read and one write.
ALONG_SEQUENCE = 2.0


@dataclass(frozen=True)
class Casts:
    """Casts of the operands of 8-bit products, in bytes per 16-bit value."""

    forward: float
    input_backward: float
    """Of inputs again, for gradients of weights: along the other dimension."""
    gradient: float
    weight: float
    """Of weights in forward, once a microbatch."""
    weight_backward: float
    """Of weights again, for gradients of inputs: along the other dimension."""


# One scale a tensor: one read for the maximum, then one read and a write of a byte; a gradient's
# product also needs the transposed layout: one more read and write. One scale a row: a row is read
# once, a column twice; a weight's columns are copied into rows first. Blocks of 32 values are read
# once in either direction (torchao/testing/training/roofline_utils.py).
CASTS = {
    "none": Casts(0, 0, 0, 0, 0),
    "float8_tensorwise": Casts(5, 2, 7, 5, 3),
    "float8_rowwise": Casts(3, 5, 8, 3, 7),
    "float8_rowwise_hp": Casts(3, 0, 3, 3, 3),
    "mxfp8": Casts(3, 3, 6, 3, 3),
}

COUNT_BYTES = 8
# Triton's kernels pad heads to a power of two: QK_HEAD_DIM_ROUNDED in a log in which backward has
# 250 TFLOP/s on an H100, at widths of 192 and 128 (github.com/pytorch/torchtitan/pull/1437).
PADDED_KERNELS = ("flex",)
HIGH_PRECISION = "float8_rowwise_hp"
ROWWISE = ("float8_rowwise", HIGH_PRECISION)


@dataclass(frozen=True)
class BlockPasses:
    """The passes of one block."""

    forward: Pass
    recompute: Pass
    """Recomputation by activation checkpointing, at the start of backward."""
    inputs: Pass
    """Gradients of the inputs."""
    weights: Pass
    """Gradients of the weights, and their accumulation."""


class Worker:
    """Predicts the time and collectives of a job's passes on a machine."""

    def __init__(self, job: Job, machine: Machine) -> None:
        layout = job.parallelism
        precision = job.precision
        moe = job.model.moe
        self.job = job
        self.machine = machine
        self.layout = layout
        self.model_costs = costs_of(job.model)
        self.converted = frozenset[str]()
        """Names of the linears with 8-bit products."""
        if precision.linear != "none":
            self.converted = frozenset(sort_linears(job.model, precision).converted)
        self.rows = job.microbatch_size * job.training.seq_len // layout.cp
        """Tokens of a rank in a microbatch."""
        sequence_parallel = layout.uses_sequence_parallel
        self.stream_rows = self.rows // layout.tp if sequence_parallel else self.rows
        """Those of its residual stream."""
        self.sorted_rows = routed_tokens(job)
        """Those that it sends to experts."""
        busiest = known_imbalance(job, machine.software)
        if busiest is None:
            busiest = machine.busiest(layout.ep, moe.num_experts // layout.ep)
        self.busiest = busiest
        """Rows that its experts compute, as a multiple of their mean."""
        self.expert_rows = round(self.sorted_rows * self.busiest)
        """Tokens of the busiest rank's experts, for which the others wait."""
        self.expert_tp = layout.tp if layout.splits_experts else 1
        """Ranks that split each expert."""
        self.value_bytes = BYTES[precision.param_dtype]
        eager = EAGER if machine.software.fused_norm else UNFUSED
        self.costs = COMPILED if job.compile.blocks else eager
        self.casts = CASTS[precision.linear]
        # With one scale a tensor, inputs are cast before they are gathered
        # (harness/precision/swap.py).
        self.casts_stream = precision.linear == "float8_tensorwise" and sequence_parallel

    def block(self, layer: int) -> BlockPasses:
        """The passes of one block: forward from top to bottom, then backward."""
        job = self.job
        machine = self.machine
        layout = self.layout
        casts = self.casts
        operations = self.model_costs.block_operations(job.model, layer, job.training.seq_len)
        matrices = operations.products
        kernels = self.costs.kernels
        if operations.expert_width:
            kernels += self.costs.expert_kernels
        biased = 0.0
        if job.model.moe.expert_bias:
            width = 2 * operations.expert_gate_width / self.expert_tp + operations.expert_width
            biased = self.expert_rows * width
        element_wise = self._passes(operations, biased) + machine.constants.launch * kernels
        attention = self._attention_seconds(operations)
        context, context_back = context_parallel(
            job, machine, operations.attention, self.rows, attention
        )
        products = self._products(matrices, self.converted)
        narrow = [each for each in matrices if each.module in self.converted]
        # FSDP that gathers weights in 8 bits has cast its shard of them before.
        cast_weights = 0.0
        if not job.precision.enable_fsdp_float8_all_gather:
            cast_weights = self._gathered_values(narrow)
        casts_of_weights = machine.pass_seconds(cast_weights * casts.weight)
        # Element-wise operations, and casts of the products' operands.
        others = element_wise + self._cast(narrow, casts.forward, of_inputs=True)
        computing = products + attention + context.compute + others + casts_of_weights
        # The host starts every kernel; the device waits for it if it is faster.
        host = machine.constants.host * (kernels + len(matrices) + 1)
        if job.compile.cuda_graphs:
            host = 0.0
        # Experts that are not split take rows of the split sequence, so of a mixture only shared
        # experts count.
        regions = 2 if operations.gate_width or layout.splits_experts else 1
        tensor = self._tensor(self.rows, regions, regions)
        # Counts of the rows to the experts, the rows, and the rows back. Backward has the last two.
        experts: tuple[Collective, ...] = ()
        if layout.ep > 1 and operations.expert_width:
            rows = self.expert_rows * operations.expert_width * self.value_bytes
            sizes = job.model.moe.num_experts * COUNT_BYTES, rows, rows
            experts = tuple(collective_of(job, machine, "ep", "all_to_all", one) for one in sizes)
        forward = Pass(max(computing, host), (*tensor, *context.collectives, *experts))
        # FSDP casts a microbatch's gradients to the dtype in which they are reduced (read 2 bytes,
        # write 4). If several passes share one reduction, it adds them to the sum instead (read 2
        # and 4, write 4; FSDPParam's ``accumulate_unsharded_grad_if_needed``).
        times = 2 if layout.pp > 1 else 1
        per_value = self.value_bytes + times * BYTES[job.precision.reduce_dtype]
        precise = job.precision.linear == HIGH_PRECISION
        weights = self._products(matrices, () if precise else self.converted)
        weights += machine.pass_seconds(self._gathered_values(matrices) * per_value)
        # Casts of gradients, and of inputs and weights along the other dimension.
        again = self._cast(narrow, casts.gradient, of_inputs=False)
        again += self._cast(narrow, casts.input_backward, of_inputs=True)
        again += machine.pass_seconds(cast_weights * casts.weight_backward)
        biases = self._moving_seconds(biased * self.costs.bias_gradient)
        inputs = products + again + 2 * element_wise + 2.5 * attention
        inputs += biases + context_back.compute
        # Recomputation ends before the last reduction, because backward needs nothing after it.
        tensor_again = self._tensor(self.rows, regions, regions - 1)
        recompute = Pass()
        ac = job.activation_checkpoint
        mode = ac.mode if ac.covers(layer) else "none"
        if mode == "memory_budget":
            recompute = Pass(forward.compute * (1 - ac.memory_budget))
        elif mode == "selective_op":
            kept = 1 / ac.save_every_nth_matmul if ac.save_every_nth_matmul else 0.0
            repeated = tensor_again
            computed = (products + casts_of_weights) * (1 - kept) + others
            if layout.gathers_keys or operations.attention.halo:
                repeated = (*repeated, *context.collectives)
                computed += context.compute
            gathers = (each for each in repeated if each.collective == "all_gather")
            recompute = Pass(computed, tuple(gathers))
        elif mode != "none":
            collectives = (*tensor_again, *context.collectives, *experts)
            recompute = Pass(forward.compute, collectives)
        return BlockPasses(
            forward=forward,
            recompute=recompute,
            inputs=Pass(
                max(inputs, 2 * host - weights), (*tensor, *context_back.collectives, *experts[1:])
            ),
            weights=Pass(weights),
        )

    def table(self) -> tuple[Pass, Pass]:
        """Forward and backward of the embedding: its collectives; the look-up is negligible."""
        rows = self.rows * (1 + self.job.model.mtp.depth)
        return Pass(0.0, self._tensor(rows, 0, 1)), Pass(0.0, self._tensor(rows, 1, 0))

    def head(self) -> tuple[Pass, Pass]:
        """Forward and backward of the head with the loss."""
        job = self.job
        split = self.layout.tp if self.layout.loss_parallel else 1
        vocabulary = self.model_costs.outputs(job.model) / split
        dtype, width, share = self._format("output" in self.converted)
        product = self.machine.product_seconds(
            self.rows, job.model.dim, int(vocabulary), dtype, width, share=share
        )
        per_logit = COMPILED_LOGIT if job.compile.loss else EAGER_LOGIT
        loss = self._moving_seconds(self.rows * vocabulary * per_logit)
        forward = Pass(product + loss / 2, self._tensor(self.rows, 1, 0))
        backward = Pass(2 * product + loss / 2, self._tensor(self.rows, 0, 1))
        times = 1 + job.model.mtp.depth
        return sum([forward] * times, Pass()), sum([backward] * times, Pass())

    # -- computing ----

    def _format(self, converted: bool) -> tuple[str, int, float]:
        """Format of a product's operands, their bytes, and its speed relative to one scale a tensor."""
        precision = self.job.precision
        if not converted:
            return precision.param_dtype, self.value_bytes, 1.0
        share = self.machine.constants.rowwise if precision.linear in ROWWISE else 1.0
        if precision.emulate:
            return "float32", 1, share  # emulated products are computed in it
        return "mxfp8" if precision.linear == "mxfp8" else "float8", 1, share

    def _products(self, matrices: Collection[TensorSpec], converted: Collection[str]) -> float:
        """Seconds of the products of forward, of gradients of inputs, or of weights."""
        return sum(self._product(each, each.module in converted) for each in matrices)

    def _product(self, matrix: TensorSpec, converted: bool) -> float:
        layout = self.layout
        dtype, width, share = self._format(converted)
        inputs = matrix.inputs
        outputs = matrix.outputs
        if matrix.split is Split.ROW:
            inputs //= tp_of(layout, matrix)
        else:
            outputs //= tp_of(layout, matrix)
        rows = self.rows
        if matrix.split is Split.ROUTER:
            has_tf32 = "tf32" in self.machine.device.peak_flops
            precise = self.job.training.matmul_precision == "highest"
            dtype = "tf32" if has_tf32 and not precise else "float32"
            width = BYTES["float32"]
            rows = self.stream_rows
        groups = 1
        if matrix.is_expert:
            groups = matrix.experts // layout.ep
            rows = max(matrix.top_k * self.expert_rows // groups, 1)
            share *= self.machine.constants.grouped
        else:
            seq_len = self.job.training.seq_len
            of_rows = self.model_costs.row_share(self.job.model, matrix, seq_len)
            rows = max(1, round(rows * of_rows))
        return self.machine.product_seconds(
            rows, inputs, outputs, dtype, width, groups=groups, share=share
        )

    def _attention_seconds(self, operations: Operations) -> float:
        """Seconds of attention's forward; without a balanced order of positions, on the last rank.

        Gated DeltaNet is assumed to compute as fast as attention, as kernels of its own do (``fla``); what
        ``model/delta.py`` takes on a GPU has not been measured.
        """
        layout = self.layout
        flops = self.rows * operations.attention.flops / layout.tp
        if operations.attention.halo:
            return self.machine.attention_seconds(flops, self.job.precision.param_dtype)
        if self.machine.software.attention in PADDED_KERNELS:
            widths = operations.attention.score_width, operations.attention.value_width
            flops *= sum(1 << (width - 1).bit_length() for width in widths) / sum(widths)
        if layout.cp > 1 and layout.cp_method != "ulysses" and not layout.cp_load_balance:
            # Rank r of n attends to r full pieces and half of its own, n / 2 in the mean.
            flops *= (2 * layout.cp - 1) / layout.cp
        return self.machine.attention_seconds(flops, self.job.precision.param_dtype)

    def _moving_seconds(self, traffic: float) -> float:
        """Seconds of traffic in bytes per 16-bit value."""
        return self.machine.pass_seconds(traffic * self.value_bytes / 2)

    def _passes(self, operations: Operations, biased: float) -> float:
        """Seconds of element-wise operations in forward, without their launches."""
        costs = self.costs
        tp = self.layout.tp
        gate = costs.gate
        if self.job.model.activation == "swiglu_clamped":
            gate += costs.clamped
        norm = costs.norm
        if self.job.model.norm_zero_centred:
            norm += costs.zero_centred
        traffic = (
            self.stream_rows * operations.norm_width * (norm + costs.residual)
            + self.stream_rows * operations.post_norm_width * norm
            + self.rows * operations.attention_gate_width / tp * costs.gate
            + self.rows * operations.rotated_width / tp * costs.rotation
            + self.rows * operations.gate_width / tp * gate
            + self.expert_rows * operations.expert_gate_width / self.expert_tp * gate
            + self.sorted_rows * operations.expert_width * costs.sort
            + biased * costs.bias
        )
        if operations.expert_width:
            traffic += self.stream_rows * self.job.model.dim * costs.router
        if self.layout.ep > 1:
            # To messages of a fixed size, and from them, they are copied once more.
            times = 2 if self.layout.fixes_messages else 1
            traffic += times * self.expert_rows * operations.expert_width * costs.exchanged
        return self._moving_seconds(traffic)

    def _cast(self, matrices: list[TensorSpec], per_value: float, *, of_inputs: bool) -> float:
        """Seconds of casting operands of 8-bit products. Products with the same input share its cast."""
        values: dict[object, float] = {}
        for matrix in matrices:
            width = matrix.inputs if of_inputs else matrix.outputs
            operand = (matrix.module.rpartition(".")[0], width) if of_inputs else matrix.name
            splits = matrix.split is (Split.ROW if of_inputs else Split.COLUMN)
            rows = self.rows
            if matrix.is_expert:
                rows = matrix.top_k * self.expert_rows
            elif of_inputs and not splits and self.casts_stream:
                rows = self.stream_rows
            tp = self.expert_tp if matrix.is_expert else self.layout.tp
            values.setdefault(operand, rows * width / (tp if splits else 1))
        return self.machine.pass_seconds(sum(values.values()) * per_value)

    def _gathered_values(self, matrices: Collection[TensorSpec]) -> float:
        """Values of these matrices on a rank that has gathered them."""
        layout = self.layout
        return sum(
            each.size / tp_of(layout, each) / (layout.ep if each.is_expert else 1)
            for each in matrices
        )

    def _tensor(self, rows: int, gathers: int, reductions: int) -> tuple[Collective, ...]:
        """Collectives of tensor parallel around its regions: attention, and the feed-forward."""
        layout = self.layout
        if layout.tp == 1:
            return ()
        whole = rows * self.job.model.dim * self.value_bytes
        kinds: list[tuple[str, float, int]] = [("all_reduce", whole, reductions)]
        copying = 0.0
        if layout.uses_sequence_parallel:
            gathered = whole / (self.value_bytes if self.casts_stream else 1)
            kinds = [("all_gather", gathered, gathers), ("reduce_scatter", whole, reductions)]
            copying = ALONG_SEQUENCE
        shown = 1 - (self.machine.constants.async_tp if layout.async_tp else 0.0)
        collectives = []
        for kind, size, count in kinds:
            one = collective_of(self.job, self.machine, "tp", kind, size)
            seconds = one.seconds + self.machine.pass_seconds(size * copying)
            collectives += [replace(one, seconds=seconds, exposed=seconds * shown)] * count
        return tuple(collectives)
