"""Qwen 2 and 2.5, dense; fields as transformers' models/qwen2 has them."""

from __future__ import annotations

from harness.model.config import ModelConfig
from harness.model.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    Family,
    Says,
    common,
    dividing_heads,
    head_width,
)


def _says(model: ModelConfig) -> list[Says]:
    return [
        *common(model, head_dim=head_width, num_key_value_heads=32),
        Says("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim"),
        # Where it is true the first max_window_layers blocks see all positions, and those behind them do not.
        Says("use_sliding_window", False, default=False),
    ]


QWEN2 = Family(
    name="qwen2",
    model_type="qwen2",
    architecture="Qwen2ForCausalLM",
    names=NORMS | ATTENTION | DENSE,
    says=_says,
    requires={"attention.qkv_bias": True},
    unbuildable=dividing_heads,
)
