"""Closed forms of a decoder's parameters and FLOPs, from its numbers alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.model.config import ModelConfig


@dataclass(frozen=True)
class Accounting:
    """Counts of one model at one sequence length."""

    parameters: int
    """All parameters; a tied table counts once."""
    flops_per_token_full: float
    """FLOPs of forward and backward per token, attention counted over the whole square."""
    flops_per_token_causal: float
    """The same with attention counted over the causal half."""


def block_parameters(model: ModelConfig) -> int:
    """Parameters of one decoder block: attention, feed-forward, two norms."""
    q_width, kv_width = model.n_heads * model.head_width, model.n_kv_heads * model.head_width
    attention = model.dim * (q_width + 2 * kv_width) + q_width * model.dim
    feed_forward = 3 * model.dim * model.ffn_hidden_dim
    return attention + feed_forward + 2 * model.dim


def account(model: ModelConfig, seq_len: int) -> Accounting:
    """Counts parameters and FLOPs.

    FLOPs per token are 6 per multiplied parameter (2 forward, 4 backward) plus attention's
    6 * L * H * (d_qk + d_v) * T, the convention of PaLM (arXiv:2204.02311, appendix B) that torchtitan
    follows; vendors halve the attention term because half of the causal square is masked. A tied
    table is multiplied by once, in the head, so it counts once. Documents that do not see each other count
    as if they did.
    """
    table = model.vocab_size * model.dim
    tables = table if model.tied_embeddings else 2 * table
    total = model.n_layers * block_parameters(model) + model.dim + tables
    multiplied = total - (0 if model.tied_embeddings else table)
    attention = 6.0 * model.n_layers * model.n_heads * 2 * model.head_width * seq_len
    return Accounting(
        parameters=total,
        flops_per_token_full=6.0 * multiplied + attention,
        flops_per_token_causal=6.0 * multiplied + attention / 2,
    )
