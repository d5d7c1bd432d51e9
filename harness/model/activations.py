"""The activations that each part of a decoder saves for its backward pass, per token (no torch).

Every tensor is declared with its width, format, and how the layout splits it. This is the method of
Korthikanti et al. (arXiv:2205.05198, section 4), applied to what this code saves: grouped queries, gated
feed-forwards, norms without a mean, no dropout. Tests compare the declarations of eager blocks with what
autograd saves for a real block.

A tensor that two operations save is declared once. Parameters and the rotation table are not activations.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from harness.model.config import ModelConfig
from harness.model.spec import Split, block_tensors

LSE = "log-sum-exp"


class Cut(StrEnum):
    """How tensor parallelism splits an activation. The batch and context parallel split all of them."""

    STREAM = "stream"
    """On the residual stream: split when the sequence is."""
    WHOLE = "whole"
    """Gathered for a region's linears: every rank has the full tensor."""
    PARTIAL = "partial"
    """Full size; the ranks' partial results are summed into the stream."""
    INNER = "inner"
    """Heads or hidden features: split."""
    ROUTED = "routed"
    """Tokens that a rank routes, or their rows: split unless experts are."""
    ROUTED_INNER = "routed inner"
    """Hidden features of experts: split either way, by rows or by features."""


class Keeper(StrEnum):
    """Which implementations save a tensor."""

    ALL = "all"
    EAGER = "eager"
    """Eager blocks; compiled ones recompute it in the kernel that needs it."""
    COMPOSITE_NORM = "composite norm"
    """Eager blocks on CPUs, where RMSNorm consists of single operations; CUDA has one kernel for it."""


@dataclass(frozen=True)
class Kept:
    """A tensor that is saved for backward."""

    name: str
    width: float
    """Values per token."""
    cut: Cut
    dtype: str = "compute"
    """``compute`` (precision.param_dtype), ``float32``, ``int64``; ``widened``: a float32 copy, if the
    original is not float32; ``norm``: float32 where a norm consists of single operations."""
    by: Keeper = Keeper.ALL


@dataclass(frozen=True)
class PartActivations:
    """Activations of a block or another part."""

    kept: tuple[Kept, ...]
    """Saved for backward, without recomputation."""
    products: tuple[Kept, ...] = ()
    """Results of matrix products in the order of computation; selective recomputation may save some."""
    dear: tuple[Kept, ...] = ()
    """Results that selective recomputation always saves: those of attention."""
    choices: tuple[Kept, ...] = ()
    """Results that are saved under any recomputation: the choice of experts."""
    forward: tuple[Kept, ...] = ()
    """Alive at the peak of forward when nothing is saved."""
    backward: tuple[Kept, ...] = ()
    """Gradients alive at the peak of backward, beside everything saved."""
    late_backward: tuple[Kept, ...] = field(default=())
    """Alive while backward is in attention, past the feed-forward: saved tensors and gradients."""


def block_activations(config: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
    """Activations of one block, its input included.

    Args:
        config: the model.
        layer: number of the block.
        on_cpu: whether kernels are those of CPUs.
    """
    dim = config.dim
    attention = _latent(config, layer, on_cpu) if config.attention.is_latent else _attention(config, layer)
    mixed = config.has_experts(layer)
    inner = _mixture(config) if mixed else _feed_forward(config.ffn_hidden_dim, dim, "feed_forward")
    norm_1, norm_2 = _norm("attention_norm", dim), _norm("ffn_norm", dim)
    # A mixture copies rows and saves its router's input; only shared experts save the input itself.
    needs_whole = not mixed or config.moe.shared_hidden_dim > 0
    gathered = (
        Kept("ffn_norm.out", dim, Cut.WHOLE) if needs_whole else Kept("router.in", dim, Cut.ROUTED, "float32")
    )
    first = (*norm_1, Kept("attention_norm.out", dim, Cut.WHOLE), *attention.kept)
    stream = Kept("grad", dim, Cut.STREAM)
    whole = Kept("grad of the region's input", dim, Cut.WHOLE)
    return PartActivations(
        kept=(*first, *norm_2, gathered, *inner.kept),
        products=(*attention.products, *inner.products),
        dear=(*attention.dear, *inner.dear),
        choices=inner.choices,
        forward=(Kept("stream", dim, Cut.STREAM), gathered, *inner.forward),
        backward=(stream, *inner.backward),
        late_backward=(*first, *attention.backward, stream, stream, whole),
    )


def head_activations(config: ModelConfig) -> PartActivations:
    """The final norm and the output projection's input; logits are counted separately."""
    out = Kept("norm.out", config.dim, Cut.WHOLE)
    return PartActivations(
        (*_norm("norm", config.dim), out), backward=(Kept("grad of norm.out", config.dim, Cut.WHOLE),)
    )


def prediction_activations(config: ModelConfig) -> PartActivations:
    """Multi-token prediction without its block: norms of both streams, concatenated and projected."""
    dim = config.dim
    return PartActivations(
        kept=(
            Kept("embedded", dim, Cut.STREAM),
            *_norm("mtp.embedding_norm", dim),
            *_norm("mtp.hidden_norm", dim),
            Kept("mtp.both", 2 * dim, Cut.STREAM),
            *_norm("mtp.norm", dim),
            Kept("mtp.out", dim, Cut.STREAM),
        )
    )


def _norm(name: str, width: int, cut: Cut = Cut.STREAM, heads: float = 1) -> tuple[Kept, ...]:
    """RMSNorm: its input and the reciprocal root mean squares; its output is counted with its consumer.

    With single operations, the input and the normalized input before the weight are saved as float32.
    """
    return (
        Kept(f"{name}.in", heads * width, cut, "norm"),
        Kept(f"{name}.rstd", heads, cut, "float32"),
        Kept(f"{name}.normed", heads * width, cut, "float32", by=Keeper.COMPOSITE_NORM),
    )


def _attention(config: ModelConfig, layer: int) -> PartActivations:
    of, heads, groups = config.attention, config.n_heads, config.n_kv_heads
    width = config.head_width
    q, k = heads * width, groups * width
    extra: tuple[Kept, ...] = ()
    is_rotated = of.is_rotated(layer)
    if of.qk_norm == "learned":
        extra += _norm("q_norm", width, Cut.INNER, heads) + _norm("k_norm", width, Cut.INNER, groups)
    elif of.qk_norm == "l2" and is_rotated:
        extra += _bare_norm("q_l2", width, heads) + _bare_norm("k_l2", width, groups)
    if of.sinks:
        # kernels.py, _with_sink: one more feature and one more key, padded to a multiple of eight.
        joined = heads * (width + 8), groups * (width + 8), groups * (width + 8)
        tensors = [Kept(n, w, Cut.INNER) for n, w in zip(("q", "k", "v"), joined, strict=True)]
        out = (Kept("attended", heads * (width + 8), Cut.INNER), Kept(LSE, heads, Cut.INNER, "float32"))
        extra += (Kept("wo.in", q, Cut.INNER),)
    else:
        tensors = [Kept("q", q, Cut.INNER), Kept("k", k, Cut.INNER), Kept("v", k, Cut.INNER)]
        out = (Kept("attended", q, Cut.INNER), Kept(LSE, heads, Cut.INNER, "float32"))
    return PartActivations(
        kept=(*extra, *tensors, *out),
        products=_attention_products(config, layer),
        dear=out,
        backward=(
            Kept("grad of attended", q, Cut.INNER),
            Kept("grads of q, k, v", q + 2 * k, Cut.INNER),
        ),
    )


def _bare_norm(name: str, width: int, heads: int) -> tuple[Kept, ...]:
    """A norm without a weight; its output is counted with attention."""
    return (
        Kept(f"{name}.in", heads * width, Cut.INNER, "norm"),
        Kept(f"{name}.rstd", heads, Cut.INNER, "float32"),
    )


def _attention_products(config: ModelConfig, layer: int) -> tuple[Kept, ...]:
    """Results of attention's linears."""
    cuts = {Split.COLUMN: Cut.INNER, Split.ROW: Cut.PARTIAL, Split.WHOLE: Cut.WHOLE}
    linears = [t for t in block_tensors(config, layer) if t.is_matrix and ".attention." in t.name]
    # Without a sink's padding, attention saves the result of wv itself.
    names = {} if config.attention.sinks else {"wv": "v"}
    leaves = [(linear.module.rpartition(".")[2], linear) for linear in linears]
    return tuple(Kept(names.get(leaf, leaf), linear.outputs, cuts[linear.split]) for leaf, linear in leaves)


def _latent(config: ModelConfig, layer: int, on_cpu: bool) -> PartActivations:
    of, heads = config.attention, config.n_heads
    wide, value, rank = heads * config.head_width, heads * of.v_head_dim, of.kv_lora_rank
    up = heads * (of.qk_nope_head_dim + of.v_head_dim)
    down = rank + of.qk_rope_head_dim
    kept: tuple[Kept, ...] = ()
    if of.q_lora_rank is not None:
        kept += (*_norm("q_norm", of.q_lora_rank, Cut.WHOLE), Kept("q_norm.out", of.q_lora_rank, Cut.WHOLE))
    # The norm's input is a view of the latents and the rotated key together.
    kept += (
        Kept("latents", down, Cut.WHOLE),
        *_norm("kv_norm", rank, Cut.WHOLE)[1:],
        Kept("kv_norm.out", rank, Cut.WHOLE),
        Kept("q", wide, Cut.INNER),
        Kept("k", wide, Cut.INNER),
    )
    padded = on_cpu and value != wide
    out = (
        Kept("attended", wide if padded else value, Cut.INNER),
        Kept(LSE, heads, Cut.INNER, "float32"),
    )
    # Values are a view of the result of wkv_b, unless a CPU's kernel needs them padded to the width of keys.
    kept += (Kept("v", wide if padded else up, Cut.INNER), *out)
    kept += (Kept("wo.in", value, Cut.INNER),) if padded else ()
    backward = (
        Kept("grad of attended", value, Cut.INNER),
        Kept("grads of q, k, v", 2 * wide + up, Cut.INNER),
    )
    return PartActivations(kept, _attention_products(config, layer), dear=out, backward=backward)


def _feed_forward(hidden: int, dim: int, name: str) -> PartActivations:
    def inner(what: str, times: float = 1, by: Keeper = Keeper.ALL) -> Kept:
        return Kept(f"{name}.{what}", times * hidden, Cut.INNER, by=by)

    return PartActivations(
        kept=(inner("gate"), inner("up"), inner("silu", by=Keeper.EAGER), inner("product")),
        products=(inner("gate"), inner("up"), Kept(f"{name}.w2", dim, Cut.PARTIAL)),
        forward=(inner("gate, up, silu, product", 4),),
        # Backward multiplies the product's gradient by both factors; the product itself is freed by then.
        backward=(inner("grads", 2),),
    )


def _mixture(config: ModelConfig) -> PartActivations:
    of, dim = config.moe, config.dim
    top_k, experts = of.top_k, of.num_experts
    rows, hidden = top_k * dim, top_k * of.hidden_dim

    def routed(name: str, width: float, dtype: str = "compute", by: Keeper = Keeper.ALL) -> Kept:
        return Kept(f"moe.{name}", width, Cut.ROUTED, dtype, by)

    def inner(name: str, width: float, by: Keeper = Keeper.ALL) -> Kept:
        return Kept(f"moe.{name}", width, Cut.ROUTED_INNER, by=by)

    kept: tuple[Kept, ...] = (
        routed("scores", experts, "float32"),
        routed("chosen", top_k, "int64"),
        routed("weights", 2 * top_k, "float32"),
        routed("places", 2 * top_k, "int64"),
        routed("rows", rows),
        routed("scaled rows" if of.score_before_experts else "outputs", rows),
    )
    kept += (routed("normalized", 1, "float32"),) if of.normalize_scores else ()
    plain = config.activation == "swiglu"
    # The clamped gate saves its clamped factors and their products; a bias is added out of place.
    kept += (
        (inner("gate", hidden), inner("up", hidden), inner("silu", hidden, Keeper.EAGER))
        if plain
        else (inner("gate, up", 3 * hidden), inner("factors", 3 * hidden, Keeper.EAGER))
    )
    kept += (inner("product", hidden),)
    products: tuple[Kept, ...] = (
        routed("router", experts, "float32"),
        inner("gate", hidden),
        inner("up", hidden),
        routed("outputs", rows),
    )
    forward: tuple[Kept, ...] = (routed("rows", rows), inner("gate, up, silu, product", 4 * hidden))
    backward: tuple[Kept, ...] = (inner("grads", 2 * hidden), routed("grads of rows", rows))
    if of.shared_hidden_dim:
        shared = _feed_forward(of.shared_hidden_dim, dim, "moe.shared_experts")
        kept, products = kept + shared.kept, products + shared.products
        kept += (routed("router.in", dim, "widened", Keeper.EAGER),)
    choices = (routed("top scores", top_k, "float32"), routed("top experts", top_k, "int64"))
    return PartActivations(kept, products, choices=choices, forward=forward, backward=backward)
