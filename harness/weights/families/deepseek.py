"""DeepSeek V2 and V3.

Fields are those of config.json at deepseek-ai, and of transformers' models/deepseek_v2 and
deepseek_v3.
"""

from harness.config.model import ModelConfig
from harness.util.errors import ConfigError
from harness.weights.families.core import (
    DENSE,
    NORMS,
    PER_EXPERT,
    ConfigField,
    Family,
    Names,
    TensorSlot,
    common,
    dividing_heads,
    fixed,
    projections,
    same_fields,
    undetermined,
)

MOE_NAMES: Names = (
    {"moe.router": "mlp.gate"}
    | projections("moe.shared_experts", "mlp.shared_experts")
    | PER_EXPERT
)
BALANCE_BIAS: Names = {"moe.balance_bias": TensorSlot("mlp.gate.e_score_correction_bias")}
LATENT_ATTENTION: Names = {
    "attention.wq": "self_attn.q_proj",
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
    "attention.wo": "self_attn.o_proj",
}
_NAMES = NORMS | DENSE | MOE_NAMES | LATENT_ATTENTION


WIDTHS = {
    "intermediate_size": "ffn_hidden_dim",
    "kv_lora_rank": "attention.kv_lora_rank",
    "qk_nope_head_dim": "attention.qk_nope_head_dim",
    "qk_rope_head_dim": "attention.qk_rope_head_dim",
    "v_head_dim": "attention.v_head_dim",
}
MIXTURE = {
    "n_routed_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "moe_intermediate_size": "moe.hidden_dim",
    "routed_scaling_factor": "moe.score_scale",
    "n_group": "moe.num_groups",
    "topk_group": "moe.top_groups",
}
DENSE_LAYERS = {"first_k_dense_replace": "moe.first_dense_layers"}


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    rank = model.attention.q_lora_rank
    return [
        *common(model),
        ConfigField("q_lora_rank", rank, "attention.q_lora_rank", default=1536, nullable=True),
        *same_fields(model, WIDTHS),
        *mixture_fields(model),
        fixed("attention_bias", False),
        fixed("moe_layer_freq", 1),
    ]


def mixture_fields(model: ModelConfig) -> list[ConfigField]:
    """The fields of routed and shared experts."""
    return [
        *same_fields(model, MIXTURE, routed_scaling_factor=1.0, n_group=1, topk_group=1),
        shared_experts(model, "n_shared_experts"),
    ]


def shared_experts(model: ModelConfig, theirs: str) -> ConfigField:
    """The field that counts shared experts, each as wide as the others."""
    return ConfigField(
        theirs,
        model.moe.shared_hidden_dim // max(model.moe.hidden_dim, 1),
        "moe.shared_hidden_dim",
        to_ours=lambda experts, found: experts * found["moe_intermediate_size"],
    )


def _v2(model: ModelConfig) -> list[ConfigField]:
    groups = model.moe.num_groups
    method = "greedy" if groups == 1 else "group_limited_greedy"
    return [
        *_config_fields(model),
        *same_fields(model, DENSE_LAYERS, first_k_dense_replace=0),
        ConfigField(
            "topk_method",
            method,
            "moe.num_groups",
            default="greedy",
            to_ours=undetermined,
        ),
        fixed("scoring_func", "softmax"),
        # If true, DeepSeek's code normalizes instead of scaling; transformers' never does.
        fixed("norm_topk_prob", False),
        fixed("mlp_bias", False),
    ]


def _v3(model: ModelConfig) -> list[ConfigField]:
    names = {
        **DENSE_LAYERS,
        "norm_topk_prob": "moe.normalize_scores",
        "rope_interleave": "rope.interleaved",
    }
    return [
        *_config_fields(model),
        *same_fields(
            model, names, first_k_dense_replace=3, norm_topk_prob=True, rope_interleave=True
        ),
        fixed("topk_method", "noaux_tc"),
        fixed("scoring_func", "sigmoid"),
        # Blocks of multi-token prediction that the model does not have are ignored, as by
        # transformers.
        ConfigField(
            "num_nextn_predict_layers",
            model.mtp.depth,
            "mtp.depth",
            default=0,
            read=lambda found: min(found, model.mtp.depth),
            to_ours=undetermined,
        ),
    ]


def _refuse_v2(model: ModelConfig) -> None:
    shared = model.moe.shared_hidden_dim
    width = model.moe.hidden_dim
    if shared < 1 or shared % width:
        rule = f"checkpoints of this family count shared experts of model.moe.hidden_dim={width}"
        raise ConfigError(
            "model.moe.shared_hidden_dim", shared, rule, f"{width}, or a multiple of it"
        )


def refuse_unbalanced(model: ModelConfig) -> None:
    """Check that a mixture has balancing biases, and shared experts as wide as the others."""
    _refuse_v2(model)
    if not model.moe.balance_coeff:
        have = f"checkpoints of model.family={model.family} have balancing biases"
        rule = f"{have}, without it there are none"
        raise ConfigError("model.moe.balance_coeff", model.moe.balance_coeff, rule, "0.001")


_TRAINED = {"aux_loss_alpha": "moe.aux_loss_coeff"}
DERIVED = ("head_dim", "qk_head_dim")  # transformers computes both from the widths above


DEEPSEEK_V2 = Family(
    name="deepseek_v2",
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    harmless=DERIVED,
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
    harmless=DERIVED,
    names=_NAMES | BALANCE_BIAS,
    config_fields=_v3,
    requires={"attention.kind": "mla", "moe.score": "sigmoid", "moe.group_score": "top2_sum"},
    is_mixture=True,
    kept=("moe.balance_coeff",),
    refuse=refuse_unbalanced,
    written=lambda _: {"seq_aux": True},
    trained=_TRAINED,
    assumed=lambda _: {"moe.balance_coeff": 0.001},
    ignored=lambda model: () if model.mtp.depth else (f"model.layers.{model.n_layers}.",),
    mtp={
        "embedding_norm": "enorm",
        "hidden_norm": "hnorm",
        "proj": "eh_proj",
        "norm": "shared_head.norm",
    },
    mtp_copies={
        "tok_embeddings.weight": "embed_tokens.weight",
        "output.weight": "shared_head.head.weight",
    },
)
