"""muP models in files of other software: transformers computes the same without multipliers."""

import pytest
import torch
from families_table import (
    PLAIN,
    batch,
    changed,
    close,
    random_model,
    set_fields,
    tensors_of,
    to_transformers,
)
from held import Held

from harness.util.errors import ConfigError
from harness.weights.huggingface import HuggingFaceSource
from harness.weights.source import folded, multipliers, unfolded

NARROW_HEADS = {"head_dim": 4}
CASES = {
    "untied": set_fields(PLAIN, mup__base_dim=16),
    "tied, other heads": set_fields(
        PLAIN,
        tied_embeddings=True,
        n_kv_heads=2,
        mup__base_dim=32,
        mup__base_widths={**NARROW_HEADS, "n_kv_heads": 1},
    ),
    "biases, other heads": changed("qwen2_debug", mup__base_dim=32, mup__base_widths=NARROW_HEADS),
    "normed queries, experts": changed(
        "qwen3_moe_debug", mup__base_dim=48, mup__base_widths={"head_dim": 4}
    ),
    "biased router": changed("gpt_oss_debug", mup__base_dim=32, mup__base_widths=NARROW_HEADS),
    "latents, experts": changed(
        "deepseek_v3_debug", mup__base_dim=32, mup__base_widths={"attention.qk_nope_head_dim": 4}
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_transformers_computes_the_same_logits(case, tmp_path):
    model = CASES[case]
    assert model.output_multiplier != 1
    decoder = random_model(model)
    theirs = to_transformers(decoder, tmp_path)
    tokens, _ = batch(model)
    with torch.no_grad():
        close(theirs(tokens).logits, decoder(tokens), 2e-5)
    # Read back for the same model, at once and in slices.
    source, ours = HuggingFaceSource(tmp_path, model), tensors_of(decoder)
    for name, tensor in ours.items():
        torch.testing.assert_close(source.read(name), tensor, rtol=1e-6, atol=0.0, msg=name)
        out = torch.empty_like(tensor[1:2])
        source.fill(name, out, [range(1, 2), *map(range, tensor.shape[1:])])
        torch.testing.assert_close(out, tensor[1:2], rtol=1e-6, atol=0.0, msg=name)


def test_multi_token_predictions_norm_has_the_multiplier_too():
    model = changed("deepseek_v3_debug", mtp__depth=1, mup__base_dim=16)
    found = multipliers(model)
    assert {name for name in found if "router" not in name} == {"norm.weight", "mtp.norm.weight"}
    assert set(found.values()) == {16 / 64}
    assert multipliers(PLAIN) == {}


def test_a_power_of_two_is_folded_exactly():
    decoder = random_model(CASES["untied"])
    source = Held(tensors_of(decoder))
    returned = unfolded(folded(source, decoder.config), decoder.config)
    assert all(returned.read(name).equal(tensor) for name, tensor in tensors_of(decoder).items())


def test_queries_without_weights_of_their_norm_are_refused():
    model = changed("llama4_debug", mup__base_dim=32, mup__base_widths=NARROW_HEADS)
    with pytest.raises(ConfigError, match="qk_norm=l2 removes the factor"):
        multipliers(model)
