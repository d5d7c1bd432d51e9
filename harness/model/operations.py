"""What one block of a decoder computes, from its numbers alone (no torch).

Everything is counted for one token of one forward pass, before any layout splits it.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from harness.model.config import ModelConfig
from harness.model.shapes import block_shapes, is_buffer, is_expert, linear_split


@dataclass(frozen=True)
class Product:
    """One product of the stream with a weight: [rows, inputs] by [inputs, outputs]."""

    name: str
    """Name of the linear inside the block, e.g. ``attention.wq``; of experts ``moe.experts``."""
    inputs: int
    outputs: int
    split: str
    """``column``: tensor parallel splits its outputs; ``row``: its inputs; ``none``: neither."""
    experts: int = 1
    """Weights of this shape, among which rows are shared out."""
    copies: int = 1
    """How many of the experts a token goes to."""

    @property
    def parameters(self) -> int:
        """Values of all its weights."""
        return self.experts * self.inputs * self.outputs


@dataclass(frozen=True)
class Attention:
    """Scores and values of one block's attention."""

    heads: int
    kv_heads: int
    score_width: int
    """Width of a query and key head."""
    value_width: int
    reach: float
    """Positions that a token attends to, the mean over a sequence."""

    @property
    def flops(self) -> float:
        """FLOPs of a token's forward pass over the positions that it sees: scores, and their values."""
        return 2.0 * self.heads * (self.score_width + self.value_width) * self.reach


@dataclass(frozen=True)
class Operations:
    """What a token meets in a block."""

    products: tuple[Product, ...]
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

    @property
    def flops(self) -> float:
        """FLOPs of a token's forward pass: 2 for every weight it is multiplied with, and attention's."""
        multiplied = sum(p.inputs * p.outputs * p.copies for p in self.products)
        return 2.0 * multiplied + self.attention.flops


def block_operations(model: ModelConfig, layer: int, seq_len: int) -> Operations:
    """Counts what a block does.

    Args:
        model: the model, resolved.
        layer: number of the block.
        seq_len: tokens of a sequence.
    """
    products = []
    for name, shape in block_shapes(model, layer).items():
        if is_buffer(name) or len(shape) < (3 if is_expert(name) else 2):
            continue  # norms and biases multiply nothing
        stem = name.removesuffix(".weight")
        experts = shape[0] if is_expert(name) else 1
        products.append(
            Product(
                "moe.experts" if is_expert(name) else stem,
                inputs=shape[-1],
                outputs=shape[-2],
                split=linear_split(stem),
                experts=experts,
                copies=model.moe.top_k if is_expert(name) else 1,
            )
        )
    has_experts, of = model.has_experts(layer), model.moe
    return Operations(
        tuple(products),
        Attention(
            model.n_heads,
            model.n_kv_heads,
            model.head_width,
            model.value_width,
            model.span(layer).mean_reach(seq_len),
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


def block_weights(model: ModelConfig, layer: int) -> tuple[int, int]:
    """Parameters of a block: those of its experts, and all others."""
    sizes = {name: prod(shape) for name, shape in block_shapes(model, layer).items() if not is_buffer(name)}
    experts = sum(size for name, size in sizes.items() if is_expert(name))
    return experts, sum(sizes.values()) - experts
