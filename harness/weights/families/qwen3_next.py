"""Qwen3-Next: Gated DeltaNet in three of four layers; fields as transformers' models/qwen3_next has them."""

from collections.abc import Mapping, Sequence
from typing import Any

from harness.config.model import ModelConfig
from harness.weights.families.core import (
    ATTENTION,
    DENSE,
    NORMS,
    PER_EXPERT,
    ConfigField,
    Family,
    Names,
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

_KINDS = {"full": "full_attention", "delta": "linear_attention"}
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


def _config_fields(model: ModelConfig) -> list[ConfigField]:
    kinds = ["delta" if model.is_delta(layer) else "full" for layer in range(model.n_layers)]
    shared = {
        "intermediate_size": "ffn_hidden_dim",
        "shared_expert_intermediate_size": "moe.shared_hidden_dim",
    }
    return [
        *common(model, head_dim=256),
        *attention_biases(model),
        *same_fields(model, shared, shared_expert_intermediate_size=512),
        *same_fields(model, _DELTA, **_DELTA_DEFAULTS),
        ConfigField(
            "layer_types",
            [_KINDS[kind] for kind in kinds],
            "layer_kinds",
            default=_types_by_interval,
            to_ours=lambda types, _: _pattern(types),
        ),
        *mixture_fields(model, norm_topk_prob=True),
    ]


def _types_by_interval(found: Mapping[str, Any]) -> list[str]:
    every = found.get("full_attention_interval", 4)
    kinds = ["delta" if (layer + 1) % every else "full" for layer in layers_in(found)]
    return [_KINDS[kind] for kind in kinds]


def _pattern(types: Sequence[str]) -> list[str]:
    """The shortest pattern that repeats to these types of layers."""
    ours = {theirs: kind for kind, theirs in _KINDS.items()}
    kinds = [ours[each] for each in types]
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if kinds == [kinds[i % n] for i in range(len(kinds))])
    return kinds[:length]


def _slots(model: ModelConfig) -> Names:
    """Projections are fused, head by head, and convolutions one after another."""
    of = model.delta
    values_of_key = of.value_heads // max(of.key_heads, 1)
    names: Names = {}

    def fuse(theirs: str, widths: Mapping[str, int]) -> None:
        first = 0
        for ours, length in widths.items():
            names[ours] = TensorSlot(theirs, rows=Rows(first, length, sum(widths.values())))
            first += length

    head = model.head_width
    fuse("self_attn.q_proj", {"attention.wq": head, "attention.wg": head})
    values = values_of_key * of.value_head_dim
    widths = {"wq": of.key_head_dim, "wk": of.key_head_dim, "wv": values, "wz": values}
    fuse("linear_attn.in_proj_qkvz", {f"delta.{name}": width for name, width in widths.items()})
    fuse("linear_attn.in_proj_ba", {"delta.wb": values_of_key, "delta.wa": values_of_key})
    widths = {"q": of.key_width, "k": of.key_width, "v": of.value_width}
    convolutions = {f"delta.conv_{name}": width for name, width in widths.items()}
    fuse("linear_attn.conv1d.weight", convolutions)
    return names


QWEN3_NEXT = Family(
    name="qwen3_next",
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    names=NORMS
    | ATTENTION
    | DENSE
    | PER_EXPERT
    | projections("moe.shared_experts", "mlp.shared_expert")
    | {
        "attention.q_norm": "self_attn.q_norm",
        "attention.k_norm": "self_attn.k_norm",
        "delta.norm": "linear_attn.norm",
        "delta.wo": "linear_attn.out_proj",
        "delta.a_log": TensorSlot("linear_attn.A_log"),
        "delta.dt_bias": TensorSlot("linear_attn.dt_bias"),
        "moe.router": "mlp.gate",
        "moe.shared_experts.gate": "mlp.shared_expert_gate",
    },
    slots=_slots,
    config_fields=_config_fields,
    requires={
        "attention.qk_norm": "learned",
        "attention.output_gate": True,
        "norm_zero_centred": True,
        "moe.shared_gate": True,
    },
    refuse=both_biases,
    is_mixture=True,
    rotated_fraction=0.25,
    # layer_types follow from it, if they are not there.
    harmless=("full_attention_interval", "use_sliding_window"),
    # Of multi-token prediction, which transformers does not load either.
    ignored=lambda _: ("mtp.",),
    trained={"router_aux_loss_coef": "moe.aux_loss_coeff"},
)
