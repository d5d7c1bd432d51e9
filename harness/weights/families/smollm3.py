"""SmolLM3; fields as transformers' models/smollm3 has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    ConfigField,
    Family,
    attention_biases,
    both_biases,
    common,
    dividing_heads,
    every_nth,
    head_width,
    layers_in,
)


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    attention = model.attention
    return [
        *common(model, head_dim=head_width, num_key_value_heads=4),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim"),
        ConfigField(
            "no_rope_layers",
            [int(attention.is_rotated(layer)) for layer in range(model.n_layers)],
            "attention.nope_every_nth_layer",
            default=_rotated_by_default,
            to_ours=lambda rotated, _: every_nth([not each for each in rotated]),
        ),
        *attention_biases(model),
        ConfigField("mlp_bias", False, default=False),
        ConfigField("use_sliding_window", False, default=False),
    ]


def _rotated_by_default(found: Mapping[str, Any]) -> list[int]:
    every = found.get("no_rope_layer_interval", 4)
    return [int((layer + 1) % every != 0) for layer in layers_in(found)]


SMOLLM3 = Family(
    name="smollm3",
    model_type="smollm3",
    architecture="SmolLM3ForCausalLM",
    names=NORMS | ATTENTION | DENSE,
    config_fields=_config_fields,
    harmless=("no_rope_layer_interval", "sliding_window", "max_window_layers"),
    refuse=both_biases,
    unbuildable=dividing_heads,
    # transformers' default lies outside a small vocabulary.
    written=lambda _: {"pad_token_id": None},
    theta=2000000.0,
)
