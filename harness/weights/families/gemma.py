"""Gemma 2, and 3's text model; fields as transformers' models/gemma2 and gemma3 have them.

Files of Gemma 3, of all sizes but 1B, also have a vision encoder, whose tensors are ignored.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

from harness.config.model import ModelConfig
from harness.util.errors import ConfigError
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    ConfigField,
    Family,
    Nested,
    attention_biases,
    both_biases,
    common,
    fixed,
    global_layers,
    layer_types,
    own_local_rotation,
    same_fields,
    window_field,
)

_ACTIVATION = "gelu_pytorch_tanh"
_NAMES = (
    ATTENTION
    | DENSE
    | {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
)
_REQUIRES = {"norm_position": "around", "norm_zero_centred": True, "activation": "geglu_tanh"}
# Gemma3TextConfig's defaults, of which Gemma2Config has most.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}


def _gemma(
    model: ModelConfig,
    layers: Callable[[Mapping[str, Any]], list[str]],
    caps: tuple[float | None, float | None],
    **defaults: object,
) -> list[ConfigField]:
    """Fields of both; ``caps``: defaults of the caps of scores and of logits."""
    return [
        *common(model, head_dim=256, activation=_ACTIVATION, **{**_DEFAULTS, **defaults}),
        *same_fields(model, {"intermediate_size": "ffn_hidden_dim"}, intermediate_size=9216),
        fixed("hidden_activation", _ACTIVATION),
        ConfigField(
            "query_pre_attn_scalar",
            round(_scale(model) ** -2),
            "attention.scale",
            default=256,
            to_ours=lambda width, _: width**-0.5,
        ),
        window_field(model, 4096),
        layer_types(model, "sliding_attention", "sliding_window", layers),
        *attention_biases(model),
        ConfigField(
            "attn_logit_softcapping",
            model.attention.score_cap,
            "attention.score_cap",
            default=caps[0],
            nullable=True,
        ),
        ConfigField(
            "final_logit_softcapping",
            model.logits_cap,
            "logits_cap",
            default=caps[1],
            nullable=True,
        ),
        fixed("use_bidirectional_attention", False),
    ]


def _gemma2(model: ModelConfig) -> list[ConfigField]:
    sizes = {"vocab_size": 256000, "max_position_embeddings": 8192}
    return _gemma(model, lambda found: global_layers(found, 2), (50.0, 30.0), **sizes)


def _gemma3(model: ModelConfig) -> list[ConfigField]:
    return _gemma(model, _gemma3_layers, (None, None))


def _gemma3_layers(found: Mapping[str, Any]) -> list[str]:
    return global_layers(found, found.get("sliding_window_pattern") or 6)


def _scale(model: ModelConfig) -> float:
    return model.attention.scale or model.head_width**-0.5


def _checked_scales(model: ModelConfig) -> None:
    """Check that scores are divided by the root of an integer, and embeddings have the root of dim."""
    whole = round(_scale(model) ** -2) ** -0.5
    if not math.isclose(_scale(model), whole, rel_tol=1e-6):
        rule = "checkpoints of this family divide scores by the root of an integer"
        raise ConfigError("model.attention.scale", model.attention.scale, rule, [whole])
    root = math.sqrt(model.dim)
    if not math.isclose(model.embedding_multiplier, root, rel_tol=1e-6):
        rule = "checkpoints of this family have embeddings times the root of model.dim"
        raise ConfigError("model.embedding_multiplier", model.embedding_multiplier, rule, [root])


def _refuse_gemma2(model: ModelConfig) -> None:
    both_biases(model)
    _checked_scales(model)


def _refuse_gemma3(model: ModelConfig) -> None:
    _refuse_gemma2(model)
    own_local_rotation(model)


GEMMA2 = Family(
    name="gemma2",
    model_type="gemma2",
    architecture="Gemma2ForCausalLM",
    names=_NAMES,
    config_fields=_gemma2,
    requires=_REQUIRES,
    kept=("embedding_multiplier",),
    refuse=_refuse_gemma2,
    written=lambda _: {"pad_token_id": None},
    harmless=("sliding_window_size",),
    assumed=lambda model: {"embedding_multiplier": math.sqrt(model.dim)},
)
GEMMA3 = Family(
    name="gemma3",
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=_NAMES | HEAD_NORMS,
    config_fields=_gemma3,
    requires={**_REQUIRES, "attention.qk_norm": "learned"},
    kept=("embedding_multiplier",),
    refuse=_refuse_gemma3,
    written=lambda _: {"pad_token_id": None},
    harmless=("sliding_window_pattern",),
    assumed=lambda model: {"embedding_multiplier": math.sqrt(model.dim)},
    theta=1000000.0,
    local_theta=10000.0,
    nested=Nested(
        "gemma3", "text_config", "language_model.", ("vision_tower.", "multi_modal_projector.")
    ),
)
