"""Llama 4, its text model; fields and tensors as in transformers' models/llama4.

Released files also have a vision encoder, whose tensors are ignored; those of the text model have a
prefix.
"""

from collections.abc import Mapping
from typing import Any

from harness.config.model import ModelConfig
from harness.util.errors import ConfigError
from harness.weights.families.core import (
    ATTENTION,
    NORMS,
    ConfigField,
    Family,
    Nested,
    TensorSlot,
    attention_biases,
    both_biases,
    common,
    every_nth,
    layer_types,
    layers_in,
    projections,
    same_fields,
)

_EXPERTS = {
    "w1": TensorSlot("feed_forward.experts.gate_up_proj", half=0, transposed=True),
    "w3": TensorSlot("feed_forward.experts.gate_up_proj", half=1, transposed=True),
    "w2": TensorSlot("feed_forward.experts.down_proj", transposed=True),
}


_SAME = {
    "intermediate_size": "moe.hidden_dim",
    "intermediate_size_mlp": "ffn_hidden_dim",
    "num_local_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
}
_TEMPERATURE = {
    "attn_scale": "attention.nope_temperature",
    "floor_scale": "attention.nope_temperature_floor",
}


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    attention = model.attention
    fields = [
        *common(model, head_dim=128),
        *same_fields(model, _SAME, intermediate_size_mlp=16384),
        ConfigField(
            "moe_layers",
            model.expert_layers,
            "moe.every_nth_layer",
            default=_moe_layers,
            to_ours=_every_nth_has_experts,
        ),
        ConfigField(
            "use_qk_norm",
            attention.qk_norm == "l2",
            "attention.qk_norm",
            default=True,
            to_ours=lambda normed, _: "l2" if normed else "none",
        ),
        ConfigField(
            "no_rope_layers",
            [int(attention.is_rotated(layer)) for layer in range(model.n_layers)],
            "attention.nope_every_nth_layer",
            default=_no_rope_layers,
            to_ours=lambda rotated, _: every_nth([not each for each in rotated]),
            # Released files have an empty list for the default.
            read=lambda layers: layers[: model.n_layers] or _default_no_rope_layers(model.n_layers),
        ),
        ConfigField(
            "attention_chunk_size", attention.chunk, "attention.chunk", default=8192, nullable=True
        ),
        layer_types(model, "chunked_attention", "attention_chunk_size", _default_layer_types),
        ConfigField(
            "attn_temperature_tuning",
            attention.nope_temperature > 0,
            "attention.nope_temperature",
            default=True,
            read=bool,  # released files have 4 for true
            to_ours=lambda tuned, found: found.get("attn_scale", 0.1) if tuned else 0.0,
        ),
        *attention_biases(model),
    ]
    if attention.nope_temperature:
        fields += same_fields(model, _TEMPERATURE, attn_scale=0.1, floor_scale=8192)
    return fields


def _every_nth_has_experts(layers: Any, found: Mapping[str, Any]) -> int:
    every = every_nth([layer in layers for layer in layers_in(found)])
    if every is None:
        raise ValueError("no layer has experts")
    return every


def _default_no_rope_layers(layers: int, every: int = 4) -> list[int]:
    return [int((layer + 1) % every != 0) for layer in range(layers)]


def _no_rope_layers(found: Mapping[str, Any]) -> list[int]:
    return _default_no_rope_layers(len(layers_in(found)), found.get("no_rope_layer_interval") or 4)


def _default_layer_types(found: Mapping[str, Any]) -> list[str]:
    rotated = found.get("no_rope_layers") or _no_rope_layers(found)
    return ["chunked_attention" if each else "full_attention" for each in rotated]


def _moe_layers(found: Mapping[str, Any]) -> list[int]:
    step = found.get("interleave_moe_layer_step") or 1
    return list(layers_in(found)[step - 1 :: step])


def _refuse(model: ModelConfig) -> None:
    both_biases(model)
    shared = model.moe.shared_hidden_dim
    width = model.moe.hidden_dim
    if shared != width:
        rule = f"shared experts of this family are as wide as others, model.moe.hidden_dim={width}"
        raise ConfigError("model.moe.shared_hidden_dim", shared, rule, [width])
    if model.attention.qk_norm == "learned":
        rule = "norms of this family have no weights"
        raise ConfigError("model.attention.qk_norm", "learned", rule, ["none", "l2"])


LLAMA4 = Family(
    name="llama4",
    model_type="llama4_text",
    architecture="Llama4ForCausalLM",
    harmless=("no_rope_layer_interval", "attn_scale", "floor_scale"),
    names=NORMS
    | ATTENTION
    | projections("feed_forward", "feed_forward")
    | projections("moe.shared_experts", "feed_forward.shared_expert")
    | {"moe.router": "feed_forward.router"}
    | {f"moe.experts.{name}": slot for name, slot in _EXPERTS.items()},
    config_fields=_config_fields,
    requires={"rope.interleaved": True, "moe.score": "sigmoid", "moe.score_before_experts": True},
    is_mixture=True,
    kept=("moe.shared_hidden_dim", "moe.first_dense_layers"),
    refuse=_refuse,
    written=lambda model: {"interleave_moe_layer_step": model.moe.every_nth_layer},
    theta=500000.0,
    assumed=lambda model: {"moe.shared_hidden_dim": model.moe.hidden_dim},
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
    nested=Nested(
        "llama4", "text_config", "language_model.", ("vision_model.", "multi_modal_projector.")
    ),
)
