"""Qwen3-Next and the text of Qwen 3.5: Gated DeltaNet in three of four layers.

Fields are those of transformers' models/qwen3_next, qwen3_5 and qwen3_5_moe. Experts of Qwen 3.5 are
stacked, as in the released files.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.config.model import DeltaConfig, ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    PER_EXPERT,
    ConfigField,
    Family,
    Names,
    Nested,
    Rows,
    TensorSlot,
    attention_biases,
    both_biases,
    common,
    layers_in,
    projections,
    same_fields,
)
from harness.weights.families.llama_like import mixture_fields

KINDS = {"full": "full_attention", "delta": "linear_attention"}
_DELTA = {
    "linear_num_key_heads": "delta.key_heads",
    "linear_num_value_heads": "delta.value_heads",
    "linear_key_head_dim": "delta.key_head_dim",
    "linear_value_head_dim": "delta.value_head_dim",
    "linear_conv_kernel_dim": "delta.kernel",
}
# Qwen3NextConfig's.
_DELTA_DEFAULTS = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def _hybrid(model: ModelConfig) -> list[ConfigField]:
    """Fields that all of them have."""
    return [
        *common(model, head_dim=256),
        *attention_biases(model),
        *same_fields(model, _DELTA, **_DELTA_DEFAULTS),
        layer_kinds(model, _types_by_interval),
    ]


def layer_kinds(
    model: ModelConfig, default: Callable[[Mapping[str, Any]], list[str]]
) -> ConfigField:
    """The field that lists which layers have attention, and which Gated DeltaNet."""
    kinds = ["delta" if model.is_delta(layer) else "full" for layer in range(model.n_layers)]
    return ConfigField(
        "layer_types",
        [KINDS[kind] for kind in kinds],
        "layer_kinds",
        default=default,
        to_ours=lambda types, _: _pattern(types),
    )


_DENSE_WIDTH = {"intermediate_size": "ffn_hidden_dim"}
_SHARED_WIDTH = {"shared_expert_intermediate_size": "moe.shared_hidden_dim"}


def _qwen3_next(model: ModelConfig) -> list[ConfigField]:
    return [
        *_hybrid(model),
        *same_fields(model, _DENSE_WIDTH),
        *same_fields(model, _SHARED_WIDTH, shared_expert_intermediate_size=512),
        *mixture_fields(model, norm_topk_prob=True),
    ]


def _qwen3_5(model: ModelConfig) -> list[ConfigField]:
    return [*_hybrid(model), *same_fields(model, _DENSE_WIDTH)]


_MIXTURE = {
    **_SHARED_WIDTH,
    "num_experts": "moe.num_experts",
    "num_experts_per_tok": "moe.top_k",
    "moe_intermediate_size": "moe.hidden_dim",
}
# Qwen3_5MoeTextConfig's.
_MIXTURE_DEFAULTS = {
    "shared_expert_intermediate_size": 512,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
}


def _qwen3_5_moe(model: ModelConfig) -> list[ConfigField]:
    return [*_hybrid(model), *same_fields(model, _MIXTURE, **_MIXTURE_DEFAULTS)]


def _types_by_interval(found: Mapping[str, Any]) -> list[str]:
    every = found.get("full_attention_interval", 4)
    kinds = ["delta" if (layer + 1) % every else "full" for layer in layers_in(found)]
    return [KINDS[kind] for kind in kinds]


def _pattern(types: Sequence[str]) -> list[str]:
    """The shortest pattern that repeats to these types of layers."""
    ours = {theirs: kind for kind, theirs in KINDS.items()}
    kinds = [ours[each] for each in types]
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if kinds == [kinds[i % n] for i in range(len(kinds))])
    return kinds[:length]


def _fused(theirs: str, widths: Mapping[str, int]) -> Names:
    """Places in a tensor that repeats so many rows of each of ours."""
    names: Names = {}
    first = 0
    for ours, length in widths.items():
        names[ours] = TensorSlot(theirs, rows=Rows(first, length, sum(widths.values())))
        first += length
    return names


def _streams(theirs: str, of: DeltaConfig, *ours: str) -> Names:
    """Places in a tensor that has those of queries, keys and values one after another."""
    widths = of.key_width, of.key_width, of.value_width
    return _fused(theirs, dict(zip(ours, widths, strict=True)))


def _slots_of_both(model: ModelConfig) -> Names:
    head = model.head_width
    convolutions = "delta.conv_q", "delta.conv_k", "delta.conv_v"
    return {
        **_fused("self_attn.q_proj", {"attention.wq": head, "attention.wg": head}),
        **_streams("linear_attn.conv1d.weight", model.delta, *convolutions),
    }


def _slots_by_head(model: ModelConfig) -> Names:
    """Qwen3-Next fuses projections head by head."""
    of = model.delta
    of_key = of.value_heads // max(of.key_heads, 1)
    values = of_key * of.value_head_dim
    widths = {
        "delta.wq": of.key_head_dim,
        "delta.wk": of.key_head_dim,
        "delta.wv": values,
        "delta.wz": values,
    }
    return {
        **_slots_of_both(model),
        **_fused("linear_attn.in_proj_qkvz", widths),
        **_fused("linear_attn.in_proj_ba", {"delta.wb": of_key, "delta.wa": of_key}),
    }


def _slots_by_stream(model: ModelConfig) -> Names:
    names = "delta.wq", "delta.wk", "delta.wv"
    return {
        **_slots_of_both(model),
        **_streams("linear_attn.in_proj_qkv", model.delta, *names),
    }


_NAMES: Names = {
    **NORMS,
    **ATTENTION,
    **DENSE,
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "delta.norm": "linear_attn.norm",
    "delta.wo": "linear_attn.out_proj",
    "delta.a_log": TensorSlot("linear_attn.A_log"),
    "delta.dt_bias": TensorSlot("linear_attn.dt_bias"),
}
_REQUIRES: dict[str, object] = {
    "attention.qk_norm": "learned",
    "attention.output_gate": True,
    "norm_zero_centred": True,
}
# layer_types follow from the first, if they are not there. transformers reads none of the others: layers of
# Gated DeltaNet compute in float32 here, and multi-token prediction is ignored.
_HARMLESS = (
    "full_attention_interval",
    "use_sliding_window",
    "mamba_ssm_dtype",
    "mtp_num_hidden_layers",
)


_ROUTED: Names = {
    **projections("moe.shared_experts", "mlp.shared_expert"),
    "moe.router": "mlp.gate",
    "moe.shared_experts.gate": "mlp.shared_expert_gate",
}
_BY_STREAM: Names = {
    **_NAMES,
    "delta.wz": "linear_attn.in_proj_z",
    "delta.wb": "linear_attn.in_proj_b",
    "delta.wa": "linear_attn.in_proj_a",
}
_FUSED = "mlp.experts.gate_up_proj"
_STACKED: Names = {
    "moe.experts.w1": TensorSlot(_FUSED, half=0, half_of=-2),
    "moe.experts.w3": TensorSlot(_FUSED, half=1, half_of=-2),
    "moe.experts.w2": TensorSlot("mlp.experts.down_proj"),
}


def _ignored(_model: ModelConfig) -> tuple[str, ...]:
    """Multi-token prediction, which transformers does not load either."""
    return ("mtp.",)


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=_NAMES | PER_EXPERT | _ROUTED,
    slots=_slots_by_head,
    config_fields=_qwen3_next,
    requires={**_REQUIRES, "moe.shared_gate": True},
    refuse=both_biases,
    is_mixture=True,
    rotated_fraction=0.25,
    harmless=_HARMLESS,
    ignored=_ignored,
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
)
QWEN3_5 = Family(
    name="qwen3_5",
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names=_BY_STREAM,
    slots=_slots_by_stream,
    config_fields=_qwen3_5,
    requires=_REQUIRES,
    refuse=both_biases,
    rotated_fraction=0.25,
    harmless=_HARMLESS,
    nested=Nested("qwen3_5", "text_config", "language_model.", ("model.visual.",)),
    ignored=_ignored,
)
QWEN3_5_MOE = Family(
    name="qwen3_5_moe",
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names=_BY_STREAM | _ROUTED | _STACKED,
    slots=_slots_by_stream,
    config_fields=_qwen3_5_moe,
    requires={**_REQUIRES, "moe.shared_gate": True, "moe.normalize_scores": True},
    refuse=both_biases,
    is_mixture=True,
    kept=("ffn_hidden_dim",),  # all blocks have experts
    assumed=lambda model: {"ffn_hidden_dim": model.moe.hidden_dim},
    rotated_fraction=0.25,
    harmless=_HARMLESS,
    nested=Nested("qwen3_5_moe", "text_config", "language_model.", ("model.visual.",)),
    ignored=_ignored,
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
)
