"""Parameters and FLOPs of a model, computed from its config (no torch)."""

from dataclasses import dataclass

from harness.config.model import ModelConfig, of_one_model
from harness.model.architecture import architecture_of
from harness.model.spec import tensors

DELTA_CHUNK = 64
"""Positions that Gated DeltaNet computes at once; the state is passed from chunk to chunk."""
DELTA_ROWS = 16
"""Positions whose products with each other are computed at once, if each channel decays by itself."""


@dataclass(frozen=True)
class Accounting:
    """Counts of one model at one sequence length."""

    parameters: int
    """All parameters; a tied table counts once."""
    active_parameters: int
    """Parameters that one token uses: top_k of the experts, and all others, both tables
    included."""
    flops_per_token_full: float
    """FLOPs of forward and backward per token by the published convention: ``account_decoder``."""
    flops_per_token_causal: float
    """The same, with attention over the positions that are attended to."""


def attention_flops(model: ModelConfig, reach: float) -> float:
    """Forward FLOPs of a token in attention: scores with ``reach`` positions, and the sum of values."""
    return 2.0 * model.n_heads * (model.head_width + model.value_width) * reach


def delta_flops(model: ModelConfig) -> float:
    """Forward FLOPs of a token in a layer of Gated DeltaNet: three products with the state, to read what is
    under the key, to correct it, and to read with the query."""
    of = model.delta
    return 6.0 * of.value_heads * of.key_head_dim * of.value_head_dim


@of_one_model
def account(model: ModelConfig, seq_len: int) -> Accounting:
    """Count parameters and FLOPs of a model of any architecture."""
    return architecture_of(model).account(model, seq_len)


def account_decoder(model: ModelConfig, seq_len: int) -> Accounting:
    """Count parameters and FLOPs of a decoder.

    FLOPs per token are 6 per multiplied parameter (2 forward, 4 backward) plus attention's 6 * L *
    H * (d_qk + d_v) * T, the convention of PaLM (arXiv:2204.02311, appendix B) that torchtitan
    follows: every layer counts the full square of scores, also one with a window or chunks. The
    causal count has the positions that a layer attends to instead of T: T / 2, or the mean of its
    band or chunk. Only the experts that a token goes to count. A tied table counts once, as the
    head; with multi-token prediction the head counts once more. Attention is counted as if
    documents attended to each other. Layers of Gated DeltaNet have three products with their state in place
    of attention's: the recurrence itself, not what its computation in chunks adds.
    """
    parameters = [tensor for tensor in tensors(model).values() if not tensor.is_buffer]
    active = sum(tensor.active_size for tensor in parameters)
    table = model.vocab_size * model.dim
    multiplied = active - (0 if model.tied_embeddings else table) + model.mtp.depth * table
    spans = [model.span(layer) for layer in model.attention_layers]
    recurrent = 3 * (model.num_blocks - len(spans)) * delta_flops(model)
    # By convention a full triangle is half of its square: the diagonal does not count.
    causal = (seq_len / 2 if span.is_whole else span.mean_reach(seq_len) for span in spans)
    return Accounting(
        parameters=sum(tensor.size for tensor in parameters),
        active_parameters=active,
        flops_per_token_full=6.0 * multiplied
        + recurrent
        + 3 * attention_flops(model, seq_len * len(spans)),
        flops_per_token_causal=6.0 * multiplied
        + recurrent
        + 3 * attention_flops(model, sum(causal)),
    )
