"""Qwen 2 and 2.5, dense; fields as in transformers' models/qwen2."""

from __future__ import annotations

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    ConfigField,
    Family,
    common,
    dividing_heads,
    head_width,
)


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    return [
        *common(model, head_dim=head_width, num_key_value_heads=32),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim"),
        # If true, the blocks after the first max_window_layers attend within a window.
        ConfigField("use_sliding_window", False, default=False),
    ]


QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=NORMS | ATTENTION | DENSE,
    config_fields=_config_fields,
    requires={"attention.qkv_bias": True},
    unbuildable=dividing_heads,
)
