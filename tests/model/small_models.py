"""Small Llamas, random weights for them, and comparisons, for tests of models and conversions."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from harness.config import with_value
from harness.model.attention_config import KINDS, QK_NORMS
from harness.model.config import ACTIVATIONS, ModelConfig
from harness.model.decoder import Decoder
from harness.model.moe_config import GROUP_SCORES, SCORES
from harness.model.rope_config import SCALINGS, RopeConfig
from harness.parallelism.materialize import materialize

# Sequences go past original_max_position, and there are wavelengths in every branch of the scaling.
STRETCHED = RopeConfig(
    theta=1000.0,
    scaling="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=32,
)
PLAIN = ModelConfig(
    name="small",
    vocab_size=96,
    dim=64,
    n_layers=3,
    n_heads=4,
    n_kv_heads=4,
    ffn_hidden_dim=112,
    max_seq_len=256,
    rope=RopeConfig(theta=10000.0),
)
VARIANTS = {
    "plain": PLAIN,
    "grouped_query": dataclasses.replace(PLAIN, n_kv_heads=2),
    "multi_query": dataclasses.replace(PLAIN, n_kv_heads=1),
    "tied": dataclasses.replace(PLAIN, tied_embeddings=True),
    "wide_heads": dataclasses.replace(PLAIN, head_dim=32),
    "narrow_heads": dataclasses.replace(PLAIN, head_dim=8, n_kv_heads=2),
    "large_eps": dataclasses.replace(PLAIN, norm_eps=0.1),
    "llama3_rope": dataclasses.replace(PLAIN, rope=STRETCHED),
    "everything": dataclasses.replace(
        PLAIN, n_kv_heads=2, head_dim=24, tied_embeddings=True, rope=STRETCHED, norm_eps=1e-3
    ),
}


def ours(config: ModelConfig, seq_len: int) -> Decoder:
    with torch.device("meta"):
        model = Decoder(config, seq_len)
    cpu = torch.device("cpu")
    materialize(model, seed=7, device=cpu, parameter_device=cpu)
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        # Weights far from their initial values: norms of one and logits of nothing would hide mistakes.
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
            elif name != "tok_embeddings.weight":
                parameter.mul_(3.0)
    return model


WORDS = {
    "activation": ACTIVATIONS,
    "scaling": SCALINGS,
    "kind": KINDS,
    "qk_norm": QK_NORMS,
    "score": SCORES,
    "group_score": GROUP_SCORES,
}


def with_another(config: ModelConfig, field: str) -> ModelConfig:
    """The same model but for one field, such as ``attention.sinks``; it need not be valid."""
    before = functools.reduce(getattr, field.split("."), config)
    value: object
    if isinstance(before, bool):
        value = not before
    elif isinstance(before, str):
        value = next(word for word in WORDS[field.split(".")[-1]] if word != before)
    else:
        value = 7 if before != 7 else 8
    return with_value(config, field, value)


def close(a: Tensor, b: Tensor, tolerance: float = 1e-5, name: str = "tensor") -> None:
    """Fail if the largest difference, relative to the largest value of ``b``, is above a tolerance."""
    assert a.shape == b.shape, f"{name}: {tuple(a.shape)} against {tuple(b.shape)}"
    difference, largest = (a - b).abs().max().item(), b.abs().max().item()
    assert difference <= tolerance * largest, (
        f"{name}: differs by {difference:.1e}; its largest value is {largest:.1e}"
    )
