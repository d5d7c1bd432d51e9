"""AdamW: parameters with weight decay, and torch's implementations against the formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from harness.config.model import ModelConfig
from harness.config.optimizer import IMPLEMENTATIONS, OptimizerConfig
from harness.model.decoder import Decoder
from harness.model.spec import tensors
from harness.optimizer.build import build_optimizer

NORMS = {
    "norm.weight",
    *(f"layers.{i}.{norm}.weight" for i in range(2) for norm in ("attention_norm", "ffn_norm")),
}


def model(tied: bool = False) -> Decoder:
    sizes = {"vocab_size": 32, "dim": 16, "n_layers": 2, "n_heads": 2, "n_kv_heads": 2, "ffn_hidden_dim": 24}
    config = ModelConfig(**sizes, max_seq_len=8, tied_embeddings=tied)
    torch.manual_seed(0)
    return Decoder(config, 8)


def built_for(decoder: Decoder, config: OptimizerConfig) -> torch.optim.Optimizer:
    return build_optimizer(config, decoder.named_parameters(), tensors(decoder.config))


def shrunk(config: OptimizerConfig, tied: bool = False) -> set[str]:
    """Names of the parameters that a step without gradients makes smaller; none may grow."""
    decoder = model(tied)
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built_for(decoder, config).step()
    decayed = set()
    for name, parameter in decoder.named_parameters():
        if not torch.equal(parameter, before[name]):
            torch.testing.assert_close(
                parameter.detach(), before[name] * (1 - config.lr * config.weight_decay)
            )
            decayed.add(name)
    return decayed


def names() -> set[str]:
    return {name for name, _ in model().named_parameters()}


def test_norms_do_not_decay_and_matrices_do() -> None:
    assert names() >= NORMS
    assert shrunk(OptimizerConfig(lr=0.1, weight_decay=0.5)) == names() - NORMS


def test_norms_decay_when_asked() -> None:
    assert shrunk(OptimizerConfig(lr=0.1, weight_decay=0.5, decay_vectors=True)) == names()


def test_embeddings_stay_when_asked() -> None:
    kept = {"tok_embeddings.weight", *NORMS}
    assert shrunk(OptimizerConfig(lr=0.1, weight_decay=0.5, decay_embeddings=False)) == names() - kept


def test_a_tied_table_decays_like_the_embeddings() -> None:
    assert "tok_embeddings.weight" in shrunk(OptimizerConfig(lr=0.1, weight_decay=0.5), tied=True)
    kept = shrunk(OptimizerConfig(lr=0.1, weight_decay=0.5, decay_embeddings=False), tied=True)
    assert not kept & {"tok_embeddings.weight", "output.weight"}


def test_no_decay_at_all() -> None:
    assert shrunk(OptimizerConfig(lr=0.1, weight_decay=0.0)) == set()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("decay_embeddings", [False, True])
def test_every_parameter_is_in_one_group(tied: bool, decay_embeddings: bool) -> None:
    decoder = model(tied)
    built = built_for(decoder, OptimizerConfig(decay_embeddings=decay_embeddings))
    grouped = [parameter for group in built.param_groups for parameter in group["params"]]
    assert {id(p) for p in grouped} == {id(p) for p in decoder.parameters()}
    assert len(grouped) == len(list(decoder.parameters()))


def test_a_part_with_vectors_only_makes_one_group() -> None:
    """A pipeline stage may hold nothing that decays; an empty group is refused by torch."""
    norm = torch.nn.Parameter(torch.ones(4))
    built = build_optimizer(OptimizerConfig(), [("norm.weight", norm)], tensors(model().config))
    assert [group["weight_decay"] for group in built.param_groups] == [0.0]


def train(config: OptimizerConfig, steps: int = 5) -> dict[str, Tensor]:
    decoder = model()
    built = built_for(decoder, config)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in decoder.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        built.step()
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def by_formula(config: OptimizerConfig, steps: int = 5) -> dict[str, Tensor]:
    """Algorithm 2 of arXiv:1711.05101, in float64."""
    values = {name: parameter.detach().double() for name, parameter in model().named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in values.items()}
    second = {name: torch.zeros_like(value) for name, value in values.items()}
    generator = torch.Generator().manual_seed(3)
    for step in range(1, steps + 1):
        for name, value in values.items():
            gradient = torch.randn(value.shape, generator=generator).double()
            first[name] = config.beta1 * first[name] + (1 - config.beta1) * gradient
            second[name] = config.beta2 * second[name] + (1 - config.beta2) * gradient**2
            mean = first[name] / (1 - config.beta1**step)
            root = (second[name] / (1 - config.beta2**step)).sqrt()
            decay = 0.0 if name in NORMS else config.weight_decay
            values[name] = value - config.lr * (mean / (root + config.eps) + decay * value)
    return values


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_every_implementation_follows_the_formula(implementation: str) -> None:
    config = OptimizerConfig(
        lr=0.03, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, implementation=implementation
    )
    config.validate()
    expected = by_formula(config)
    for name, value in train(config).items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("implementation", "flags"),
    [
        ("auto", (True, False)),
        ("fused", (True, False)),
        ("foreach", (False, True)),
        ("for-loop", (False, False)),
    ],
)
def test_the_configured_implementation_is_used(implementation: str, flags: tuple[bool, bool]) -> None:
    built = built_for(model(), OptimizerConfig(implementation=implementation))
    assert (built.defaults["fused"], built.defaults["foreach"]) == flags
