"""The activations that each part of a decoder saves for its backward pass, per token (no torch).

Every tensor is declared with its width, format, and how the layout splits it. This is the method of
Korthikanti et al. (arXiv:2205.05198, section 4), applied to what this code saves: grouped queries,
gated feed-forwards, norms without a mean, no dropout. Tests compare the declarations of eager
blocks with what autograd saves for a real block.

A tensor that two operations save is declared once. Parameters and the rotation table are not
activations.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from harness.config.model import ModelConfig
from harness.model.accounting import DELTA_CHUNK, DELTA_ROWS
from harness.model.architecture import architecture_of
from harness.model.spec import Split, TensorSpec, block_tensors

LSE = "log-sum-exp"


class ActivationSplit(StrEnum):
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
    RECEIVED = "received"
    """The same as they reach experts: with ``ep_capacity`` more, since empty places count."""
    ROUTED_INNER = "routed inner"
    """Hidden features of experts, of as many rows: split either way, by rows or by features."""


STREAM, WHOLE, PARTIAL, INNER, ROUTED, RECEIVED, ROUTED_INNER = ActivationSplit


class SavedBy(StrEnum):
    """Which implementations save a tensor."""

    ALL = "all"
    EAGER = "eager"
    """Eager blocks; compiled ones recompute it in the kernel that needs it."""
    COMPOSITE_NORM = "composite norm"
    """Eager blocks on CPUs, where RMSNorm consists of single operations; CUDA has one kernel for
    it."""


@dataclass(frozen=True)
class SavedTensor:
    """A tensor that is saved for backward."""

    name: str
    width: float
    """Values per token."""
    cut: ActivationSplit
    dtype: str = "compute"
    """``compute`` (precision.param_dtype), ``float32``, ``int64``; ``widened``: a float32 copy, if the
    original is not float32; ``norm``: float32 where a norm consists of single operations."""
    by: SavedBy = SavedBy.ALL
    fused: str = ""
    """The module that computes it and others in one product, unless that is in 8 bits."""


_inner = partial(SavedTensor, cut=INNER)


@dataclass(frozen=True)
class PartActivations:
    """Activations of a block or another part."""

    kept: tuple[SavedTensor, ...]
    """Saved for backward, without recomputation."""
    products: tuple[SavedTensor, ...] = ()
    """Results of matrix products in the order of computation; selective recomputation may save
    some."""
    always_saved: tuple[SavedTensor, ...] = ()
    """Results that selective recomputation always saves: those of attention."""
    choices: tuple[SavedTensor, ...] = ()
    """Results that are saved under any recomputation: the choice of experts."""
    forward: tuple[SavedTensor, ...] = ()
    """Alive at the peak of forward when nothing is saved."""
    backward: tuple[SavedTensor, ...] = ()
    """Gradients alive at the peak of backward, beside everything saved."""
    late_backward: tuple[SavedTensor, ...] = ()
    """Alive while backward is in attention, past the feed-forward: saved tensors and gradients."""


def pre_norm_activations(config: ModelConfig, layer: int, *, on_cpu: bool) -> PartActivations:
    """Activations of one pre-norm block, its input included."""
    dim = config.dim
    if config.is_delta(layer):
        attention = _delta(config, layer)
    elif config.attention.is_latent:
        attention = _latent(config, layer, on_cpu)
    else:
        attention = _attention(config, layer)
    mixed = config.has_experts(layer)
    inner = _mixture(config) if mixed else _feed_forward(config.ffn_hidden_dim, dim, "feed_forward")
    norm_1: tuple[SavedTensor, ...] = ()
    norm_2: tuple[SavedTensor, ...] = ()
    post_1: tuple[SavedTensor, ...] = ()
    post_2: tuple[SavedTensor, ...] = ()
    if config.norm_position != "after":
        norm_1 = norm_activations(config, "attention_norm", dim)
        norm_2 = norm_activations(config, "ffn_norm", dim)
    if config.norm_position != "before":
        post_1 = norm_activations(config, "attention_post_norm", dim)
        post_2 = norm_activations(config, "ffn_post_norm", dim)
    # A mixture copies rows and saves its router's input; only shared experts save the input itself.
    needs_whole = not mixed or config.moe.shared_hidden_dim > 0
    router = SavedTensor("router.in", dim, ROUTED, "float32")
    gathered = SavedTensor("ffn_norm.out", dim, WHOLE) if needs_whole else router
    first = (*norm_1, SavedTensor("attention_norm.out", dim, WHOLE), *attention.kept, *post_1)
    stream = SavedTensor("grad", dim, STREAM)
    whole = SavedTensor("grad of the region's input", dim, WHOLE)
    return PartActivations(
        kept=(*first, *norm_2, gathered, *inner.kept, *post_2),
        products=(*attention.products, *inner.products),
        always_saved=(*attention.always_saved, *inner.always_saved),
        choices=inner.choices,
        forward=(SavedTensor("stream", dim, STREAM), gathered, *inner.forward),
        backward=(stream, *inner.backward),
        late_backward=(*first, *attention.backward, stream, stream, whole),
    )


def head_activations(config: ModelConfig) -> PartActivations:
    """The final norm and the output projection's input; logits are counted separately."""
    out, gradient = (
        SavedTensor(name, config.dim, WHOLE) for name in ("norm.out", "grad of norm.out")
    )
    return PartActivations(
        (*norm_activations(config, "norm", config.dim), out), backward=(gradient,)
    )


def prediction_activations(config: ModelConfig) -> PartActivations:
    """Multi-token prediction without its block: norms of both streams, concatenated and projected."""
    dim = config.dim
    return PartActivations(
        kept=(
            SavedTensor("embedded", dim, STREAM),
            *norm_activations(config, "mtp.embedding_norm", dim),
            *norm_activations(config, "mtp.hidden_norm", dim),
            SavedTensor("mtp.both", 2 * dim, STREAM),
            *norm_activations(config, "mtp.norm", dim),
            SavedTensor("mtp.out", dim, STREAM),
        )
    )


def norm_activations(
    config: ModelConfig, name: str, width: int, cut: ActivationSplit = STREAM, heads: float = 1
) -> tuple[SavedTensor, ...]:
    """RMSNorm: its input and the reciprocal root mean squares; its output is counted with its consumer.

    With single operations, the input and the normalized input before the weight are saved as
    float32. A zero-centred weight is an operation of its own.
    """
    if config.norm_zero_centred:
        normed = SavedTensor(f"{name}.normed", heads * width, cut, by=SavedBy.EAGER)
    else:
        normed = SavedTensor(
            f"{name}.normed", heads * width, cut, "float32", by=SavedBy.COMPOSITE_NORM
        )
    return (
        SavedTensor(f"{name}.in", heads * width, cut, "norm"),
        SavedTensor(f"{name}.rstd", heads, cut, "float32"),
        normed,
    )


def _attention(config: ModelConfig, layer: int) -> PartActivations:
    of = config.attention
    heads = config.n_heads
    groups = config.n_kv_heads
    width = config.head_width
    q = heads * width
    k = groups * width
    extra: tuple[SavedTensor, ...] = ()
    if of.qk_norm == "learned":
        extra += norm_activations(config, "q_norm", width, INNER, heads)
        extra += norm_activations(config, "k_norm", width, INNER, groups)
    elif of.qk_norm == "all_heads":
        extra += norm_activations(config, "q_norm", q, INNER)
        extra += norm_activations(config, "k_norm", k, INNER)
    elif of.qk_norm == "l2" and of.is_rotated(layer):
        # Without a weight; the output is counted with attention.
        extra += norm_activations(config, "q_l2", width, INNER, heads)[:2]
        extra += norm_activations(config, "k_l2", width, INNER, groups)[:2]
    padded = width
    if of.sinks:
        # model/kernels.py, _with_sink: one more feature and one more key, padded to a multiple of
        # eight.
        padded += 8
        extra += (_inner("wo.in", q),)
    gradients = q + 2 * k
    if of.output_gate:
        extra += (_inner("gate", q), _inner("gated", q))
        gradients += q
    tensors = (
        _inner("q", heads * padded),
        _inner("k", groups * padded),
        _inner("v", groups * padded),
    )
    out = _inner("attended", heads * padded), _inner(LSE, heads, dtype="float32")
    return PartActivations(
        kept=(*extra, *tensors, *out),
        products=_attention_products(config, layer),
        always_saved=out,
        backward=(_inner("grad of attended", q), _inner("grads of q, k, v", gradients)),
    )


def cut_of(matrix: TensorSpec) -> ActivationSplit:
    """How the result of a product is split."""
    return {Split.COLUMN: INNER, Split.ROW: PARTIAL}.get(matrix.split, WHOLE)


def _attention_products(config: ModelConfig, layer: int) -> tuple[SavedTensor, ...]:
    products = []
    owners = {
        f"{module.name}.{name}": module.name
        for module in architecture_of(config).block_modules(config, layer)
        for name in module.fused
    }
    for tensor in block_tensors(config, layer):
        if tensor.is_matrix and (".attention." in tensor.name or ".delta." in tensor.name):
            name = tensor.module.rpartition(".")[2]
            if name == "wv" and not config.attention.sinks:
                name = "v"  # without a sink's padding, attention saves this result itself
            fused = owners.get(tensor.module, "")
            products.append(SavedTensor(name, tensor.outputs, cut_of(tensor), fused=fused))
    return tuple(products)


def _latent(config: ModelConfig, layer: int, on_cpu: bool) -> PartActivations:
    of = config.attention
    heads = config.n_heads
    wide = heads * config.head_width
    value = heads * of.v_head_dim
    rank = of.kv_lora_rank
    up = heads * (of.qk_nope_head_dim + of.v_head_dim)
    kept: tuple[SavedTensor, ...] = ()
    if of.q_lora_rank is not None:
        kept += norm_activations(config, "q_norm", of.q_lora_rank, WHOLE)
        kept += (SavedTensor("q_norm.out", of.q_lora_rank, WHOLE),)
    # The norm's input is a view of the latents and the rotated key together.
    kept += (
        SavedTensor("latents", rank + of.qk_rope_head_dim, WHOLE),
        *norm_activations(config, "kv_norm", rank, WHOLE)[1:],
        SavedTensor("kv_norm.out", rank, WHOLE),
        _inner("q", wide),
        _inner("k", wide),
    )
    # Values are a view of the result of wkv_b, unless a CPU's kernel needs them padded to the width
    # of keys.
    padded = on_cpu and value != wide
    out = _inner("attended", wide if padded else value), _inner(LSE, heads, dtype="float32")
    kept += (_inner("v", wide if padded else up), *out)
    if padded:
        kept += (_inner("wo.in", value),)
    backward = _inner("grad of attended", value), _inner("grads of q, k, v", 2 * wide + up)
    return PartActivations(
        kept, _attention_products(config, layer), always_saved=out, backward=backward
    )


def _delta(config: ModelConfig, layer: int) -> PartActivations:
    """Gated DeltaNet: what ``model/delta.py`` saves, of whole chunks; compilers save as much."""
    of = config.delta
    heads = of.value_heads
    keys = of.key_width
    values = of.value_width
    streams = 2 * keys + values
    precise = partial(_inner, dtype="float32")
    squares = DELTA_CHUNK * heads
    by_key = DELTA_CHUNK * of.key_heads
    read = heads * of.key_head_dim
    own: tuple[SavedTensor, ...] = (
        precise("delta.products of keys and queries with keys", 2 * by_key),
        precise("delta.decays between positions, system, scores", 4 * squares),
        _inner("wz", values),
        _inner("delta.silu", values, by=SavedBy.EAGER),
    )
    pairs: tuple[SavedTensor, ...] = ()
    if of.by_channel:
        own = (
            precise("delta.summed decays", of.decays),
            precise("delta.products, system, scores", 3 * squares),
            _inner("delta.gate", values),
            SavedTensor("delta.latents", of.key_head_dim + of.value_head_dim, WHOLE),
        )
        pairs = (precise("delta.pairs of positions", DELTA_ROWS**2 / DELTA_CHUNK * read),)
    kept = (
        _inner("delta.streams", streams),
        _inner("delta.beta", heads),
        precise("delta.steps, decays and their factors", 5 * of.decays + heads),
        precise("delta.convolved", streams),
        precise("delta.q, k before norms", 2 * (keys + of.key_heads)),
        precise("delta.q, k, v of chunks", streams),
        precise("delta.solutions", values + read),
        precise("delta.keys that write, queries that read", 2 * read),
        precise("delta.written", values),
        precise("delta.states", read * of.value_head_dim / DELTA_CHUNK),
        *norm_activations(
            replace(config, norm_zero_centred=False), "delta.norm", of.value_head_dim, INNER, heads
        ),
        _inner("delta.norm.out", values, by=SavedBy.EAGER),
        _inner("delta.product", values),
        *own,
    )
    return PartActivations(
        kept,
        _attention_products(config, layer),
        forward=pairs,
        backward=(
            *pairs,
            precise("delta.grads of squares", 3 * squares),
            precise("delta.grads of streams", streams),
        ),
    )


def _feed_forward(hidden: int, dim: int, name: str) -> PartActivations:
    gate = _inner(f"{name}.gate", hidden)
    up = _inner(f"{name}.up", hidden)
    silu = _inner(f"{name}.silu", hidden, by=SavedBy.EAGER)
    return PartActivations(
        kept=(gate, up, silu, _inner(f"{name}.product", hidden)),
        products=(gate, up, SavedTensor(f"{name}.w2", dim, PARTIAL)),
        forward=(_inner(f"{name}.gate, up, silu, product", 4 * hidden),),
        # Backward multiplies the product's gradient by both factors; the product itself is freed by
        # then.
        backward=(_inner(f"{name}.grads", 2 * hidden),),
    )


def _mixture(config: ModelConfig) -> PartActivations:
    of = config.moe
    dim = config.dim
    top_k = of.top_k
    experts = of.num_experts
    rows = top_k * dim
    hidden = top_k * of.hidden_dim
    routed = partial(SavedTensor, cut=ROUTED)
    inner = partial(SavedTensor, cut=ROUTED_INNER)
    outputs = routed("moe.outputs", rows)
    gate = inner("moe.gate", hidden)
    up = inner("moe.up", hidden)
    kept = [
        routed("moe.scores", experts, dtype="float32"),
        routed("moe.chosen", top_k, dtype="int64"),
        routed("moe.weights", 2 * top_k, dtype="float32"),
        routed("moe.places", 2 * top_k, dtype="int64"),
        SavedTensor("moe.rows", rows, RECEIVED),
        routed("moe.scaled rows", rows) if of.score_before_experts else outputs,
    ]
    if of.normalize_scores:
        kept.append(routed("moe.normalized", 1, dtype="float32"))
    if config.activation != "swiglu_clamped":
        kept += [gate, up, inner("moe.silu", hidden, by=SavedBy.EAGER)]
    else:
        # The clamped gate saves its clamped factors and their products; a bias is added out of
        # place.
        kept.append(inner("moe.gate, up", 3 * hidden))
        kept.append(inner("moe.factors", 3 * hidden, by=SavedBy.EAGER))
    kept.append(inner("moe.product", hidden))
    products = [routed("moe.router", experts, dtype="float32"), gate, up, outputs]
    if of.shared_hidden_dim:
        shared = _feed_forward(of.shared_hidden_dim, dim, "moe.shared_experts")
        kept += shared.kept
        products += shared.products
        if of.shared_gate:
            gate = SavedTensor("moe.shared_experts.sigmoid", 1, WHOLE)
            products.insert(-1, gate)
            kept += [gate, _inner("moe.shared_experts.gated", of.shared_hidden_dim)]
        kept.append(routed("moe.router.in", dim, dtype="widened", by=SavedBy.EAGER))
    return PartActivations(
        tuple(kept),
        tuple(products),
        choices=(
            routed("moe.top scores", top_k, dtype="float32"),
            routed("moe.top experts, order", 2 * top_k, dtype="int64"),
        ),
        forward=(
            SavedTensor("moe.rows", rows, RECEIVED),
            inner("moe.gate, up, silu, product", 4 * hidden),
        ),
        backward=(inner("moe.grads", 2 * hidden), SavedTensor("moe.grads of rows", rows, RECEIVED)),
    )
