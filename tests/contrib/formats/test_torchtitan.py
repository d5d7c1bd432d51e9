"""Checkpoints for torchtitan against its Llama's mathematics, which rotates interleaved pairs."""

import dataclasses

import pytest
import torch
import torch.distributed.checkpoint as dcp
from equal import assert_equal
from families_table import LLAMAS, close
from held import Held
from test_meta import CONFIGS, meta_logits, meta_weights

from harness.config.fields import with_value
from harness.config.model import AttentionConfig
from harness.contrib.formats.torchtitan import (
    Torchtitan,
    name_of,
    read_torchtitan,
    torchtitan_arguments,
)
from harness.model.architecture import resolve_model
from harness.model.decoder import Decoder
from harness.util.errors import ConfigError
from harness.weights.dcp import write_distributed


def loaded(folder, source):
    """What torchtitan loads: a state dict of its own names, with no reader of ours."""
    state = {name: torch.empty(facts.shape) for name, facts in source.tensors.items()}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state


@pytest.mark.parametrize("name", ["llama2", "grouped_query", "llama31"])
def test_its_llama_computes_what_ours_does(name, tmp_path):
    config = CONFIGS[name]
    ours = meta_weights(config)  # in our order here
    source = Torchtitan(Held(ours), config)
    write_distributed(source, tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    state = loaded(tmp_path, source)
    assert {"lm_head.weight", "layers.0.attention.qkv_linear.wq.weight"} < set(state), (
        "names of 0.3.0"
    )
    state = {name: state[name_of(name)] for name in ours}
    model = Decoder(config, seq_len=48)
    model.load_state_dict(ours)
    tokens = torch.randint(config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        close(model(tokens), meta_logits(state, tokens, config))
        # Our own rows in its rotation are another model.
        wrong = meta_logits(ours, tokens, config)
        assert (model(tokens) - wrong).abs().max() > 0.1 * wrong.abs().max()
    write_distributed(Held(state), tmp_path / "earlier")  # before 0.3.0 they had our names
    for folder in (tmp_path, tmp_path / "earlier"):
        again = read_torchtitan(str(folder), config)
        assert_equal({name: again.read(name) for name in ours}, ours)


def test_a_tied_table_stands_under_both_names(tmp_path):
    config = resolve_model(dataclasses.replace(LLAMAS["llama"], tied_embeddings=True))
    ours = meta_weights(config)
    source = Torchtitan(Held(ours), config)
    write_distributed(source, tmp_path)
    assert_equal(loaded(tmp_path, source)["lm_head.weight"], ours["tok_embeddings.weight"])
    again = read_torchtitan(str(tmp_path), config)
    assert_equal(again.read("tok_embeddings.weight"), ours["tok_embeddings.weight"])


def test_rows_of_qwen3_stay_where_they_are():
    config = resolve_model(dataclasses.replace(LLAMAS["llama"], family="qwen3"))
    config = with_value(config, "attention.qk_norm", "learned")
    ours = meta_weights(config)
    source = Torchtitan(Held(ours), config)
    assert_equal({name: source.read(name_of(name)) for name in ours}, ours)


def test_arguments_say_what_is_stretched():
    assert torchtitan_arguments(CONFIGS["llama2"]) == "theta=10000, eps=1e-05"
    stretched = torchtitan_arguments(CONFIGS["llama31"])
    assert 'scaling="llama", scaling_factor=8, low_freq_factor=1, high_freq_factor=4' in stretched


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("llama2", {"family": "deepseek_v3"}, "convert.format=torchtitan: only dense models"),
        (
            "llama2",
            {"attention": AttentionConfig(qkv_bias=True, output_bias=True)},
            "convert.format=torchtitan: torchtitan's attention",
        ),
        ("wide_heads", {}, "model.head_dim=24: torchtitan's Llama has heads of width"),
        (
            "llama2",
            {"rope": dataclasses.replace(CONFIGS["llama2"].rope, scaling="yarn")},
            "model.rope.scaling=yarn: torchtitan's llama has no such scaling; would work: none, llama3",
        ),
    ],
    ids=range(4),
)
def test_models_that_it_does_not_have(name, changed, says):
    config = dataclasses.replace(CONFIGS[name], **changed)
    with pytest.raises(ConfigError) as caught:
        Torchtitan(Held(meta_weights(config)), config)
    assert str(caught.value).startswith(says)
