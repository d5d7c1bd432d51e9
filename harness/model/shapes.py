"""Every tensor of a decoder, by name and shape, from its numbers alone (no torch)."""

from __future__ import annotations

from harness.model.config import ModelConfig

BALANCE_BIAS = "moe.balance_bias"
"""The one tensor that is kept and no optimizer updates; float32 always."""

_COLUMN = {"wq", "wk", "wv", "wq_b", "wkv_b", "w1", "w3", "output"}
_ROW = {"wo", "w2"}

Shapes = dict[str, tuple[int, ...]]


def parameter_shapes(config: ModelConfig) -> Shapes:
    """Every parameter's name and shape, in the decoder's order, without building it.

    Matrices are [output width, input width], experts' [experts, output width, input width]. A tied output
    projection is not listed: it is the table.
    """
    return {name: shape for name, shape in tensor_shapes(config).items() if not is_buffer(name)}


def tensor_shapes(config: ModelConfig) -> Shapes:
    """The same with the buffers that belong to a model as its parameters do."""
    table = (config.vocab_size, config.dim)
    shapes: Shapes = {"tok_embeddings.weight": table}
    for layer in range(config.n_layers):
        prefix = block_prefix(config, layer)
        shapes |= {prefix + name: shape for name, shape in block_shapes(config, layer).items()}
    shapes["norm.weight"] = (config.dim,)
    if not config.tied_embeddings:
        shapes["output.weight"] = table
    return shapes | (_mtp_shapes(config) if config.mtp.depth else {})


def is_buffer(name: str) -> bool:
    """Whether a tensor is a buffer and not a parameter."""
    return name.endswith(BALANCE_BIAS)


def is_expert(name: str) -> bool:
    """Whether a tensor has the values of all experts of a block, stacked along its first dimension."""
    return ".moe.experts." in f".{name}"


def linear_split(name: str) -> str:
    """How tensor parallelism splits a linear or the experts: what their modules say in ``sharding``.

    Args:
        name: of the linear, or of one of the experts' stacks, without ``.weight``.

    Returns:
        ``column``: by outputs, ``row``: by inputs, ``none``: every rank has all of it.
    """
    last = name.rpartition(".")[2]
    return "column" if last in _COLUMN else "row" if last in _ROW else "none"


def block_prefix(config: ModelConfig, layer: int) -> str:
    """What the names of a block's tensors begin with; the block behind the last predicts a token further."""
    return f"layers.{layer}." if layer < config.n_layers else "mtp.block."


def block_shapes(config: ModelConfig, layer: int) -> Shapes:
    """Name and shape of every tensor of one block, in the order in which the block has them."""
    attention = _latent_shapes(config) if config.attention.is_latent else _attention_shapes(config)
    shapes: Shapes = {"attention_norm.weight": (config.dim,)}
    shapes |= {f"attention.{name}": shape for name, shape in attention.items()}
    shapes["ffn_norm.weight"] = (config.dim,)
    if config.has_experts(layer):
        shapes |= {f"moe.{name}": shape for name, shape in _moe_shapes(config).items()}
    else:
        dense = _feed_forward_shapes(config.dim, config.ffn_hidden_dim)
        shapes |= {f"feed_forward.{name}": shape for name, shape in dense.items()}
    return shapes


def _mtp_shapes(config: ModelConfig) -> Shapes:
    norm, layer = (config.dim,), config.n_layers
    shapes: Shapes = {"mtp.embedding_norm.weight": norm, "mtp.hidden_norm.weight": norm}
    shapes |= _linear("mtp.proj", config.dim, 2 * config.dim)
    prefix = block_prefix(config, layer)
    shapes |= {prefix + name: shape for name, shape in block_shapes(config, layer).items()}
    return shapes | {"mtp.norm.weight": norm}


def _attention_shapes(config: ModelConfig) -> Shapes:
    of, dim, width = config.attention, config.dim, config.head_width
    q_width, kv_width = config.n_heads * width, config.n_kv_heads * width
    shapes: Shapes = {"sinks": (config.n_heads,)} if of.sinks else {}
    for name, rows in (("wq", q_width), ("wk", kv_width), ("wv", kv_width)):
        shapes |= _linear(name, rows, dim, of.qkv_bias)
    shapes |= _linear("wo", dim, q_width, of.output_bias)
    if of.qk_norm == "learned":
        shapes |= {"q_norm.weight": (width,), "k_norm.weight": (width,)}
    return shapes


def _latent_shapes(config: ModelConfig) -> Shapes:
    of, dim, heads = config.attention, config.dim, config.n_heads
    rows = heads * config.head_width
    if of.q_lora_rank is None:
        shapes = _linear("wq", rows, dim)
    else:
        shapes = _linear("wq_a", of.q_lora_rank, dim)
        shapes["q_norm.weight"] = (of.q_lora_rank,)
        shapes |= _linear("wq_b", rows, of.q_lora_rank)
    shapes |= _linear("wkv_a", of.kv_lora_rank + of.qk_rope_head_dim, dim)
    shapes["kv_norm.weight"] = (of.kv_lora_rank,)
    shapes |= _linear("wkv_b", heads * (of.qk_nope_head_dim + of.v_head_dim), of.kv_lora_rank)
    return shapes | _linear("wo", dim, heads * of.v_head_dim)


def _moe_shapes(config: ModelConfig) -> Shapes:
    of, dim, experts, hidden = config.moe, config.dim, config.moe.num_experts, config.moe.hidden_dim
    shapes: Shapes = {"balance_bias": (experts,)} if of.balance_coeff else {}
    shapes |= _linear("router", experts, dim, of.router_bias)
    matrices = {"w1": (experts, hidden, dim), "w2": (experts, dim, hidden), "w3": (experts, hidden, dim)}
    shapes |= {f"experts.{name}": shape for name, shape in matrices.items()}
    if of.expert_bias:
        biases = {"b1": (experts, hidden), "b2": (experts, dim), "b3": (experts, hidden)}
        shapes |= {f"experts.{name}": shape for name, shape in biases.items()}
    if of.shared_hidden_dim:
        shared = _feed_forward_shapes(dim, of.shared_hidden_dim)
        shapes |= {f"shared_experts.{name}": shape for name, shape in shared.items()}
    return shapes


def _feed_forward_shapes(dim: int, hidden: int) -> Shapes:
    return _linear("w1", hidden, dim) | _linear("w2", dim, hidden) | _linear("w3", hidden, dim)


def _linear(name: str, rows: int, columns: int, bias: bool = False) -> Shapes:
    weight: Shapes = {f"{name}.weight": (rows, columns)}
    return weight | ({f"{name}.bias": (rows,)} if bias else {})
