"""The numbers that make a decoder; a new decoder of a known kind is a new YAML of these."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config import label, numerics, part
from harness.errors import ConfigError, divisors

SCALINGS = ("none", "llama3")
_POSITIVE = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "ffn_hidden_dim", "max_seq_len")


@dataclass
class RopeConfig:
    """Rotary position embedding (RoFormer, arXiv:2104.09864)."""

    theta: float = numerics(10000.0)
    """Base of the geometric series of wavelengths."""
    scaling: str = numerics("none")
    """``none``, or ``llama3``: the frequency-dependent stretching of Llama 3.1."""
    factor: float = numerics(8.0)
    """``llama3``: by how much the longest wavelengths are stretched."""
    low_freq_factor: float = numerics(1.0)
    """``llama3``: wavelengths longer than original_max_position / this are stretched whole."""
    high_freq_factor: float = numerics(4.0)
    """``llama3``: wavelengths shorter than original_max_position / this are left alone."""
    original_max_position: int = numerics(8192)
    """``llama3``: context length, in tokens, that the model was first trained with."""

    def validate(self) -> None:
        """Raises ConfigError when no frequencies can be computed."""
        if self.scaling not in SCALINGS:
            raise ConfigError("model.rope.scaling", self.scaling, "no such scaling", SCALINGS)
        for name in ("theta", "factor", "low_freq_factor", "high_freq_factor", "original_max_position"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"model.rope.{name}", getattr(self, name), "must be positive")
        if self.low_freq_factor >= self.high_freq_factor:
            raise ConfigError(
                "model.rope.low_freq_factor",
                self.low_freq_factor,
                f"must be below model.rope.high_freq_factor={self.high_freq_factor}",
                f"{self.high_freq_factor / 4}",
            )


@dataclass
class ModelConfig:
    """A pre-norm decoder with grouped-query attention and a SwiGLU feed-forward (Llama 2, 3, 3.1, 3.2)."""

    name: str = label("???")
    """Name of the model, as its file under conf/model is called."""
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
    """Width of a head; null means dim / n_heads."""
    ffn_hidden_dim: int = numerics("???")
    """Width of the feed-forward's hidden layer."""
    norm_eps: float = numerics(1e-5)
    """Added to the mean square inside RMSNorm."""
    tied_embeddings: bool = numerics(False)
    """Whether the output projection is the embedding table."""
    max_seq_len: int = numerics("???")
    """Longest sequence, in tokens, that the model is made for."""
    rope: RopeConfig = part(RopeConfig)
    """Rotary position embedding."""

    def resolve(self) -> None:
        """Fills in what follows from the rest."""
        self._require_positive()
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
        """Raises ConfigError when the numbers do not make a decoder."""
        self._require_positive()
        if self.n_heads % self.n_kv_heads:
            raise ConfigError(
                "model.n_kv_heads",
                self.n_kv_heads,
                f"must divide model.n_heads={self.n_heads}",
                divisors(self.n_heads),
            )
        if self.head_width < 2 or self.head_width % 2:
            works = [self.head_width - 1, self.head_width + 1] if self.head_width > 1 else [2]
            raise ConfigError("model.head_dim", self.head_width, "must be even: RoPE rotates pairs", works)
        if not self.norm_eps > 0:
            raise ConfigError("model.norm_eps", self.norm_eps, "must be positive")
        self.rope.validate()

    def _require_positive(self) -> None:
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ConfigError(f"model.{name}", getattr(self, name), "must be at least 1")

    @property
    def head_width(self) -> int:
        """Width of a head, resolved."""
        return self.head_dim if self.head_dim is not None else self.dim // self.n_heads
