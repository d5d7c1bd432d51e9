"""Logits and gradients against transformers' Llama on small random weights, in float32."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F
from small_models import STRETCHED, VARIANTS, close, ours

from harness.model.config import ModelConfig
from harness.model.decoder import Decoder
from harness.model.rope import rope_table

transformers = pytest.importorskip("transformers")

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "attention_norm": "input_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "norm": "model.norm",
    "output": "lm_head",
}


def their_name(name: str) -> str:
    """The name of a parameter in transformers' model."""
    module = name.removesuffix(".weight")
    if module.startswith("layers."):
        _, layer, inner = module.split(".", 2)
        return f"model.layers.{layer}.{NAMES[inner]}.weight"
    return f"{NAMES[module]}.weight"


def theirs(config: ModelConfig, model: Decoder) -> torch.nn.Module:
    """transformers' model of the same numbers and weights, copied by name and without permutation."""
    scaling = {
        "rope_type": "llama3",
        "factor": config.rope.factor,
        "low_freq_factor": config.rope.low_freq_factor,
        "high_freq_factor": config.rope.high_freq_factor,
        "original_max_position_embeddings": config.rope.original_max_position,
    }
    built = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.dim,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            head_dim=config.head_width,
            intermediate_size=config.ffn_hidden_dim,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=config.tied_embeddings,
            max_position_embeddings=config.max_seq_len,
            rope_theta=config.rope.theta,
            rope_scaling=scaling if config.rope.scaling == "llama3" else None,
            attn_implementation="eager",
        )
    )
    named = {their_name(name): parameter.detach() for name, parameter in model.named_parameters()}
    assert set(named) == {name for name, _ in built.named_parameters()}
    missing, unexpected = built.load_state_dict(named, strict=False)
    assert not unexpected and set(missing) <= {"lm_head.weight"}
    return built.float().eval()


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_and_gradients(variant: str) -> None:
    config = VARIANTS[variant].resolve()
    config.validate()
    model = ours(config, seq_len=48)
    reference = theirs(config, model)
    tokens = torch.randint(config.vocab_size, (2, 49), generator=torch.Generator().manual_seed(1))
    inputs, labels = tokens[:, :-1], tokens[:, 1:]

    logits, their_logits = model(inputs), reference(inputs).logits
    assert their_logits.std() > 0.5
    close(logits, their_logits)

    F.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(their_logits.flatten(0, 1), labels.flatten()).backward()
    their_gradients = {name: parameter.grad for name, parameter in reference.named_parameters()}
    for name, parameter in model.named_parameters():
        gradient = their_gradients[their_name(name)]
        assert gradient is not None and gradient.abs().max() > 0
        assert parameter.grad is not None
        close(parameter.grad, gradient, tolerance=5e-5, name=name)


def test_the_variants_differ() -> None:
    """Each variant changes what is computed: an option that changed nothing would pass for another."""
    tokens = torch.randint(96, (1, 48), generator=torch.Generator().manual_seed(1))
    for first, second in (("plain", "llama3_rope"), ("plain", "large_eps")):
        made = []
        for variant in (first, second):
            config = VARIANTS[variant].resolve()
            made.append(ours(config, 48)(tokens))
        assert (made[0] - made[1]).abs().max() > 1e-2


def test_scaling_changes_long_wavelengths_only() -> None:
    """Below original_max_position / high_freq_factor all is left alone, above / low_freq_factor stretched."""
    plain = rope_table(dataclasses.replace(STRETCHED, scaling="none"), 32, seq_len=2)
    stretched = rope_table(STRETCHED, 32, seq_len=2)
    angles = [torch.atan2(table[1, 1], table[0, 1]) for table in (plain, stretched)]
    wavelengths = 2 * torch.pi / angles[0]
    short, long = wavelengths < 32 / 4, wavelengths > 32 / 1
    assert short.any() and long.any() and (~short & ~long).any()
    ratio = angles[0] / angles[1]
    torch.testing.assert_close(ratio[short], torch.ones(int(short.sum())))
    torch.testing.assert_close(ratio[long], torch.full((int(long.sum()),), 8.0), rtol=1e-4, atol=0)
    between = ratio[~short & ~long]
    assert ((between > 1) & (between < 8)).all()


def test_a_part_continues_where_the_other_ends() -> None:
    """Two halves of a model, each built alone, compute what the whole computes."""
    config = VARIANTS["grouped_query"].resolve()
    whole = ours(config, 16)
    tokens = torch.randint(96, (2, 16), generator=torch.Generator().manual_seed(1))
    halves = [["tok_embeddings", "layers.0"], ["layers.1", "layers.2", "norm", "output"]]
    x = tokens
    for modules in halves:
        part = Decoder(config, 16, modules)
        part.load_state_dict(
            {name: value for name, value in whole.state_dict().items() if name in part.state_dict()}
        )
        x = part(x)
    torch.testing.assert_close(x, whole(tokens), rtol=0, atol=0)


def test_no_position_sees_a_later_one() -> None:
    config = VARIANTS["grouped_query"].resolve()
    model = ours(config, 16)
    tokens = torch.randint(96, (1, 16), generator=torch.Generator().manual_seed(1))
    changed = tokens.clone()
    changed[0, 10] = (changed[0, 10] + 1) % 96
    difference = (model(tokens) - model(changed)).abs().amax(dim=-1)[0]
    assert difference[:10].max() == 0
    assert difference[10:].min() > 0
