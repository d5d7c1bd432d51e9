"""Initial values: by name, whatever is built around a parameter, and from the right distribution."""

import hashlib
import math

import pytest
import torch
from equal import assert_equal

from harness.config.model import ModelConfig
from harness.model.architecture import resolve_model
from harness.model.decoder import Decoder
from harness.model.spec import tensors
from harness.parallelism.materialize import draw, materialize

CPU = torch.device("cpu")


def config(tied=False, **numbers):
    shape = {"vocab_size": 512, "dim": 128, "n_layers": 4, "n_heads": 4, "n_kv_heads": 2}
    made = ModelConfig(
        "small", ffn_hidden_dim=256, max_seq_len=64, tied_embeddings=tied, **{**shape, **numbers}
    )
    return resolve_model(made)


def values(made, modules=None, seed=42):
    with torch.device("meta"):
        part = Decoder(made, 16, modules)
    materialize(part, seed, CPU, CPU)
    return {name: parameter.detach() for name, parameter in part.named_parameters()}


def init_of(name, made):
    return tensors(made)[name].init


WHOLE = values(config())
WQ = "layers.0.attention.wq.weight"


@pytest.mark.parametrize(
    "modules",
    [
        ["tok_embeddings"],
        ["layers.3", "norm", "output"],
        ["layers.2"],
        ["output", "layers.1", "tok_embeddings"],
    ],
    ids="+".join,
)
def test_a_part_draws_what_the_whole_draws(modules):
    part = values(config(), modules)
    assert part
    assert_equal(part, {name: WHOLE[name] for name in part})


def test_order_and_neighbours_do_not_matter():
    torch.manual_seed(1)
    torch.randn(100)
    backwards = {
        name: draw(name, tuple(value.shape), init_of(name, config()), 42, CPU)
        for name, value in reversed(WHOLE.items())
    }
    assert_equal(backwards, WHOLE)
    deeper = values(config(n_layers=6))
    assert_equal({name: deeper[name] for name in WHOLE}, WHOLE)


def test_values_are_the_same_on_every_machine():
    """Pins the derivation of the generator's seed: another one would silently be another experiment."""
    state = torch.get_rng_state()
    drawn = draw(WQ, (2, 2), init_of(WQ, config()), 42, CPU)
    digest = hashlib.sha256(b"42/layers.0.attention.wq.weight").digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") // 2)
    expected = torch.empty(2, 2)
    torch.nn.init.trunc_normal_(expected, std=0.02, a=-2.0, b=2.0, generator=generator)
    assert_equal(drawn, expected)
    assert_equal(torch.get_rng_state(), state)


def test_every_name_and_every_seed_differs():
    drawn = {name: value for name, value in WHOLE.items() if "norm" not in name}
    firsts = {name: tuple(value.flatten()[:4].tolist()) for name, value in drawn.items()}
    assert len(set(firsts.values())) == len(drawn)
    assert all(
        len({tuple(row[:4].tolist()) for row in value}) == len(value) for value in drawn.values()
    )
    other = values(config(), seed=43)
    for name, value in drawn.items():
        assert not torch.equal(other[name], value), name
        correlation = torch.corrcoef(torch.stack((other[name].flatten(), value.flatten())))[0, 1]
        assert abs(correlation) < 6 / math.sqrt(value.numel()), name


def expected_std(name, dim):
    """Standard deviations by hand."""
    if name == "tok_embeddings.weight":
        return 1.0
    if name == "output.weight":
        # A normal cut at three of its std keeps 0.98658 of it.
        return 0.98658 / math.sqrt(dim)
    layer = int(name.split(".")[1])
    depth = 1 / math.sqrt(2 * (layer + 1))
    return 0.02 * (depth if name.split(".")[-2] in ("wo", "w2", "w3") else 1)


@pytest.mark.parametrize("name", WHOLE)
def test_distribution(name):
    value = WHOLE[name]
    if "norm" in name:
        assert_equal(value, torch.ones(128))
        return
    n, std = value.numel(), expected_std(name, dim=128)
    # Five standard errors of the mean and of the standard deviation.
    assert abs(value.double().mean()) < 5 * std / math.sqrt(n)
    assert value.double().std() == pytest.approx(std, rel=5 / math.sqrt(2 * n))
    # A normal has its share beyond two standard deviations; a uniform of this std has none.
    assert (value.abs() > 2 * std).double().mean() == pytest.approx(0.0455, rel=0.2)
    if name == "output.weight":
        assert 2.8 / math.sqrt(128) < value.abs().max() <= 3 / math.sqrt(128)
    else:
        assert value.abs().max() > 3 * std


def test_a_tied_table_is_drawn_as_the_output_projection():
    with torch.device("meta"):
        model = Decoder(config(tied=True), 16)
    materialize(model, 42, CPU, CPU)
    assert model.output is not None and model.tok_embeddings is not None
    assert model.output.weight is model.tok_embeddings.weight
    table = model.output.weight.detach()
    assert table.double().std() == pytest.approx(0.98658 / math.sqrt(128), rel=0.02)
    assert table.abs().max() <= 3 / math.sqrt(128)
