"""Config of attention: latents, norms, biases, sinks, and local attention."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import numerics
from harness.util.errors import ConfigError

KINDS = ("gqa", "mla")
QK_NORMS = ("none", "learned", "l2")
_LATENT = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


@dataclass(frozen=True)
class Span:
    """The positions that a position attends to, besides the causal mask and documents.

    Attributes:
        window: only the last ``window`` positions, its own included; None: all.
        chunk: only its own chunk of ``chunk`` positions; None: all.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def is_whole(self) -> bool:
        """Whether attention is global."""
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
    """``gqa``: grouped queries (arXiv:2305.13245); ``mla``: multi-head latents (arXiv:2405.04434)."""
    qkv_bias: bool = numerics(False)
    """Whether the projections to queries, keys and values have biases."""
    output_bias: bool = numerics(False)
    """Whether the output projection has a bias."""
    qk_norm: str = numerics("none", choices=QK_NORMS)
    """``none``; ``learned``: RMSNorm of each query and key head before rotation (Qwen 3); ``l2``: the same
    without weights and after rotation, in rotated layers only (Llama 4)."""
    sinks: bool = numerics(False)
    """Whether each head has an attention sink, a score without a value (GPT-OSS; arXiv:2309.17453)."""
    window: int | None = numerics(None, least=1)
    """Positions that a local layer attends to, itself included; null: all."""
    chunk: int | None = numerics(None, least=1)
    """Length of the chunks within which a local layer attends; null: no chunks."""
    global_every_nth_layer: int | None = numerics(None, least=1)
    """Every n-th layer (n - 1, 2n - 1, ...) attends globally; null: all layers use window or chunk."""
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
        """Whether keys and values come from a latent."""
        return self.kind == "mla"

    def span(self, layer: int) -> Span:
        """The span of a block's attention."""
        return Span() if _is_nth(layer, self.global_every_nth_layer) else Span(self.window, self.chunk)

    def is_rotated(self, layer: int) -> bool:
        """Whether a block rotates its queries and keys."""
        return not _is_nth(layer, self.nope_every_nth_layer)

    @property
    def latent_head_dim(self) -> int:
        """Width of a query and key head of latent attention."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def validate(self, n_heads: int, n_kv_heads: int, head_width: int) -> None:
        """Raise ConfigError for fields that contradict each other."""
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
        if not self.is_latent:
            set_ = [name for name in ("q_lora_rank", *_LATENT) if getattr(self, name)]
            if set_:
                name = set_[0]
                rule = "is of latent attention, and model.attention.kind is gqa"
                raise ConfigError(f"model.attention.{name}", getattr(self, name), rule, "kind=mla")
            return
        for name in _LATENT:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.attention.{name}", getattr(self, name), "must be at least 1")
        if n_kv_heads != n_heads:
            rule = f"every head of latent attention has keys: it must be model.n_heads={n_heads}"
            raise ConfigError("model.n_kv_heads", n_kv_heads, rule, [n_heads])
        if head_width != self.qk_nope_head_dim + self.qk_rope_head_dim:
            whole = self.qk_nope_head_dim + self.qk_rope_head_dim
            rule = "must be qk_nope_head_dim + qk_rope_head_dim of model.attention"
            raise ConfigError("model.head_dim", head_width, rule, f"{whole}, or null")
        for name, off in (("qkv_bias", False), ("output_bias", False), ("qk_norm", "none"), ("sinks", False)):
            if getattr(self, name) != off:
                rule = "latent attention has none"
                raise ConfigError(f"model.attention.{name}", getattr(self, name), rule, [off])


def _is_nth(layer: int, every: int | None) -> bool:
    return every is not None and (layer + 1) % every == 0
