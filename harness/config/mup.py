"""Config of the maximal update parametrization (muP)."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.fields import numerics

PROPORTIONAL = (
    "n_heads",
    "n_kv_heads",
    "ffn_hidden_dim",
    "moe.hidden_dim",
    "moe.shared_hidden_dim",
    "attention.q_lora_rank",
    "attention.kv_lora_rank",
)
"""Fields of a model that are proportional to dim when its width changes; heads keep their width."""
HEAD_WIDTHS = ("head_dim",)
LATENT_HEAD_WIDTHS = tuple(f"attention.{part}_head_dim" for part in ("qk_nope", "qk_rope", "v"))


@dataclass(frozen=True)
class MupConfig:
    """The maximal update parametrization (muP, arXiv:2203.03466): the best learning rate does not depend on
    the width. Hyperparameters are those of a base model, which differs in its widths only."""

    base_dim: int | None = numerics(None, least=1, id_omits_default=True)
    """Width of the base model's residual stream; null: the standard parametrization. At the base model's
    widths both parametrizations are the same."""
    base_widths: dict[str, int] = numerics(factory=dict, least=1, id_omits_default=True)
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
