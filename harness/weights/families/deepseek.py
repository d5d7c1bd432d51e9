"""DeepSeek V2 and V3.

Fields are those of config.json at deepseek-ai, and of transformers' models/deepseek_v2 and deepseek_v3.
"""

from __future__ import annotations

from harness.config.model import ModelConfig
from harness.util.errors import ConfigError
from harness.weights.families.core import (
    DENSE,
    NORMS,
    ConfigField,
    Family,
    TensorSlot,
    common,
    dividing_heads,
    per_expert,
    projections,
    undetermined,
)

_NAMES = (
    NORMS
    | DENSE
    | {
        "attention.wq": "self_attn.q_proj",
        "attention.wq_a": "self_attn.q_a_proj",
        "attention.q_norm": "self_attn.q_a_layernorm",
        "attention.wq_b": "self_attn.q_b_proj",
        "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
        "attention.kv_norm": "self_attn.kv_a_layernorm",
        "attention.wkv_b": "self_attn.kv_b_proj",
        "attention.wo": "self_attn.o_proj",
        "moe.router": "mlp.gate",
    }
    | projections("moe.shared_experts", "mlp.shared_experts")
    | per_expert("mlp.experts")
)


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    attention = model.attention
    of = model.moe
    return [
        *common(model),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim"),
        ConfigField(
            "q_lora_rank", attention.q_lora_rank, "attention.q_lora_rank", default=1536, nullable=True
        ),
        ConfigField("kv_lora_rank", attention.kv_lora_rank, "attention.kv_lora_rank"),
        ConfigField("qk_nope_head_dim", attention.qk_nope_head_dim, "attention.qk_nope_head_dim"),
        ConfigField("qk_rope_head_dim", attention.qk_rope_head_dim, "attention.qk_rope_head_dim"),
        ConfigField("v_head_dim", attention.v_head_dim, "attention.v_head_dim"),
        ConfigField("attention_bias", False, default=False),
        ConfigField("n_routed_experts", of.num_experts, "moe.num_experts"),
        ConfigField("num_experts_per_tok", of.top_k, "moe.top_k"),
        ConfigField("moe_intermediate_size", of.hidden_dim, "moe.hidden_dim"),
        ConfigField(
            "n_shared_experts",
            of.shared_hidden_dim // max(of.hidden_dim, 1),
            "moe.shared_hidden_dim",
            shown=of.shared_hidden_dim,
            to_ours=lambda experts, found: experts * found["moe_intermediate_size"],
        ),
        ConfigField("routed_scaling_factor", of.score_scale, "moe.score_scale", default=1.0),
        ConfigField("n_group", of.num_groups, "moe.num_groups", default=1),
        ConfigField("topk_group", of.top_groups, "moe.top_groups", default=1),
        ConfigField("moe_layer_freq", 1, default=1),
    ]


def _v2(model: ModelConfig) -> list[ConfigField]:
    of = model.moe
    method = "greedy" if of.num_groups == 1 else "group_limited_greedy"
    return [
        *_config_fields(model),
        ConfigField("first_k_dense_replace", of.first_dense_layers, "moe.first_dense_layers", default=0),
        ConfigField(
            "topk_method",
            method,
            "moe.num_groups",
            shown=of.num_groups,
            default="greedy",
            to_ours=undetermined,
        ),
        ConfigField("scoring_func", "softmax", default="softmax"),
        # If true, DeepSeek's code normalizes instead of scaling; transformers' never does.
        ConfigField("norm_topk_prob", False, default=False),
        ConfigField("mlp_bias", False, default=False),
    ]


def _v3(model: ModelConfig) -> list[ConfigField]:
    of = model.moe
    return [
        *_config_fields(model),
        ConfigField("first_k_dense_replace", of.first_dense_layers, "moe.first_dense_layers", default=3),
        ConfigField("norm_topk_prob", of.normalize_scores, "moe.normalize_scores", default=True),
        ConfigField("topk_method", "noaux_tc", default="noaux_tc"),
        ConfigField("scoring_func", "sigmoid", default="sigmoid"),
        # Blocks of multi-token prediction that the model does not have are ignored, as by transformers.
        ConfigField(
            "num_nextn_predict_layers",
            model.mtp.depth,
            "mtp.depth",
            default=0,
            read=lambda found: min(found, model.mtp.depth),
            to_ours=undetermined,
        ),
        ConfigField("rope_interleave", model.rope.interleaved, "rope.interleaved", default=True),
    ]


def _refuse_v2(model: ModelConfig) -> None:
    of = model.moe
    if of.shared_hidden_dim < 1 or of.shared_hidden_dim % of.hidden_dim:
        rule = f"checkpoints of this family count shared experts of model.moe.hidden_dim={of.hidden_dim}"
        works = f"{of.hidden_dim}, or a multiple of it"
        raise ConfigError("model.moe.shared_hidden_dim", of.shared_hidden_dim, rule, works)


def _refuse_v3(model: ModelConfig) -> None:
    _refuse_v2(model)
    if not model.moe.balance_coeff:
        rule = "checkpoints of model.family=deepseek_v3 have balancing biases, without it there are none"
        raise ConfigError("model.moe.balance_coeff", model.moe.balance_coeff, rule, "0.001")


_TRAINED = {"aux_loss_alpha": "moe.aux_loss_coeff"}
_DERIVED = ("head_dim", "qk_head_dim")  # transformers computes both from the widths above


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    harmless=_DERIVED,
    names=_NAMES,
    config_fields=_v2,
    requires={"attention.kind": "mla", "rope.interleaved": True},
    is_mixture=True,
    refuse=_refuse_v2,
    unbuildable=dividing_heads,
    written=lambda _: {"seq_aux": True},
    trained=_TRAINED,
)
DEEPSEEK_V3 = Family(
    name="deepseek_v3",
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    harmless=_DERIVED,
    names=_NAMES | {"moe.balance_bias": TensorSlot("mlp.gate.e_score_correction_bias")},
    config_fields=_v3,
    requires={"attention.kind": "mla", "moe.score": "sigmoid", "moe.group_score": "top2_sum"},
    is_mixture=True,
    kept=("moe.balance_coeff",),
    refuse=_refuse_v3,
    written=lambda _: {"seq_aux": True},
    trained=_TRAINED,
    assumed=lambda _: {"moe.balance_coeff": 0.001},
    ignored=lambda model: () if model.mtp.depth else (f"model.layers.{model.n_layers}.",),
    mtp={"embedding_norm": "enorm", "hidden_norm": "hnorm", "proj": "eh_proj", "norm": "shared_head.norm"},
    mtp_copies={"tok_embeddings.weight": "embed_tokens.weight", "output.weight": "shared_head.head.weight"},
)
