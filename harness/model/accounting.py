"""Closed forms of a decoder's parameters and FLOPs, from its numbers alone (no torch)."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from harness.model.config import ModelConfig
from harness.model.shapes import block_shapes, is_buffer, is_expert, parameter_shapes

TABLE = "tok_embeddings.weight"


@dataclass(frozen=True)
class Accounting:
    """Counts of one model at one sequence length."""

    parameters: int
    """All parameters; a tied table counts once."""
    active_parameters: int
    """Those that one token meets: of the experts top_k, and all of everything else, both tables included."""
    flops_per_token_full: float
    """FLOPs of forward and backward per token, attention counted over the whole square (or band)."""
    flops_per_token_causal: float
    """The same with attention counted over the positions that are seen."""


def block_parameters(model: ModelConfig, layer: int = 0) -> int:
    """Parameters of one decoder block."""
    return sum(prod(shape) for name, shape in block_shapes(model, layer).items() if not is_buffer(name))


def account(model: ModelConfig, seq_len: int) -> Accounting:
    """Counts parameters and FLOPs.

    FLOPs per token are 6 per multiplied parameter (2 forward, 4 backward) plus attention's
    6 * L * H * (d_qk + d_v) * T, the convention of PaLM (arXiv:2204.02311, appendix B) that torchtitan
    follows; vendors halve the attention term because half of the causal square is masked. Of experts, those
    count that a token goes to. A layer that attends locally has a band in the place of the square. A tied
    table is multiplied by once, in the head, so it counts once; with multi-token prediction the head is
    multiplied by once more. Documents that do not see each other count as if they did.
    """
    shapes = parameter_shapes(model)
    total = sum(prod(shape) for shape in shapes.values())
    active = sum(_active(model, name, shape) for name, shape in shapes.items())
    table = prod(shapes[TABLE])
    multiplied = active - (0 if model.tied_embeddings else table) + model.mtp.depth * table
    spans = [model.span(layer) for layer in range(model.num_blocks)]
    widths = 6.0 * model.n_heads * (model.head_width + model.value_width)
    # A whole triangle is half of its square, as the convention has it: the diagonal does not count.
    causal = (seq_len / 2 if span.is_whole else span.mean_reach(seq_len) for span in spans)
    return Accounting(
        parameters=total,
        active_parameters=active,
        flops_per_token_full=6.0 * multiplied + widths * sum(span.most_reach(seq_len) for span in spans),
        flops_per_token_causal=6.0 * multiplied + widths * sum(causal),
    )


def _active(model: ModelConfig, name: str, shape: tuple[int, ...]) -> int:
    size = prod(shape)
    return size // model.moe.num_experts * model.moe.top_k if is_expert(name) else size
