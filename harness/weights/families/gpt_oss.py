"""GPT-OSS; fields and tensors as in transformers' models/gpt_oss and config.json at openai.

Released weights of experts are in MXFP4, which ``harness.weights.hf_tensors`` dequantizes.
"""

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    NORMS,
    ConfigField,
    Family,
    TensorSlot,
    common,
    fixed,
    global_layers,
    layer_types,
    same_fields,
    window_field,
)

# As in harness.model.feed_forward.
_ALPHA = 1.702
_LIMIT = 7.0

_EXPERTS = {
    "w1": TensorSlot("mlp.experts.gate_up_proj", half=0, interleaved=True, transposed=True),
    "w3": TensorSlot("mlp.experts.gate_up_proj", half=1, interleaved=True, transposed=True),
    "w2": TensorSlot("mlp.experts.down_proj", transposed=True),
    "b1": TensorSlot("mlp.experts.gate_up_proj_bias", half=0, interleaved=True),
    "b3": TensorSlot("mlp.experts.gate_up_proj_bias", half=1, interleaved=True),
    "b2": TensorSlot("mlp.experts.down_proj_bias"),
}


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    moe = model.moe
    return [
        *common(model, head_dim=64),
        *same_fields(model, {"intermediate_size": "moe.hidden_dim"}),
        ConfigField("num_local_experts", moe.num_experts, "moe.num_experts", alias="num_experts"),
        ConfigField("num_experts_per_tok", moe.top_k, "moe.top_k", alias="experts_per_token"),
        window_field(model, 128),
        layer_types(
            model, "sliding_attention", "sliding_window", lambda found: global_layers(found, 2)
        ),
        fixed("attention_bias", True),
        fixed("swiglu_alpha", _ALPHA),
        fixed("swiglu_limit", _LIMIT),
    ]


GPT_OSS = Family(
    name="gpt_oss",
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    harmless=("initial_context_length",),
    names=NORMS
    | ATTENTION
    | {"attention.sinks": TensorSlot("self_attn.sinks"), "moe.router": "mlp.router"}
    | {f"moe.experts.{name}": slot for name, slot in _EXPERTS.items()},
    config_fields=_config_fields,
    requires={
        "activation": "swiglu_clamped",
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.sinks": True,
        "moe.normalize_scores": True,
        "moe.router_bias": True,
        "moe.expert_bias": True,
    },
    is_mixture=True,
    kept=("ffn_hidden_dim",),  # all blocks have experts
    assumed=lambda model: {"ffn_hidden_dim": model.moe.hidden_dim},
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
    theta=150000.0,
)
