"""What one block of a decoder computes, from its numbers alone (no torch).

Everything is counted for one token of one forward pass, before any layout splits it.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.model.accounting import attention_flops
from harness.model.config import ModelConfig
from harness.model.spec import TensorSpec, block_tensors


@dataclass(frozen=True)
class Attention:
    """Scores and values of one block's attention."""

    heads: int
    kv_heads: int
    score_width: int
    """Width of a query and key head."""
    value_width: int
    flops: float
    """FLOPs of a token's forward pass over the positions that it sees, the mean over a sequence."""


@dataclass(frozen=True)
class Operations:
    """What a token meets in a block."""

    products: tuple[TensorSpec, ...]
    """The matrices that it is multiplied by."""
    attention: Attention
    norm_width: int
    """Values that norms and residual sums see once each: both of a block together."""
    rotated_width: int
    """Values that are rotated or normed by head."""
    gate_width: int
    """Values of the dense hidden layer, and of the shared experts'."""
    expert_gate_width: int
    """Values of the hidden layers of the experts that a token goes to."""
    expert_width: int
    """Values that are sorted to experts and back."""


def block_operations(model: ModelConfig, layer: int, seq_len: int) -> Operations:
    """Counts what a block does.

    Args:
        model: the model, resolved.
        layer: number of the block.
        seq_len: tokens of a sequence.
    """
    has_experts, of = model.has_experts(layer), model.moe
    return Operations(
        tuple(tensor for tensor in block_tensors(model, layer) if tensor.is_matrix),
        Attention(
            model.n_heads,
            model.n_kv_heads,
            model.head_width,
            model.value_width,
            attention_flops(model, model.span(layer).mean_reach(seq_len)),
        ),
        norm_width=2 * model.dim,
        rotated_width=(model.n_heads + model.n_kv_heads) * model.rotated_width,
        gate_width=(of.shared_hidden_dim if has_experts else model.ffn_hidden_dim),
        expert_gate_width=of.top_k * of.hidden_dim if has_experts else 0,
        expert_width=of.top_k * model.dim if has_experts else 0,
    )


def block_kinds(model: ModelConfig) -> list[tuple[bool, int | None, int | None]]:
    """Of every block what decides its operations: blocks with equal entries do the same."""
    spans = [model.span(layer) for layer in range(model.num_blocks)]
    return [(model.has_experts(layer), span.window, span.chunk) for layer, span in enumerate(spans)]
