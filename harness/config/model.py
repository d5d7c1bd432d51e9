"""The model's fields: its widths and depth, attention, rotations, experts, multi-token prediction, muP."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any, TypeVar, cast

from harness.config.fields import (
    NUMERICS,
    Switch,
    added_numerics,
    from_dict,
    label,
    leaves,
    numerics,
    part,
    with_value,
)
from harness.config.registry import Registry
from harness.util.errors import ConfigError, as_typed, divisors

KINDS = ("gqa", "mla")
QK_NORMS = ("none", "learned", "all_heads", "l2")
NORM_POSITIONS = ("before", "after", "around")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class AttentionSpan:
    """The positions that a position attends to, besides the causal mask and documents.

    Attributes:
        window: only the last ``window`` positions, its own included; None: all.
        chunk: only its own chunk of ``chunk`` positions; None: all.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_whole(self) -> bool:
        return self.window is None and self.chunk is None

    def mean_reach(self, seq_len: int) -> float:
        """Mean number of positions that a position of a sequence attends to."""
        if self.chunk is not None and self.chunk < seq_len:
            whole, rest = divmod(seq_len, self.chunk)
            return (whole * self.chunk * (self.chunk + 1) + rest * (rest + 1)) / 2 / seq_len
        window = min(self.window or seq_len, seq_len)
        return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len

    def most_reach(self, seq_len: int) -> int:
        """The largest number of positions that one attends to: the width of the square or band of scores."""
        return min(seq_len, self.window or seq_len, self.chunk or seq_len)


@dataclass(frozen=True)
class AttentionConfig:
    """Self-attention; the defaults are Llama's."""

    kind: str = numerics("gqa", choices=KINDS)
    """``gqa``: grouped queries (arXiv:2305.13245); ``mla``: multi-head latents
    (arXiv:2405.04434)."""
    qkv_bias: bool = numerics(False)
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = numerics(False)
    """Whether the output projection has a bias."""
    qk_norm: str = numerics("none", choices=QK_NORMS)
    """``none``; ``learned``: RMSNorm of each query and key head before rotation (Qwen 3); ``all_heads``: of
    all query heads together, and of all key heads (OLMo 2); ``l2``: of each head without weights and after
    rotation, in rotated layers only (Llama 4)."""
    scale: float | None = added_numerics(None, above=0)
    """Factor of the scores (Granite, Gemma 2); null: 1 / sqrt(width of a head)."""
    score_cap: float | None = added_numerics(None, above=0)
    """Scores are this x tanh(score / this) (Gemma 2, arXiv:2408.00118). On GPUs it needs
    training.attention=flex; on CPUs all scores are in memory. null: no cap."""
    output_gate: bool = added_numerics(False)
    """Whether attention's values are multiplied by the sigmoid of one more projection of its input
    (Qwen3-Next; arXiv:2505.06708), which has a bias if queries have."""
    sinks: bool = numerics(False)
    """Whether each head has an attention sink, a score without a value (GPT-OSS;
    arXiv:2309.17453)."""
    window: int | None = numerics(None, least=1)
    """Positions that a local layer attends to, itself included; null: all."""
    chunk: int | None = numerics(None, least=1)
    """Length of the chunks within which a local layer attends; null: no chunks."""
    global_every_nth_layer: int | None = numerics(None, least=1)
    """Every n-th layer (n - 1, 2n - 1, ...) attends globally; null: all layers use window or
    chunk."""
    nope_every_nth_layer: int | None = numerics(None, least=1)
    """Every n-th layer (n - 1, 2n - 1, ...) does not rotate (Llama 4's iRoPE); null: all do."""
    nope_temperature: float = numerics(0.0)
    """Layers that do not rotate scale query t by 1 + this x log(1 + floor((t + 1) / nope_temperature_floor))
    (arXiv:2501.19399); 0: not at all."""
    nope_temperature_floor: int = numerics(8192, least=1)
    """Positions per step of that scale."""
    q_lora_rank: int | None = numerics(None, least=1)
    """``mla``: width of the latent of queries; null: queries come from the residual stream."""
    kv_lora_rank: int = numerics(0, least=0)
    """``mla``: width of the latent of keys and values."""
    qk_nope_head_dim: int = numerics(0, least=0)
    """``mla``: width of the unrotated part of a query and key head."""
    qk_rope_head_dim: int = numerics(0, least=0)
    """``mla``: width of the rotated part; keys of all heads share it."""
    v_head_dim: int = numerics(0, least=0)
    """``mla``: width of a value head."""

    @property
    def is_latent(self) -> bool:
        return self.kind == "mla"

    def span(self, layer: int) -> AttentionSpan:
        return (
            AttentionSpan()
            if _is_nth(layer, self.global_every_nth_layer)
            else AttentionSpan(self.window, self.chunk)
        )

    def is_rotated(self, layer: int) -> bool:
        return not _is_nth(layer, self.nope_every_nth_layer)

    @property
    def latent_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def validate(self, n_heads: int, n_kv_heads: int, head_width: int) -> None:
        if self.window is not None and self.chunk is not None:
            rule = "is one way to attend locally, and model.attention.window another"
            raise ConfigError("model.attention.chunk", self.chunk, rule, "one of them null")
        if self.global_every_nth_layer is not None and self.window is None and self.chunk is None:
            raise ConfigError(
                "model.attention.global_every_nth_layer",
                self.global_every_nth_layer,
                "changes nothing: without window or chunk no layer is local",
                "null, or model.attention.window set",
            )
        if self.sinks and self.score_cap is not None:
            rule = "and model.attention.sinks: no kernel has both"
            raise ConfigError("model.attention.score_cap", self.score_cap, rule, ["null"])
        if not self.is_latent:
            set_ = [name for name in ("q_lora_rank", *_LATENT) if getattr(self, name)]
            if set_:
                name = set_[0]
                rule = "is of latent attention, and model.attention.kind is gqa"
                raise ConfigError(f"model.attention.{name}", getattr(self, name), rule, "kind=mla")
            return
        for name in _LATENT:
            width = getattr(self, name)
            if width < 1:
                raise ConfigError(f"model.attention.{name}", width, "must be at least 1")
        if n_kv_heads != n_heads:
            rule = f"every head of latent attention has keys: it must be model.n_heads={n_heads}"
            raise ConfigError("model.n_kv_heads", n_kv_heads, rule, [n_heads])
        if head_width != self.latent_head_dim:
            rule = "must be qk_nope_head_dim + qk_rope_head_dim of model.attention"
            raise ConfigError(
                "model.head_dim", head_width, rule, f"{self.latent_head_dim}, or null"
            )
        default = AttentionConfig()
        for name in ("qkv_bias", "output_bias", "qk_norm", "sinks", "output_gate"):
            value = getattr(self, name)
            off = getattr(default, name)
            if value != off:
                rule = "latent attention has none"
                raise ConfigError(f"model.attention.{name}", value, rule, [as_typed(off)])


def _is_nth(layer: int, every: int | None) -> bool:
    return every is not None and (layer + 1) % every == 0


SCALINGS = ("none", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864)."""

    theta: float = numerics(10000.0, above=0)
    """Base of the geometric series of wavelengths."""
    local_theta: float | None = added_numerics(None, above=0)
    """The base in layers with a window or chunk, whose wavelengths are not scaled (Gemma 3, OLMo 3);
    null: all layers rotate alike."""
    rotated_fraction: float = added_numerics(1.0, above=0, most=1)
    """Fraction of a head's width that is rotated, from its first value (GLM, Phi 4 mini)."""
    interleaved: bool = numerics(False)
    """Whether elements (2i, 2i + 1) of a head are rotated as a pair; else (i, i + width / 2)."""
    scaling: str = numerics("none", choices=SCALINGS)
    """``none``; ``linear`` stretches all wavelengths (arXiv:2306.15595); ``llama3``, the frequency-dependent
    stretching of Llama 3.1; ``yarn`` (arXiv:2309.00071)."""
    factor: float = numerics(8.0, above=0)
    """Factor by which the longest wavelengths (``linear``: all) are stretched."""
    low_freq_factor: float = numerics(1.0, above=0)
    """``llama3``: wavelengths longer than original_max_position / this are fully stretched."""
    high_freq_factor: float = numerics(4.0, above=0)
    """``llama3``: wavelengths shorter than original_max_position / this are unchanged."""
    original_max_position: int = numerics(8192, above=0)
    """Context length, in tokens, that the model was first trained with."""
    beta_fast: float = numerics(32.0, above=0)
    """``yarn``: pairs that turn more often than this within the original context are unchanged."""
    beta_slow: float = numerics(1.0, above=0)
    """``yarn``: pairs that turn less often than this are fully stretched."""
    truncate: bool = numerics(True)
    """``yarn``: whether the ends of the ramp between them are rounded to integers."""
    mscale: float | None = numerics(None)
    """``yarn``: set with mscale_all_dim; the ratio of their temperatures scales the rotation."""
    mscale_all_dim: float | None = numerics(None)
    """``yarn``: temperature of the scores of latent attention (DeepSeek V2 and V3)."""

    def validate(self) -> None:
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            least = getattr(self, low)
            most = getattr(self, high)
            if least > most or (least == most and low == "beta_slow"):
                raise ConfigError(
                    f"model.rope.{low}",
                    least,
                    f"must be below model.rope.{high}={most}",
                    f"{most / 4}",
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            rule = "belongs with model.rope.mscale_all_dim: both are set or neither is"
            one = self.mscale_all_dim if self.mscale is None else self.mscale
            works = f"model.rope.mscale={one} and model.rope.mscale_all_dim={one}, or null for both"
            raise ConfigError("model.rope.mscale", self.mscale, rule, works)

    @property
    def of_local_layers(self) -> RopeConfig:
        """The rotation of layers with a window or chunk."""
        if self.local_theta is None:
            return self
        return replace(self, theta=self.local_theta, local_theta=None, scaling="none")

    @property
    def rotation_scale(self) -> float:
        """Factor of rotated queries and keys: YaRN's temperature, equation 22."""
        if self.scaling != "yarn":
            return 1.0
        if self.mscale is not None and self.mscale_all_dim is not None:
            return self._temperature(self.mscale) / self._temperature(self.mscale_all_dim)
        return self._temperature(1.0)

    @property
    def score_scale(self) -> float:
        """Extra factor of attention's scores, from mscale_all_dim."""
        if self.scaling != "yarn" or self.mscale_all_dim is None:
            return 1.0
        return self._temperature(self.mscale_all_dim) ** 2

    def _temperature(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1.0


SCORES = ("softmax", "sigmoid")
GROUP_SCORES = ("max", "top2_sum")


EXPERTS = Switch("model.moe.num_experts", "model=qwen3_moe_debug")
SHARED = Switch("model.moe.shared_hidden_dim", "model.moe.shared_hidden_dim=WIDTH")
ROUTED = Switch("model.moe.force_balance", "model.moe.force_balance=false", operator.not_)


@dataclass(frozen=True)
class MoEConfig:
    """A mixture of experts (arXiv:1701.06538): each token goes to top_k of num_experts.

    No tokens are dropped: there is no capacity limit, as in MegaBlocks (arXiv:2211.15841).
    """

    num_experts: int = numerics(0, least=0)
    """Routed experts per mixture; 0: all feed-forwards are dense."""
    top_k: int = numerics(1, least=1)
    """Experts per token."""
    hidden_dim: int = numerics(0, least=0)
    """Width of an expert's hidden layer."""
    shared_hidden_dim: int = numerics(0, least=0)
    """Hidden width of all shared experts together; 0: there are none."""
    shared_gate: bool = added_numerics(False, needs=SHARED)
    """Whether the output of shared experts is multiplied by the sigmoid of a linear of their input
    (Qwen3-Next)."""
    first_dense_layers: int = numerics(0, least=0)
    """Number of blocks at the beginning with a dense feed-forward."""
    every_nth_layer: int = numerics(1, least=1)
    """Every n-th of the other blocks (n - 1, 2n - 1, ...) has experts."""
    score: str = numerics("softmax", choices=SCORES)
    """Scores of the router's logits: ``softmax`` over all experts, or ``sigmoid`` of each."""
    normalize_scores: bool = numerics(False)
    """Whether the scores of the chosen experts are divided by their sum."""
    score_scale: float = numerics(1.0, above=0)
    """Factor of the scores, after normalization."""
    score_before_experts: bool = numerics(False)
    """Whether an expert's input is multiplied by its score (Llama 4), instead of its output."""
    num_groups: int = numerics(1, least=1)
    """Number of groups of experts; a token goes to experts in top_groups of them (DeepSeek)."""
    top_groups: int = numerics(1, least=1)
    """Number of groups that a token's experts are chosen from."""
    group_score: str = numerics("max", choices=GROUP_SCORES)
    """Score of a group: that of its best expert (``max``), or the sum of its best two
    (``top2_sum``)."""
    router_bias: bool = numerics(False)
    """Whether the router has biases (GPT-OSS)."""
    expert_bias: bool = numerics(False)
    """Whether the experts' projections have biases (GPT-OSS)."""
    balance_coeff: float = numerics(0.0, least=0)
    """Amount by which every expert's balancing bias moves towards the mean load after each step; the bias is
    used for the choice only (arXiv:2408.15664). 0: no biases."""
    z_loss_coeff: float = added_numerics(0.0, least=0, needs=EXPERTS)
    """Coefficient of log(Z)^2 of each layer's router, where Z is the sum of a token's exponentiated logits
    (ST-MoE, arXiv:2202.08906, equation 5: 1e-3). It is a mean over the tokens of a sequence, then over
    the sequences of the global batch. It changes gradients and is not part of the logged loss. 0: none."""
    aux_loss_coeff: float = numerics(0.0, least=0, needs=EXPERTS)
    """Weight of the sequence-wise auxiliary loss (arXiv:2412.19437, equation 17), a mean over the sequences
    of the global batch. It changes gradients and is not part of the logged loss. 0: no auxiliary
    loss."""
    force_balance: bool = numerics(False)
    """Assign the positions of a sequence to experts in turn, regardless of scores: for
    benchmarks."""

    @property
    def enabled(self) -> bool:
        return self.num_experts > 0

    def is_at(self, layer: int) -> bool:
        """Whether a block has experts, if the model has any."""
        return layer >= self.first_dense_layers and (layer + 1) % self.every_nth_layer == 0

    def validate(self, n_layers: int) -> None:
        if not self.enabled:
            return
        if self.hidden_dim < 1:
            raise ConfigError("model.moe.hidden_dim", self.hidden_dim, "must be at least 1")
        if not any(self.is_at(layer) for layer in range(n_layers)):
            rule = f"leaves no block of model.n_layers={n_layers} with experts"
            raise ConfigError("model.moe.first_dense_layers", self.first_dense_layers, rule, [0])
        if self.num_experts % self.num_groups:
            rule = f"must divide model.moe.num_experts={self.num_experts}"
            raise ConfigError(
                "model.moe.num_groups", self.num_groups, rule, divisors(self.num_experts)
            )
        if self.top_groups > self.num_groups:
            rule = f"must not exceed model.moe.num_groups={self.num_groups}"
            raise ConfigError("model.moe.top_groups", self.top_groups, rule, [self.num_groups])
        in_group = self.num_experts // self.num_groups
        most = self.top_groups * in_group
        if self.top_k > most:
            rule = f"must not exceed the {most} experts that are chosen from"
            raise ConfigError("model.moe.top_k", self.top_k, rule, f"at most {most}")
        if self.group_score == "top2_sum" and self.num_groups > 1 and in_group < 2:
            rule = "needs two experts in a group, and there is one"
            raise ConfigError("model.moe.group_score", self.group_score, rule, ["max"])


LAYER_KINDS = ("full", "delta")
DECAYS = ("head", "channel")


def _has_delta(kinds: list[str] | None) -> bool:
    return kinds is not None and "delta" in kinds


DELTA = Switch("model.layer_kinds", "model.layer_kinds=[delta,full]", _has_delta)


@dataclass(frozen=True)
class DeltaConfig:
    """Gated DeltaNet (arXiv:2412.06464), the mixer of ``delta`` layers: every value head has a state of
    key_head_dim x value_head_dim values, which positions write to and read."""

    key_heads: int = added_numerics(0, least=0, needs=DELTA)
    """Query and key heads; each serves value_heads / key_heads value heads."""
    value_heads: int = added_numerics(0, least=0, needs=DELTA)
    """Value heads."""
    key_head_dim: int = added_numerics(0, least=0, needs=DELTA)
    """Width of a query or key head."""
    value_head_dim: int = added_numerics(0, least=0, needs=DELTA)
    """Width of a value head."""
    kernel: int = added_numerics(4, least=2, needs=DELTA)
    """Width of the convolutions of queries, keys and values, in positions."""
    decay: str = added_numerics("head", choices=DECAYS, needs=DELTA)
    """What has a decay of its own: the state of a ``head``, or each ``channel`` of its keys (Kimi Delta
    Attention, arXiv:2510.26692). With ``channel`` decays and gates are projected from latents as wide as
    a head, and gates are sigmoids."""

    @property
    def key_width(self) -> int:
        return self.key_heads * self.key_head_dim

    @property
    def value_width(self) -> int:
        return self.value_heads * self.value_head_dim

    @property
    def by_channel(self) -> bool:
        return self.decay == "channel"

    @property
    def decays(self) -> int:
        """Number of decays at a position."""
        return self.key_width if self.by_channel else self.value_heads

    def linears(self, dim: int) -> dict[str, tuple[int, int]]:
        """Outputs and inputs of the linears to queries, keys, values, gates, shares and decays.

        Latents of gates are those of ``wz_a``, and of decays those of ``wa_a``.
        """
        linears = {
            "wq": (self.key_width, dim),
            "wk": (self.key_width, dim),
            "wv": (self.value_width, dim),
            "wz": (self.value_width, self.value_head_dim if self.by_channel else dim),
            "wb": (self.value_heads, dim),
            "wa": (self.decays, self.key_head_dim if self.by_channel else dim),
        }
        if self.by_channel:
            linears["wz_a"] = (self.value_head_dim, dim)
            linears["wa_a"] = (self.key_head_dim, dim)
        return linears

    @property
    def convolutions(self) -> dict[str, int]:
        """Features of the convolutions."""
        return {"conv_q": self.key_width, "conv_k": self.key_width, "conv_v": self.value_width}

    def validate(self) -> None:
        for name in ("key_heads", "value_heads", "key_head_dim", "value_head_dim"):
            value = getattr(self, name)
            if value < 1:
                rule = "must be at least 1: model.layer_kinds has delta layers"
                works = f"model.delta.{name}=8, or model.layer_kinds=null"
                raise ConfigError(f"model.delta.{name}", value, rule, works)
        if self.value_heads % self.key_heads:
            rule = f"must divide model.delta.value_heads={self.value_heads}"
            raise ConfigError(
                "model.delta.key_heads", self.key_heads, rule, divisors(self.value_heads)
            )
        if self.by_channel and self.key_heads != self.value_heads:
            rule = f"states decay by their own keys: it must be model.delta.value_heads={self.value_heads}"
            raise ConfigError(
                "model.delta.key_heads", self.key_heads, rule, f"{self.value_heads}, or decay=head"
            )


DEPTHS = (0, 1)


@dataclass(frozen=True)
class MTPConfig:
    """Multi-token prediction as in DeepSeek V3 (arXiv:2412.19437, section 2.2).

    One more block is trained to predict the token after the next one. The decoder's own output does
    not change; the logged loss and validation's are the decoder's.
    """

    depth: int = numerics(0, choices=DEPTHS)
    """Tokens to predict beyond the next one: 0 or 1."""
    loss_weight: float = numerics(0.3)
    """Weight of its loss (lambda in the paper: 0.3 for the first 10T tokens, then 0.1). The loss is a sum
    over its tokens divided by the token count of the next-token loss, which is slightly larger."""

    def validate(self) -> None:
        if self.depth and not self.loss_weight > 0:
            works = "0.3, or model.mtp.depth=0"
            raise ConfigError("model.mtp.loss_weight", self.loss_weight, "must be positive", works)


PROPORTIONAL = (
    "n_heads",
    "n_kv_heads",
    "ffn_hidden_dim",
    "moe.hidden_dim",
    "moe.shared_hidden_dim",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
    "delta.key_heads",
    "delta.value_heads",
)
"""Fields of a model that are proportional to dim when its width changes; heads keep their width."""
HEAD_WIDTHS = ("head_dim",)
LATENT_HEAD_WIDTHS = tuple(f"attention.{part}_head_dim" for part in ("qk_nope", "qk_rope", "v"))


@dataclass(frozen=True)
class MupConfig:
    """The maximal update parametrization (muP, arXiv:2203.03466): the best learning rate does not depend on
    the width. Hyperparameters are those of a base model, which differs in its widths only."""

    base_dim: int | None = added_numerics(None, least=1)
    """Width of the base model's residual stream; null: the standard parametrization. At the base model's
    widths both parametrizations are the same."""
    base_widths: dict[str, int] = added_numerics(
        factory=dict,
        least=1,
        needs=Switch("model.mup.base_dim", "model.mup.base_dim=WIDTH"),
    )
    """Widths of the base model that are not proportional to base_dim: {head_dim: 32, ffn_hidden_dim: 512}.
    Without an entry a head's width is that of this model, and all others are proportional."""


@dataclass(frozen=True)
class Widths:
    """Widths divided by those of the base model; 1 without ``model.mup``."""

    inputs: float = 1.0
    """A matrix's inputs."""
    outputs: float = 1.0
    """A matrix's outputs."""
    stream: float = 1.0
    """The residual stream. Gradients are inversely proportional to it."""


SAME_WIDTHS = Widths()


_FILES = "harness.weights.families"
ARCHITECTURES: Registry[Any] = Registry(
    "architecture",
    {"decoder": "harness.model.decoder_architecture:DecoderArchitecture"},
    field="model.architecture",
    expects="harness.model.architecture:Architecture",
)
"""Kinds of models."""
BLOCKS: Registry[Any] = Registry(
    "block",
    {"pre_norm": "harness.model.decoder_architecture:PreNorm"},
    field="model.block",
    expects="harness.model.architecture:BlockKind",
)
"""Kinds of decoder blocks."""
FAMILIES: Registry[Any] = Registry(
    "family",
    {
        "llama": f"{_FILES}.llama_like:LLAMA",
        "qwen2": f"{_FILES}.llama_like:QWEN2",
        "qwen3": f"{_FILES}.llama_like:QWEN3",
        "qwen3_moe": f"{_FILES}.llama_like:QWEN3_MOE",
        "mistral": f"{_FILES}.llama_like:MISTRAL",
        "mixtral": f"{_FILES}.llama_like:MIXTRAL",
        "deepseek_v2": f"{_FILES}.deepseek:DEEPSEEK_V2",
        "deepseek_v3": f"{_FILES}.deepseek:DEEPSEEK_V3",
        "gpt_oss": f"{_FILES}.gpt_oss:GPT_OSS",
        "llama4": f"{_FILES}.llama4:LLAMA4",
        "olmo2": f"{_FILES}.olmo:OLMO2",
        "olmo3": f"{_FILES}.olmo:OLMO3",
        "gemma2": f"{_FILES}.gemma:GEMMA2",
        "gemma3": f"{_FILES}.gemma:GEMMA3",
        "glm4": f"{_FILES}.glm:GLM4",
        "glm4_moe": f"{_FILES}.glm:GLM4_MOE",
        "phi3": f"{_FILES}.phi:PHI3",
        "granite": f"{_FILES}.llama_like:GRANITE",
        "smollm3": f"{_FILES}.smollm3:SMOLLM3",
        "qwen3_next": f"{_FILES}.qwen3_next:QWEN3_NEXT",
        "qwen3_5": f"{_FILES}.qwen3_next:QWEN3_5",
        "qwen3_5_moe": f"{_FILES}.qwen3_next:QWEN3_5_MOE",
        "kimi_linear": f"{_FILES}.kimi_linear:KIMI_LINEAR",
    },
    field="model.family",
    expects=f"{_FILES}.core:Family",
)
"""Families of models at Hugging Face."""
ACTIVATIONS = ("swiglu", "swiglu_clamped", "geglu_tanh")
OfModel = TypeVar("OfModel", bound="Callable[..., Any]")


@dataclass(frozen=True)
class ModelConfig:
    """A model. The fields describe a pre-norm decoder: attention and a feed-forward, dense or a mixture of
    experts, in every block. Another architecture uses some of them, and a part of its own."""

    name: str = label("???")
    """Name of the model: the name of its file under conf/model."""
    path: str | None = label(None)
    """With model=from_config: the config.json to read, or its folder."""
    architecture: str = added_numerics("decoder", choices=ARCHITECTURES)
    """Kind of model; packages can add others."""
    family: str = label("llama", choices=FAMILIES)
    """Family of checkpoints to exchange with, by transformers' name of the model type."""
    vocab_size: int = numerics("???", least=1)
    """Rows of the embedding table; 1 for a model without one."""
    dim: int = numerics("???", least=1)
    """Width of the residual stream."""
    n_layers: int = numerics("???", least=1, most=10_000)
    """Number of blocks."""
    n_heads: int = numerics("???", least=1)
    """Query heads."""
    n_kv_heads: int = numerics("???", least=1)
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    head_dim: int | None = numerics(None)
    """Width of a head, with latent attention of a query head; null means dim / n_heads."""
    ffn_hidden_dim: int = numerics("???", least=1)
    """Width of the dense feed-forward's hidden layer."""
    activation: str = numerics("swiglu", choices=ACTIVATIONS)
    """Activation of the feed-forward: ``swiglu`` (arXiv:2002.05202), ``swiglu_clamped`` (GPT-OSS), or
    ``geglu_tanh``, a GELU by its approximation with tanh (Gemma)."""
    block: str = added_numerics("pre_norm", choices=BLOCKS)
    """Kind of the blocks; packages can add others."""
    block_options: dict[str, Any] = added_numerics(factory=dict)
    """Options of a kind of blocks that another package has added."""
    norm_eps: float = numerics(1e-5, above=0)
    """Added to the mean square inside RMSNorm."""
    norm_position: str = added_numerics("before", choices=NORM_POSITIONS)
    """Where the norms of a block are: ``before`` attention and feed-forward, ``after`` them and before the
    residual sum (OLMo 2, arXiv:2501.00656), or ``around``: both (Gemma 2, arXiv:2408.00118)."""
    norm_zero_centred: bool = added_numerics(False)
    """Whether norms multiply by 1 + weight (Gemma, Qwen3-Next): weights begin at 0, and weight
    decay draws the factors to 1."""
    tied_embeddings: bool = numerics(False)
    """Whether the output projection is the embedding table."""
    embedding_std: float = numerics(1.0, above=0)
    """Standard deviation of the embedding table's initial values, if it is not tied."""
    embedding_multiplier: float = added_numerics(1.0, above=0)
    """Factor of embeddings where they enter the residual stream: Gemma's sqrt(dim), Granite's."""
    residual_multiplier: float = added_numerics(1.0, above=0)
    """Factor of the output of every attention and feed-forward, before the residual sum (Granite)."""
    logits_scaling: float = added_numerics(1.0, above=0)
    """Divisor of the logits (Granite)."""
    logits_cap: float | None = added_numerics(None, above=0)
    """Logits are this x tanh(logit / this) (Gemma 2); null: no cap."""
    max_seq_len: int = numerics("???", least=1)
    """Longest sequence, in tokens, that the model supports."""
    rope: RopeConfig = part(RopeConfig)
    """Rotary position embedding."""
    attention: AttentionConfig = part(AttentionConfig)
    """Attention."""
    layer_kinds: list[str] | None = added_numerics(None, choices=LAYER_KINDS)
    """Kinds of the layers, repeated over them: ``full`` attention or Gated DeltaNet (``delta``), such as
    [delta, delta, delta, full]; null: all full. Multi-token prediction's block is as the last layer."""
    delta: DeltaConfig = part(DeltaConfig)
    """Gated DeltaNet, in delta layers."""
    moe: MoEConfig = part(MoEConfig)
    """Mixture of experts, instead of some dense feed-forwards."""
    mtp: MTPConfig = part(MTPConfig)
    """Multi-token prediction: one more block, which predicts the token after the next."""
    mup: MupConfig = part(MupConfig)
    """Maximal update parametrization: hyperparameters apply to any width."""
    options: dict[str, Any] = added_numerics(factory=dict)
    """Options of an architecture that another package has added."""

    def at_width(
        self, dim: int, given: Mapping[str, int] | None = None, field: str = "model.dim"
    ) -> ModelConfig:
        """The model with another ``dim``, the widths ``given``, and others in proportion, but for heads."""
        given = given or {}
        model = replace(self, dim=dim, head_dim=self.head_width)
        names = [name for name in PROPORTIONAL if name not in given]
        widths = {name: operator.attrgetter(name)(self) or 0 for name in names}
        for name, width in widths.items():
            if width * dim % self.dim:
                rule = f"model.{name}={width} x {dim} / {self.dim} is no integer"
                unit = self.dim // math.gcd(self.dim, *widths.values())
                works = f"a multiple of {unit}"
                if field == "model.mup.base_dim":
                    works += f", or model.mup.base_widths={{{name}: ...}}"
                raise ConfigError(field, dim, rule, works)
            if width:
                model = with_value(model, name, width * dim // self.dim)
        for name, width in given.items():
            model = with_value(model, name, width)
        return (
            replace(model, head_dim=model.attention.latent_head_dim)
            if self.attention.is_latent
            else model
        )

    @classmethod
    def from_stored(cls, plain: dict[str, Any]) -> ModelConfig:
        """Build a model from the fields of a file.

        Raises:
            ConfigError: an unknown field, a value of the wrong type, or a missing field.
        """
        model: ModelConfig = from_dict(cls, plain, "model.")
        return model

    @property
    def base(self) -> ModelConfig | None:
        """The base model of muP, in the standard parametrization; None without muP."""
        if self.mup.base_dim is None:
            return None
        return replace(self.at_width(self.mup.base_dim, self.mup.base_widths), mup=MupConfig())

    @property
    def mup_multiplier(self) -> float:
        """muP's factor of the logits of the output projection and of routers."""
        return 1.0 if self.mup.base_dim is None else self.mup.base_dim / self.dim

    @property
    def output_multiplier(self) -> float:
        """Factor of the logits of the output projection."""
        return self.mup_multiplier / self.logits_scaling

    @property
    def score_multiplier(self) -> float:
        """muP's factor of attention scores: they are proportional to 1 / head width, not to its root."""
        base = self.base or self
        return (base.head_width / self.head_width) ** 0.5

    @property
    def score_scale(self) -> float:
        """Factor of attention scores, without that of the rotation's scaling."""
        scale = self.attention.scale
        if scale is None:
            scale = self.head_width**-0.5
        return scale * self.score_multiplier

    @property
    def head_width(self) -> int:
        return self.head_dim if self.head_dim is not None else self.dim // self.n_heads

    @property
    def rotated_width(self) -> int:
        """Width of the rotated part of a query or key head."""
        if self.attention.is_latent:
            return self.attention.qk_rope_head_dim
        return int(self.head_width * self.rope.rotated_fraction)

    @property
    def value_width(self) -> int:
        return self.attention.v_head_dim if self.attention.is_latent else self.head_width

    @property
    def num_blocks(self) -> int:
        """Number of blocks: the decoder's, and that of multi-token prediction, number n_layers."""
        return self.n_layers + self.mtp.depth

    def has_experts(self, layer: int) -> bool:
        """Whether a block has experts; multi-token prediction's is like the decoder's last."""
        return self.moe.enabled and self.moe.is_at(min(layer, self.n_layers - 1))

    @property
    def expert_layers(self) -> list[int]:
        """The blocks with experts, including multi-token prediction's."""
        return [layer for layer in range(self.num_blocks) if self.has_experts(layer)]

    def is_delta(self, layer: int) -> bool:
        """Whether a block has Gated DeltaNet instead of attention."""
        if self.layer_kinds is None:
            return False
        return self.layer_kinds[min(layer, self.n_layers - 1) % len(self.layer_kinds)] == "delta"

    @property
    def attention_layers(self) -> list[int]:
        """The blocks with attention, including multi-token prediction's."""
        return [layer for layer in range(self.num_blocks) if not self.is_delta(layer)]

    @property
    def has_delta(self) -> bool:
        return len(self.attention_layers) < self.num_blocks

    def span(self, layer: int) -> AttentionSpan:
        return self.attention.span(layer)


def of_one_model(make: OfModel) -> OfModel:
    """Make a function of a model keep its last result: a plan, and a search, ask often for the same model."""
    last: list[Any] = []

    @wraps(make)
    def kept(model: ModelConfig, *others: Any, **named: Any) -> Any:
        if not last or last[0] is not model or last[1:3] != [others, named]:
            last[:] = model, others, named, make(model, *others, **named)
        return last[3]

    return cast(OfModel, kept)


def named_fields(model: ModelConfig) -> Iterator[tuple[str, str, Any]]:
    """Yield ``(dotted name, role, value)`` of every field, each option of the architecture by itself."""
    yield from (leaf for leaf in leaves(model) if leaf[0] != "options")
    yield from ((f"options.{name}", NUMERICS, value) for name, value in model.options.items())
