"""Config of a decoder; a new decoder of a known kind is a new YAML of these fields."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import label, numerics, part
from harness.errors import ConfigError, divisors
from harness.model.attention_config import AttentionConfig, Span
from harness.model.moe_config import MoEConfig
from harness.model.mtp_config import MTPConfig
from harness.model.rope_config import RopeConfig

FAMILIES = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "deepseek_v2",
    "deepseek_v3",
    "gpt_oss",
    "llama4",
)
ACTIVATIONS = ("swiglu", "swiglu_clamped")
_POSITIVE = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden_dim", "max_seq_len")


@dataclass
class ModelConfig:
    """A pre-norm decoder: attention and a feed-forward, dense or a mixture of experts, in every block."""

    name: str = label("???")
    """Name of the model: the name of its file under conf/model."""
    path: str | None = label(None)
    """With model=from_config: the config.json to read, or its folder."""
    family: str = label("llama")
    """Family of checkpoints to exchange with, by transformers' name of the model type."""
    vocab_size: int = numerics("???")
    """Rows of the embedding table."""
    dim: int = numerics("???")
    """Width of the residual stream."""
    n_layers: int = numerics("???")
    """Number of decoder blocks."""
    n_heads: int = numerics("???")
    """Query heads."""
    n_kv_heads: int = numerics("???")
    """Key and value heads; each serves n_heads / n_kv_heads query heads."""
    head_dim: int | None = numerics(None)
    """Width of a head, with latent attention of a query head; null means dim / n_heads."""
    ffn_hidden_dim: int = numerics("???")
    """Width of the dense feed-forward's hidden layer."""
    activation: str = numerics("swiglu")
    """Activation of the feed-forward: ``swiglu`` (arXiv:2002.05202), or ``swiglu_clamped`` (GPT-OSS)."""
    norm_eps: float = numerics(1e-5)
    """Added to the mean square inside RMSNorm."""
    tied_embeddings: bool = numerics(False)
    """Whether the output projection is the embedding table."""
    embedding_std: float = numerics(1.0)
    """Standard deviation of the embedding table's initial values, if it is not tied."""
    max_seq_len: int = numerics("???")
    """Longest sequence, in tokens, that the model supports."""
    rope: RopeConfig = part(RopeConfig)
    """Rotary position embedding."""
    attention: AttentionConfig = part(AttentionConfig)
    """Attention."""
    moe: MoEConfig = part(MoEConfig)
    """Mixture of experts, instead of some dense feed-forwards."""
    mtp: MTPConfig = part(MTPConfig)
    """Multi-token prediction: one more block, which predicts the token after the next."""

    def resolve(self) -> None:
        """Fill in fields that follow from others."""
        self._require_positive()
        if self.head_dim is None and self.attention.is_latent:
            self.head_dim = self.attention.qk_nope_head_dim + self.attention.qk_rope_head_dim
        if self.head_dim is None:
            if self.dim % self.n_heads:
                fits = [d for d in divisors(self.dim) if d % self.n_kv_heads == 0 and self.dim // d % 2 == 0]
                raise ConfigError(
                    "model.n_heads",
                    self.n_heads,
                    f"must divide model.dim={self.dim} when model.head_dim is null",
                    [*fits, "or model.head_dim set"] if fits else "model.head_dim set",
                )
            self.head_dim = self.dim // self.n_heads

    def validate(self) -> None:
        """Raise ConfigError when the fields do not describe a decoder."""
        self._require_positive()
        if self.family not in FAMILIES:
            raise ConfigError("model.family", self.family, "no such family", FAMILIES)
        if self.activation not in ACTIVATIONS:
            raise ConfigError("model.activation", self.activation, "no such activation", ACTIVATIONS)
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                "model.n_kv_heads",
                self.n_kv_heads,
                f"must divide model.n_heads={self.n_heads}",
                divisors(self.n_heads),
            )
        if self.rotated_width < 2 or self.rotated_width % 2:
            field = "attention.qk_rope_head_dim" if self.attention.is_latent else "head_dim"
            width = self.rotated_width
            works = [width - 1, width + 1] if width > 1 else [2]
            raise ConfigError(f"model.{field}", width, "must be even: RoPE rotates pairs", works)
        for name in ("norm_eps", "embedding_std"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be positive")
        self.rope.validate()
        self.attention.validate(self.n_heads, self.n_kv_heads, self.head_width)
        self.moe.validate(self.n_layers)
        self.mtp.validate()

    def _require_positive(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be at least 1")

    @property
    def head_width(self) -> int:
        """Width of a query and key head, resolved."""
        return self.head_dim if self.head_dim is not None else self.dim // self.n_heads

    @property
    def rotated_width(self) -> int:
        """Width of the rotated part of a query or key head."""
        return self.attention.qk_rope_head_dim if self.attention.is_latent else self.head_width

    @property
    def value_width(self) -> int:
        """Width of a value head."""
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

    def span(self, layer: int) -> Span:
        """The span of a block's attention."""
        return self.attention.span(layer)
