"""OLMo 2 and 3; fields as transformers' models/olmo2 and olmo3 have them."""

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    HEAD_NORMS,
    ConfigField,
    Family,
    attention_biases,
    both_biases,
    common,
    global_layers,
    head_width,
    layer_types,
    own_local_rotation,
    same_fields,
    window_field,
)

_NAMES = (
    ATTENTION
    | DENSE
    | HEAD_NORMS
    | {
        "attention_post_norm": "post_attention_layernorm",
        "ffn_post_norm": "post_feedforward_layernorm",
    }
)
_REQUIRES = {"norm_position": "after", "attention.qk_norm": "all_heads"}
_WRITTEN = {"pad_token_id": None}  # the default's row of the table would have no gradient


def _olmo2(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width, rms_norm_eps=1e-5),
        *same_fields(model, {"intermediate_size": "ffn_hidden_dim"}),
        *attention_biases(model),
    ]


def _olmo3(model: ModelConfig) -> list[ConfigField]:
    return [
        *_olmo2(model),
        window_field(model, 4096),
        layer_types(
            model, "sliding_attention", "sliding_window", lambda found: global_layers(found, 4)
        ),
    ]


def _refuse_olmo3(model: ModelConfig) -> None:
    both_biases(model)
    own_local_rotation(model)


OLMO2 = Family(
    name="olmo2",
    model_type="olmo2",
    architecture="Olmo2ForCausalLM",
    names=_NAMES,
    config_fields=_olmo2,
    requires=_REQUIRES,
    refuse=both_biases,
    written=lambda _: _WRITTEN,
)
OLMO3 = Family(
    name="olmo3",
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    names=_NAMES,
    config_fields=_olmo3,
    requires=_REQUIRES,
    refuse=_refuse_olmo3,
    written=lambda _: _WRITTEN,
    theta=500000.0,
    local_theta=500000.0,
)
