"""GLM 4 and 4.5; fields as transformers' models/glm4 and glm4_moe have them."""

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    NORMS,
    ConfigField,
    Family,
    common,
    fused_gate,
    head_width,
    same_fields,
)
from harness.weights.families.deepseek import (
    BALANCE_BIAS,
    DENSE_LAYERS,
    MOE_NAMES,
    mixture_fields,
    refuse_unbalanced,
)

_BIAS = {"attention_bias": "attention.qkv_bias"}
_WIDTH = {"intermediate_size": "ffn_hidden_dim"}


def _glm4(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=128, num_key_value_heads=2),
        *same_fields(model, {**_BIAS, **_WIDTH}, attention_bias=True),
    ]


def _glm4_moe(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width, num_key_value_heads=8),
        *same_fields(model, {**_BIAS, **_WIDTH}, attention_bias=False),
        ConfigField(
            "use_qk_norm",
            model.attention.qk_norm == "learned",
            "attention.qk_norm",
            default=False,
            to_ours=lambda normed, _: "learned" if normed else "none",
        ),
        *mixture_fields(model),
        *same_fields(model, DENSE_LAYERS, first_k_dense_replace=1),
        *same_fields(model, {"norm_topk_prob": "moe.normalize_scores"}, norm_topk_prob=True),
    ]


GLM4 = Family(
    name="glm4",
    model_type="glm4",
    architecture="Glm4ForCausalLM",
    names=NORMS
    | ATTENTION
    | DENSE
    | {
        "attention_post_norm": "post_self_attn_layernorm",
        "ffn_post_norm": "post_mlp_layernorm",
    },
    slots=fused_gate,
    config_fields=_glm4,
    requires={"norm_position": "around", "rope.interleaved": True},
    written=lambda _: {
        "pad_token_id": None
    },  # transformers' default lies outside a small vocabulary
    rotated_fraction=0.5,
)
GLM4_MOE = Family(
    name="glm4_moe",
    model_type="glm4_moe",
    architecture="Glm4MoeForCausalLM",
    names=NORMS | ATTENTION | HEAD_NORMS | DENSE | MOE_NAMES | BALANCE_BIAS,
    config_fields=_glm4_moe,
    requires={"moe.score": "sigmoid", "moe.group_score": "top2_sum"},
    is_mixture=True,
    kept=("moe.balance_coeff",),
    refuse=refuse_unbalanced,
    assumed=lambda _: {"moe.balance_coeff": 0.001},
    # The block of multi-token prediction, which transformers leaves out too.
    ignored=lambda model: (f"model.layers.{model.n_layers}.",),
    harmless=("num_nextn_predict_layers", "num_mtp_layers"),
    rotated_fraction=0.5,
)
