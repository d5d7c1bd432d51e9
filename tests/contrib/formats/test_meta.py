"""Meta's files against Meta's mathematics: complex rotation of interleaved pairs, reimplemented here."""

import math
import re

import pytest
import torch
from cases import rows
from conversions import consolidated, save_meta
from families_table import CASES, LLAMAS, PLAIN, STRETCHED, close, set_fields
from one_line import one_line
from plain_llama import frequencies, logits

from harness.contrib.formats.meta import LlamaSource, merge
from harness.model.decoder import Decoder
from harness.model.spec import parameter_shapes
from harness.util.errors import UserError

CONFIGS = {
    "llama2": LLAMAS["llama"],
    "grouped_query": LLAMAS["llama_grouped_query"],
    "wide_heads": set_fields(PLAIN, n_kv_heads=2, head_dim=24),
    "llama31": set_fields(PLAIN, n_kv_heads=2, rope=STRETCHED),
}


def meta_weights(config):
    """A whole checkpoint in Meta's layout, of values that no parameter shares with another."""
    generator = torch.Generator().manual_seed(3)
    return {
        name: torch.randn(shape, generator=generator) * 0.2 + (1.0 if "norm" in name else 0.0)
        for name, shape in parameter_shapes(config).items()
    }


def meta_frequencies(config):
    """precompute_freqs_cis and apply_scaling of meta-llama/llama-models, models/llama3/model.py."""
    rope = config.rope
    own = frequencies(rope.theta, config.head_width)
    if rope.scaling == "none":
        return own
    low_wavelength = rope.original_max_position / rope.low_freq_factor
    high_wavelength = rope.original_max_position / rope.high_freq_factor
    scaled = []
    for frequency in own:
        wavelength = 2 * math.pi / frequency
        if wavelength < high_wavelength:
            scaled.append(frequency)
        elif wavelength > low_wavelength:
            scaled.append(frequency / rope.factor)
        else:
            smooth = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            scaled.append((1 - smooth) * frequency / rope.factor + smooth * frequency)
    return torch.stack(scaled)


def meta_logits(weights, tokens, config):
    """The forward pass of Meta's reference code."""
    return logits(weights, tokens, config.n_layers, meta_frequencies(config), interleaved=True)


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_metas(name, tmp_path):
    config = CONFIGS[name]
    weights = meta_weights(config)
    save_meta(tmp_path / "meta", consolidated(weights, 2))
    source = LlamaSource(tmp_path / "meta", config)
    model = Decoder(config, seq_len=48)
    model.load_state_dict({name: source.read(name) for name in source.tensors})
    tokens = torch.randint(config.vocab_size, (2, 48), generator=torch.Generator().manual_seed(1))
    expected = meta_logits(weights, tokens, config)
    with torch.no_grad():
        close(model(tokens), expected)
        model.load_state_dict(weights)  # without the permutation it is another model
        assert (model(tokens) - expected).abs().max() > 0.1 * expected.abs().max()


@pytest.mark.parametrize(("files", "by_rows"), [(1, True), (2, False)])
def test_tables_are_one_or_split_by_columns(files, by_rows, tmp_path):
    weights = meta_weights(CONFIGS["grouped_query"])
    save_meta(tmp_path / "meta", consolidated(weights, files, by_rows))
    source = LlamaSource(tmp_path / "meta", CONFIGS["grouped_query"])
    for name in (
        "tok_embeddings.weight",
        "output.weight",
        "layers.0.attention.wo.weight",
        "norm.weight",
    ):
        assert source.read(name).equal(weights[name]), name


@pytest.mark.parametrize(
    ("name", "shapes", "says"),
    rows("""
        layers.0.attention.wq.weight  [[64, 64], [64, 64]]  do not make up [64, 64] of model=small
        tok_embeddings.weight         [[48, 32], [48, 32]]  do not make up [96, 64] of model=small
        norm.weight                   [[32], [32]]          do not make up [64] of model=small
    """),
)
def test_shards_that_do_not_make_up_the_model(name, shapes, says):
    with pytest.raises(UserError) as caught:
        merge(name, [torch.zeros(shape) for shape in shapes], CONFIGS["llama2"])
    of_files = ", ".join(map(str, shapes))
    assert str(caught.value) == f"{name}: shapes {of_files} of {len(shapes)} file(s) {says}"


def test_files_of_other_models(tmp_path):
    with one_line(UserError, r"Meta's files are read for model\.family=llama, not qwen3"):
        LlamaSource(tmp_path, CASES["qwen3"])
    for name in ("layers.3.attention.wq.weight", "layers.0.attention.wz.weight"):
        torch.save(
            {**meta_weights(CONFIGS["llama2"]), name: torch.zeros(4)},
            tmp_path / "consolidated.00.pth",
        )
        with one_line(UserError, rf"consolidated\.00\.pth: .*: 1 unexpected \({re.escape(name)}\)"):
            LlamaSource(tmp_path, CONFIGS["llama2"])
