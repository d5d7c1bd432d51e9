"""The operations of one block, computed from the config (no torch).

All counts are for one token and one forward pass, before any layout splits it.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.model import ModelConfig
from harness.model.accounting import attention_flops
from harness.model.spec import TensorSpec, block_tensors


@dataclass(frozen=True)
class Attention:
    """The attention operation of one block."""

    heads: int
    kv_heads: int
    score_width: int
    """Width of a query and key head."""
    value_width: int
    flops: float
    """FLOPs over the positions that a token attends to, the mean over a sequence."""


@dataclass(frozen=True)
class Operations:
    """The operations of one block."""

    products: tuple[TensorSpec, ...]
    """Matrices that tokens are multiplied by."""
    attention: Attention
    norm_width: int
    """Inputs of both norms; the two residual sums have as many."""
    rotated_width: int
    """Values that are rotated, or normalized per head."""
    gate_width: int
    """Hidden width of the dense feed-forward or the shared experts."""
    expert_gate_width: int
    """Hidden widths of a token's experts, summed."""
    expert_width: int
    """Values of a token that are sorted by expert and back."""


def pre_norm_operations(model: ModelConfig, layer: int, seq_len: int) -> Operations:
    """Return the operations of a pre-norm block."""
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
