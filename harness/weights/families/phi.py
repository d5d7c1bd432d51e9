"""Phi 3 and 4; fields as transformers' models/phi3 has them."""

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    ConfigField,
    Family,
    Names,
    common,
    fixed,
    fused,
    fused_gate,
    head_width,
    same_fields,
    window_field,
)


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width),
        *same_fields(model, {"intermediate_size": "ffn_hidden_dim"}),
        window_field(model, None),
        fixed("attention_bias", False),
    ]


def _slots(model: ModelConfig) -> Names:
    keys = model.n_kv_heads * model.head_width
    widths = {
        "attention.wq": model.n_heads * model.head_width,
        "attention.wk": keys,
        "attention.wv": keys,
    }
    return fused("self_attn.qkv_proj", widths) | fused_gate(model)


PHI3 = Family(
    name="phi3",
    model_type="phi3",
    architecture="Phi3ForCausalLM",
    names=NORMS | ATTENTION | DENSE,
    slots=_slots,
    config_fields=_config_fields,
    written=lambda _: {
        "pad_token_id": None
    },  # transformers' default lies outside a small vocabulary
    rotated_fraction=1.0,
)
