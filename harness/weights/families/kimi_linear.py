"""Kimi Linear: Kimi Delta Attention in most layers, latent attention without rotation in the others.

Fields are those of config.json at moonshotai, and of transformers' models/kimi_linear.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from harness.config.model import ModelConfig
from harness.util.errors import ConfigError
from harness.weights.families.core import (
    DENSE,
    NORMS,
    ConfigField,
    Family,
    Names,
    TensorSlot,
    common,
    fixed,
    layers_in,
    projections,
    same_fields,
    undetermined,
)
from harness.weights.families.deepseek import (
    DERIVED,
    LATENT_ATTENTION,
    WIDTHS,
    refuse_unbalanced,
    shared_experts,
)
from harness.weights.families.llama_like import BLOCK_SPARSE
from harness.weights.families.qwen3_next import KINDS, layer_kinds

_DELTA: Names = {
    "delta.wq": "self_attn.q_proj",
    "delta.wk": "self_attn.k_proj",
    "delta.wv": "self_attn.v_proj",
    "delta.wb": "self_attn.b_proj",
    "delta.wz_a": "self_attn.g_a_proj",
    "delta.wz": "self_attn.g_b_proj",
    "delta.wa_a": "self_attn.f_a_proj",
    "delta.wa": "self_attn.f_b_proj",
    "delta.conv_q": TensorSlot("self_attn.q_conv1d.weight"),
    "delta.conv_k": TensorSlot("self_attn.k_conv1d.weight"),
    "delta.conv_v": TensorSlot("self_attn.v_conv1d.weight"),
    "delta.a_log": TensorSlot("self_attn.A_log", ones=(2, 1)),
    "delta.dt_bias": TensorSlot("self_attn.dt_bias"),
    "delta.norm": "self_attn.o_norm",
    "delta.wo": "self_attn.o_proj",
}
_MIXTURE: Names = {
    **BLOCK_SPARSE,
    **projections("moe.shared_experts", "block_sparse_moe.shared_experts"),
    "moe.balance_bias": TensorSlot("block_sparse_moe.gate.e_score_correction_bias"),
}
_EXPERTS = {
    "num_experts": "moe.num_experts",
    "num_experts_per_token": "moe.top_k",
    "moe_intermediate_size": "moe.hidden_dim",
    "routed_scaling_factor": "moe.score_scale",
    "num_expert_group": "moe.num_groups",
    "topk_group": "moe.top_groups",
    "moe_renormalize": "moe.normalize_scores",
}
_VALUES = {
    "linear_num_heads": "delta.value_heads",
    "linear_head_dim": "delta.value_head_dim",
    "linear_conv_kernel_dim": "delta.kernel",
}
_KEYS = {"linear_num_heads": "delta.key_heads", "linear_head_dim": "delta.key_head_dim"}


def _in_released(name: str) -> Callable[[Mapping[str, Any]], object]:
    return lambda found: found["linear_attn_config"][name]


_DEFAULTS = {
    "linear_num_heads": _in_released("num_heads"),
    "linear_head_dim": _in_released("head_dim"),
    "linear_conv_kernel_dim": _in_released("short_conv_kernel_size"),
}


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    of = model.delta
    dense = model.moe.first_dense_layers
    layers = range(model.n_layers)
    feed_forwards = ["dense" if layer < dense else "sparse" for layer in layers]
    scans = {
        "num_heads": of.value_heads,
        "head_dim": of.value_head_dim,
        "short_conv_kernel_size": of.kernel,
        "kda_layers": [layer + 1 for layer in layers if model.is_delta(layer)],
        "full_attn_layers": [layer + 1 for layer in layers if not model.is_delta(layer)],
    }
    rank = model.attention.q_lora_rank
    return [
        *(
            replace(field, theirs="model_max_length") if field.ours == "max_seq_len" else field
            for field in common(model)
        ),
        *same_fields(model, {**WIDTHS, **_EXPERTS}),
        shared_experts(model, "num_shared_experts"),
        ConfigField("q_lora_rank", rank, "attention.q_lora_rank", default=None, nullable=True),
        # Released files have linear_attn_config and first_k_dense_replace, transformers writes the others.
        ConfigField("linear_attn_config", scans, "layer_kinds", scans, to_ours=undetermined),
        layer_kinds(model, _types),
        *same_fields(model, _VALUES, **_DEFAULTS),
        *same_fields(model, _KEYS, **_DEFAULTS),
        ConfigField(
            "first_k_dense_replace", dense, "moe.first_dense_layers", default=_dense_at_first
        ),
        ConfigField(
            "mlp_layer_types",
            feed_forwards,
            "moe.first_dense_layers",
            default=feed_forwards,
            to_ours=undetermined,
        ),
        fixed("mla_use_nope", True),
        fixed("moe_router_activation_func", "sigmoid"),
        fixed("topk_method", "noaux_tc"),
        fixed("moe_layer_freq", 1),
        fixed("attention_bias", False),
    ]


def _types(found: Mapping[str, Any]) -> list[str]:
    full = found["linear_attn_config"]["full_attn_layers"]
    return [KINDS["full" if layer + 1 in full else "delta"] for layer in layers_in(found)]


def _dense_at_first(found: Mapping[str, Any]) -> int:
    return list(found["mlp_layer_types"]).index("sparse")


def _refuse(model: ModelConfig) -> None:
    refuse_unbalanced(model)
    of = model.delta
    if of.key_head_dim != of.value_head_dim:
        rule = "checkpoints of this family have keys as wide as values"
        raise ConfigError("model.delta.key_head_dim", of.key_head_dim, rule, [of.value_head_dim])


KIMI_LINEAR = Family(
    name="kimi_linear",
    model_type="kimi_linear",
    architecture="KimiLinearForCausalLM",
    names=NORMS | DENSE | LATENT_ATTENTION | _DELTA | _MIXTURE,
    config_fields=_config_fields,
    requires={
        "attention.kind": "mla",
        "attention.nope_every_nth_layer": 1,
        "delta.decay": "channel",
        "moe.score": "sigmoid",
        "moe.group_score": "top2_sum",
    },
    is_mixture=True,
    kept=("moe.balance_coeff",),
    refuse=_refuse,
    assumed=lambda _: {"moe.balance_coeff": 0.001},
    written=lambda _: {"pad_token_id": None},  # its default is beyond smaller vocabularies
    harmless=(*DERIVED, "use_grouped_topk"),
)
