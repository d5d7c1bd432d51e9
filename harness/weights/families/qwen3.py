"""Qwen 3, dense and with experts; fields as in transformers' models/qwen3 and models/qwen3_moe."""

from __future__ import annotations

from typing import Any

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    ConfigField,
    Family,
    attention_biases,
    both_biases,
    common,
    head_width,
    per_expert,
)

_NAMES = (
    NORMS
    | ATTENTION
    | DENSE
    | {"attention.q_norm": "self_attn.q_norm", "attention.k_norm": "self_attn.k_norm"}
)


def _shared(model: ModelConfig, head_dim: object) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_dim),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim"),
        *attention_biases(model),
        ConfigField("use_sliding_window", False, default=False),
    ]


def _mixture(model: ModelConfig) -> list[ConfigField]:
    of = model.moe
    return [
        *_shared(model, head_dim=head_width),
        ConfigField("num_experts", of.num_experts, "moe.num_experts", alias="num_local_experts"),
        ConfigField("num_experts_per_tok", of.top_k, "moe.top_k"),
        ConfigField("moe_intermediate_size", of.hidden_dim, "moe.hidden_dim"),
        ConfigField("norm_topk_prob", of.normalize_scores, "moe.normalize_scores", default=False),
        ConfigField("decoder_sparse_step", of.every_nth_layer, "moe.every_nth_layer", default=1),
        ConfigField(
            "mlp_only_layers",
            list(range(of.first_dense_layers)),
            "moe.first_dense_layers",
            shown=of.first_dense_layers,
            default=[],
            to_ours=_dense_at_first,
        ),
    ]


def _dense_at_first(layers: Any, _found: object) -> int:
    if list(layers) != list(range(len(layers))):
        raise ValueError("not the first layers")
    return len(layers)


QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=_NAMES,
    config_fields=lambda model: _shared(model, head_dim=128),
    requires={"attention.qk_norm": "learned"},
    refuse=both_biases,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=_NAMES | {"moe.router": "mlp.gate"} | per_expert("mlp.experts"),
    config_fields=_mixture,
    requires={"attention.qk_norm": "learned"},
    refuse=both_biases,
    is_mixture=True,
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
    written=lambda model: {"router_aux_loss_coef": model.moe.aux_loss_coeff},
)
