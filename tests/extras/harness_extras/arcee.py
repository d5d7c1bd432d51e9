"""A family: Arcee's models at Hugging Face; fields as in transformers' models/arcee."""

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    NORMS,
    ConfigField,
    Family,
    attention_biases,
    both_biases,
    common,
    dividing_heads,
    head_width,
)


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    return [
        *(each for each in common(model, head_dim=head_width) if each.theirs != "hidden_act"),
        ConfigField("hidden_act", "relu2", default="relu2"),
        ConfigField("intermediate_size", model.ffn_hidden_dim, "ffn_hidden_dim", default=18432),
        *attention_biases(model),
        ConfigField("mlp_bias", False, default=False),
    ]


ARCEE = Family(
    name="arcee",
    model_type="arcee",
    architecture="ArceeForCausalLM",
    names=NORMS
    | ATTENTION
    | {"feed_forward.w1": "mlp.up_proj", "feed_forward.w2": "mlp.down_proj"},
    config_fields=_config_fields,
    requires={"block": "relu2"},
    refuse=both_biases,
    unbuildable=dividing_heads,
    # transformers' defaults lie outside of a small vocabulary.
    written=lambda _: {"bos_token_id": None, "eos_token_id": None},
)
