"""Parameters and FLOPs against published figures, not against the code that counts them."""

import dataclasses
import math
from pathlib import Path

import pytest
import torch
import yaml
from families_table import MODELS, shipped

from harness.config.model import ModelConfig
from harness.model.accounting import account
from harness.model.decoder import Decoder
from harness.model.spec import parameter_shapes
from harness_flux.model import Flux

_LISTED = yaml.safe_load((Path(__file__).parent / "published_parameters.yaml").read_text())
# By name: all parameters, and those that a token meets.
PUBLISHED = {
    name: tuple(listed) if isinstance(listed, list) else (listed,) * 2
    for name, listed in _LISTED.items()
}
DEBUG = sorted(name for name in MODELS.keys() - PUBLISHED.keys() if name.endswith("_debug"))


def on_meta(config):
    with torch.device("meta"):
        return Flux(config, 1040) if config.architecture == "flux" else Decoder(config, seq_len=16)


def count(module):
    """Parameters of a module; one that is shared counts once."""
    return sum(parameter.numel() for parameter in module.parameters())


def test_published_parameters_has_every_model_but_debug_sizes():
    assert MODELS.keys() - {"llama3_tiny", *DEBUG} == PUBLISHED.keys()
    assert len(DEBUG) >= 9


@pytest.mark.parametrize("name", [*PUBLISHED, *DEBUG])
def test_parameters_and_those_that_a_token_meets(name):
    config = shipped(name)
    counted = account(config, seq_len=128)
    if name in PUBLISHED:
        assert (counted.parameters, counted.active_parameters) == PUBLISHED[name]
    else:
        assert counted.parameters < 2_000_000
    assert count(on_meta(config)) == counted.parameters
    assert (
        sum(math.prod(shape) for shape in parameter_shapes(config).values()) == counted.parameters
    )


def test_flops_of_a_mixture_by_hand():
    """gpt_oss_20b: of experts four count, of the tables one; half of the layers have a band of 128.

    MFU's convention has no bands: torchtitan's formula gives 31.314 GFLOP a token at 8,192.
    """
    config, seq_len = shipped("gpt_oss_20b"), 4096
    multiplied = PUBLISHED["gpt_oss_20b"][1] - 201088 * 2880
    per_position = 6 * 64 * (64 + 64)
    band = (128 * 129 / 2 + (seq_len - 128) * 128) / seq_len
    counted = account(config, seq_len)
    assert counted.flops_per_token_full == 6 * multiplied + per_position * 24 * seq_len
    assert account(config, 8192).flops_per_token_full == pytest.approx(31.314e9, abs=0.0005e9)
    assert counted.flops_per_token_causal == 6 * multiplied + per_position * (
        12 * seq_len / 2 + 12 * band
    )


def test_flops_of_chunks_by_hand():
    """llama4_scout: three of four layers have chunks of 8,192, which MFU's convention ignores."""
    config, seq_len = shipped("llama4_scout"), 16384
    multiplied = PUBLISHED["llama4_scout"][1] - 202048 * 5120
    per_position = 6 * 40 * (128 + 128)
    counted = account(config, seq_len)
    assert counted.flops_per_token_full == 6 * multiplied + per_position * 48 * seq_len
    attended = 12 * seq_len / 2 + 36 * 8193 / 2
    assert counted.flops_per_token_causal == 6 * multiplied + per_position * attended


def test_flops_of_latent_attention_by_hand():
    """deepseek_v3_671b: queries and keys of 192, values of 128."""
    counted = account(shipped("deepseek_v3_671b"), 4096)
    multiplied = PUBLISHED["deepseek_v3_671b"][1] - 129280 * 7168
    assert counted.flops_per_token_full == 6 * multiplied + 6 * 61 * 128 * (192 + 128) * 4096


def test_flops_per_token_of_llama3_8b():
    """57.9 GFLOP per token at 8192, so 6,667 tokens/s are 386 TFLOP/s: a row torchtitan published."""
    counted = account(shipped("llama3_8b"), seq_len=8192)
    assert counted.flops_per_token_full == pytest.approx(57.9e9, abs=0.05e9)
    assert 6667 * counted.flops_per_token_full == pytest.approx(386e12, abs=0.5e12)


def test_flops_by_hand():
    """6 per multiplied parameter; per layer, head and position 6 * (d_qk + d_v), or half of it."""
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 6}
    config = ModelConfig(
        vocab_size=10, dim=8, n_layers=2, ffn_hidden_dim=16, max_seq_len=64, **heads
    )
    attention_weights = 8 * (4 * 6) + 2 * 8 * (2 * 6) + (4 * 6) * 8
    multiplied = 2 * (attention_weights + 3 * 8 * 16 + 2 * 8) + 8 + 10 * 8
    attention = 6 * 2 * 4 * (6 + 6) * 32
    counted = account(config, seq_len=32)
    assert counted.parameters == multiplied + 10 * 8
    assert counted.flops_per_token_full == 6 * multiplied + attention
    assert counted.flops_per_token_causal == 6 * multiplied + attention / 2


def test_a_tied_table_is_multiplied_by_once():
    """The head multiplies with its own weights or with the table's: the same FLOPs, fewer parameters."""
    tied = shipped("llama32_1b")
    counted = account(tied, seq_len=4096)
    untied = account(dataclasses.replace(tied, tied_embeddings=False), seq_len=4096)
    assert counted.flops_per_token_full == untied.flops_per_token_full
    assert untied.parameters - counted.parameters == 128256 * 2048
