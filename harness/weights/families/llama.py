"""Llama 2 and 3; fields as in transformers' models/llama (4.56 to 5.x)."""

from __future__ import annotations

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
    head_width,
)

# LlamaConfig's defaults.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=lambda found: head_width({**_DEFAULTS, **found}), **_DEFAULTS),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim", default=11008),
        *attention_biases(model),
        ConfigField("mlp_bias", False, default=False),
    ]


LLAMA = Family(
    name="llama",
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=NORMS | ATTENTION | DENSE,
    config_fields=_config_fields,
    refuse=both_biases,
    unbuildable=dividing_heads,
)
