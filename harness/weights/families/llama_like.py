"""Families with Llama's names of tensors: Llama 2 and 3, Mistral, Mixtral, Qwen 2, 2.5 and 3, Granite.

Fields are those of transformers' models/llama, mistral, mixtral, qwen2, qwen3, qwen3_moe and granite
(4.56 to 5.x).
"""

from typing import Any

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    NORMS,
    PER_EXPERT,
    ConfigField,
    Family,
    Names,
    TensorSlot,
    attention_biases,
    both_biases,
    common,
    dividing_heads,
    fixed,
    head_width,
    same_fields,
    window_field,
)

_TRAINED = {"router_aux_loss_coef": "moe.aux_loss_coeff"}  # of mixtures
_WINDOWS = ("sliding_window", "max_window_layers")  # of Qwen, while use_sliding_window is false
_NAMES = NORMS | ATTENTION | DENSE


_WIDTH = {"intermediate_size": "ffn_hidden_dim"}

# LlamaConfig's defaults.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def _llama(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=lambda found: head_width({**_DEFAULTS, **found}), **_DEFAULTS),
        *same_fields(model, _WIDTH, intermediate_size=11008),
        *attention_biases(model),
        fixed("mlp_bias", False),
    ]


LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=_NAMES,
    config_fields=_llama,
    refuse=both_biases,
    unbuildable=dividing_heads,
)


def _granite(model: ModelConfig) -> list[ConfigField]:
    scale = model.attention.scale or model.head_width**-0.5
    return [
        *_llama(model),
        ConfigField("attention_multiplier", scale, "attention.scale", default=1.0),
        *same_fields(
            model, {name: name for name in _MULTIPLIERS}, **dict.fromkeys(_MULTIPLIERS, 1.0)
        ),
    ]


_MULTIPLIERS = ("embedding_multiplier", "residual_multiplier", "logits_scaling")
GRANITE = Family(
    name="granite",
    model_type="granite",
    architecture="GraniteForCausalLM",
    names=_NAMES,
    config_fields=_granite,
    refuse=both_biases,
    unbuildable=dividing_heads,
)

_EXPERT = "block_sparse_moe.experts.{expert}"
BLOCK_SPARSE: Names = {
    "moe.router": "block_sparse_moe.gate",
    **{f"moe.experts.{w}": TensorSlot(f"{_EXPERT}.{w}.weight") for w in ("w1", "w2", "w3")},
}
"""Names of a mixture as Mixtral's files have them."""


def _mistral(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width, num_key_value_heads=8),
        *same_fields(model, _WIDTH),
        window_field(model, 4096),
    ]


def _mixtral(model: ModelConfig) -> list[ConfigField]:
    experts = model.moe.num_experts
    names = {"intermediate_size": "moe.hidden_dim", "num_experts_per_tok": "moe.top_k"}
    return [
        *common(model, head_dim=head_width, num_key_value_heads=8),
        *same_fields(model, names, num_experts_per_tok=2),
        ConfigField(
            "num_local_experts", experts, "moe.num_experts", default=8, alias="num_experts"
        ),
        window_field(model, None),
    ]


MISTRAL = Family(
    name="mistral",
    model_type="mistral",
    architecture="MistralForCausalLM",
    names=_NAMES,
    config_fields=_mistral,
)
MIXTRAL = Family(
    name="mixtral",
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=NORMS | ATTENTION | BLOCK_SPARSE,
    config_fields=_mixtral,
    requires={"moe.normalize_scores": True},
    is_mixture=True,
    kept=("ffn_hidden_dim",),  # all blocks have experts
    assumed=lambda model: {"ffn_hidden_dim": model.moe.hidden_dim},
    trained=_TRAINED,
    theta=1000000.0,
)


def _qwen2(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width, num_key_value_heads=32),
        *same_fields(model, _WIDTH),
        # If true, the blocks after the first max_window_layers attend within a window.
        fixed("use_sliding_window", False),
    ]


def _qwen3(model: ModelConfig, head_dim: object = 128) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_dim),
        *same_fields(model, _WIDTH),
        *attention_biases(model),
        fixed("use_sliding_window", False),
    ]


_QWEN3_EXPERTS = {
    "num_experts_per_tok": "moe.top_k",
    "moe_intermediate_size": "moe.hidden_dim",
    "norm_topk_prob": "moe.normalize_scores",
    "decoder_sparse_step": "moe.every_nth_layer",
}


def _qwen3_moe(model: ModelConfig) -> list[ConfigField]:
    return [*_qwen3(model, head_dim=head_width), *mixture_fields(model, norm_topk_prob=False)]


def mixture_fields(model: ModelConfig, *, norm_topk_prob: bool) -> list[ConfigField]:
    """Fields of the mixtures of Qwen 3 and later; ``norm_topk_prob`` is the default of that field."""
    moe = model.moe
    defaults = {"norm_topk_prob": norm_topk_prob, "decoder_sparse_step": 1}
    return [
        ConfigField("num_experts", moe.num_experts, "moe.num_experts", alias="num_local_experts"),
        *same_fields(model, _QWEN3_EXPERTS, **defaults),
        ConfigField(
            "mlp_only_layers",
            list(range(moe.first_dense_layers)),
            "moe.first_dense_layers",
            default=[],
            to_ours=_dense_at_first,
        ),
    ]


def _dense_at_first(layers: Any, _found: object) -> int:
    if list(layers) != list(range(len(layers))):
        raise ValueError("not the first layers")
    return len(layers)


_QWEN3_NAMES = _NAMES | HEAD_NORMS
QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    harmless=_WINDOWS,
    names=_NAMES,
    config_fields=_qwen2,
    requires={"attention.qkv_bias": True},
    unbuildable=dividing_heads,
)
QWEN3 = Family(
    name="qwen3",
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    harmless=_WINDOWS,
    names=_QWEN3_NAMES,
    config_fields=_qwen3,
    requires={"attention.qk_norm": "learned"},
    refuse=both_biases,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    harmless=_WINDOWS,
    names=_QWEN3_NAMES | {"moe.router": "mlp.gate"} | PER_EXPERT,
    config_fields=_qwen3_moe,
    requires={"attention.qk_norm": "learned"},
    refuse=both_biases,
    is_mixture=True,
    trained=_TRAINED,
)
