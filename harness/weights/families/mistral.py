"""Mistral and Mixtral; fields as in transformers' models/mistral and models/mixtral."""

from __future__ import annotations

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    ConfigField,
    Family,
    TensorSlot,
    common,
    head_width,
)

_EXPERT = "block_sparse_moe.experts.{expert}"


def _dense(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width, num_key_value_heads=8),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim"),
        ConfigField(
            "sliding_window", model.attention.window, "attention.window", default=4096, nullable=True
        ),
    ]


def _mixture(model: ModelConfig) -> list[ConfigField]:
    of = model.moe
    return [
        *common(model, head_dim=head_width, num_key_value_heads=8),
        ConfigField("intermediate_size", of.hidden_dim, "moe.hidden_dim"),
        ConfigField("num_local_experts", of.num_experts, "moe.num_experts", default=8, alias="num_experts"),
        ConfigField("num_experts_per_tok", of.top_k, "moe.top_k", default=2),
        ConfigField(
            "sliding_window", model.attention.window, "attention.window", default=None, nullable=True
        ),
    ]


MISTRAL = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=NORMS | ATTENTION | DENSE,
    config_fields=_dense,
)
MIXTRAL = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=NORMS
    | ATTENTION
    | {"moe.router": "block_sparse_moe.gate"}
    | {f"moe.experts.{ours}": TensorSlot(f"{_EXPERT}.{ours}.weight") for ours in ("w1", "w2", "w3")},
    config_fields=_mixture,
    requires={"moe.normalize_scores": True},
    is_mixture=True,
    kept=("ffn_hidden_dim",),  # all blocks have experts
    assumed=lambda model: {"ffn_hidden_dim": model.moe.hidden_dim},
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
    written=lambda model: {"router_aux_loss_coef": model.moe.aux_loss_coeff},
    theta=1000000.0,
)
