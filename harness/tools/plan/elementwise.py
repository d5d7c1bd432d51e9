"""Bytes that kernels other than matrix products move through a device's memory, per value.

Eager kernels are counted one by one; compiled, each operation is one kernel that reads its inputs and
writes its output.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class ElementWise:
    """Element-wise operations in forward, in bytes per 16-bit value; backward moves twice as much."""

    norm: float
    residual: float
    rotation: float
    gate: float
    clamped: float
    """Of a gate that is clamped (``swiglu_clamped``), more."""
    bias: float
    """Per output of an expert with biases: each row's is looked up and added."""
    bias_gradient: float
    """The same in backward, as bytes that take the same time: rows are added up with atomics."""
    router: float
    """Per value of the residual stream, which routers read in 32 bits."""
    sort: float
    """Per value of a row of an expert: rows are copied in the experts' order, back, and added up in 32 bits
    (``model/moe.py``)."""
    exchanged: float
    """The same, more: rows that came from other ranks are sorted by expert, and back
    (``parallelism/expert.py``)."""
    kernels: int
    """Kernels of a block in forward other than products, for their fixed cost; backward has twice as many."""
    expert_kernels: int
    """The same, more, if the block has experts: routing, sorting and counting."""


# A norm reads and writes; a sum of two streams takes 6; a rotation casts up, multiplies complex numbers and
# casts down (20); a gate is SiLU (4) and a product (6); a clamped one has two clamps, a factor, a sigmoid, a
# sum and two products (32). Experts' rows are copied twice (8), cast (6) and read by the product that adds
# them up (4). Kernels are those of rehearsals (experiments/rehearsal/TABLES.md: 1,900 and 992 for 32 blocks
# with half of a forward recomputed); those of compiled experts are assumed.
#
# Gradients of biases: of 1,571 ms of a step of GPT-OSS 20b another kernel saves 183 (MFU of 16.50 and
# 18.68 %, github.com/pytorch/torchtitan/pull/2686), of which adding the biases takes 30: 6.4 ms for each of
# 24 layers of 32,768 rows.
EAGER = ElementWise(
    norm=4,
    residual=6,
    rotation=20,
    gate=10,
    clamped=22,
    bias=10,
    bias_gradient=64,
    router=6,
    sort=18,
    exchanged=8,
    kernels=15,
    expert_kernels=31,
)
COMPILED = ElementWise(
    norm=4,
    residual=4,
    rotation=4,
    gate=6,
    clamped=0,
    bias=4,
    bias_gradient=64,
    router=4,
    sort=10,
    exchanged=8,
    kernels=8,
    expert_kernels=15,
)
# Before torch 2.9 (github.com/pytorch/pytorch/pull/153666) an eager norm casts up, squares, averages, scales,
# casts down and multiplies by the weight, one kernel each.
UNFUSED = replace(EAGER, norm=30)

# Logits, forward and backward: cast to 32 bits, softmax, the loss, its gradient, the cast back.
EAGER_LOGIT, COMPILED_LOGIT = 34.0, 14.0

# torch gathers and scatters along the first dimension; along the sequence, the tensor is copied before or
# after (torch/distributed/_functional_collectives.py): one read and one write.
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


# One scale a tensor: one read for the maximum, then one read and a write of a byte; a gradient's product also
# needs the transposed layout: one more read and write. One scale a row: a row is read once, a column twice; a
# weight's columns are copied into rows first. Blocks of 32 values are read once in either direction
# (torchao/testing/training/roofline_utils.py).
CASTS = {
    "float8_tensorwise": Casts(5, 2, 7, 5, 3),
    "float8_rowwise": Casts(3, 5, 8, 3, 7),
    "float8_rowwise_hp": Casts(3, 0, 3, 3, 3),
    "mxfp8": Casts(3, 3, 6, 3, 3),
}

# A ring's partial results, eager (torch's _SDPAMerger and ring backward,
# torch/distributed/tensor/experimental/ _context_parallel/_attention.py). Outputs: the cast to 32 bits (6)
# and the difference, its product and sum (32). Gradients of queries: cast and sum (12). Keys and values:
# copied into one buffer to be sent (4), and their gradients added up and copied in 32 bits (18). Half of a
# load-balanced ring's steps work on half of the rows, but copy all of them (8).
RING_CAST, RING_MERGE, RING_QUERY, RING_KEYS, RING_KEY_GRADIENTS, RING_COPY = 6.0, 32.0, 12.0, 4.0, 18.0, 8.0
