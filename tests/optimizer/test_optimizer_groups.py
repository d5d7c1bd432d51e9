"""Settings of single tensors, and the other kinds of optimizers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from jobs import tiny
from test_adamw import built_for, model
from torch import Tensor
from waits import waits

from harness.config.optimizer import OptimizerConfig
from harness.model.decoder import Decoder
from harness.model.spec import tensors
from harness.optimizer.elementwise import Lion
from harness.optimizer.settings import kinds_of, tensor_settings

MOE = "model=qwen3_moe_debug"


def settings_of(name: str, *overrides: str) -> dict[str, Any]:
    job = tiny(*overrides)
    return vars(tensor_settings(job.optimizer, tensors(job.model)[name]))


def test_the_last_group_that_matches_wins() -> None:
    groups = (
        r"optimizer.groups=[{match: 'layers\..*\.wq', lr_factor: 0.5, weight_decay: 0, betas: [0.8,0.98]},"
        r"{match: 'layers\.1\.', lr_factor: 3}]"
    )
    first, second = (settings_of(f"layers.{layer}.attention.wq.weight", groups) for layer in range(2))
    assert (first["lr_factor"], first["weight_decay"], first["betas"]) == (0.5, 0.0, (0.8, 0.98))
    assert (second["lr_factor"], second["weight_decay"], second["betas"]) == (3, 0.0, (0.8, 0.98))
    other = settings_of("output.weight", groups)
    assert (other["lr_factor"], other["weight_decay"], other["betas"]) == (1.0, 0.1, (0.9, 0.95))


def test_muon_updates_the_matrices_inside_of_blocks() -> None:
    job = tiny(MOE, "optimizer=muon")
    found = kinds_of(job.optimizer, tensors(job.model).values())
    ends = {tensor.name.split(".", 2)[-1] for tensor in found["muon"] if tensor.name.startswith("layers.")}
    attention = {f"attention.{name}.weight" for name in ("wq", "wk", "wv", "wo")}
    assert ends == attention | {f"moe.experts.w{i}" for i in (1, 2, 3)}
    others = {tensor.name for tensor in found["adamw"]}
    assert {"tok_embeddings.weight", "output.weight", "layers.0.moe.router.weight", "norm.weight"} <= others
    assert found.keys() == {"muon", "adamw"}


def test_a_group_chooses_another_kind() -> None:
    job = tiny("optimizer=muon", "optimizer.groups=[{match: wo, kind: lion}, {match: output, kind: muon}]")
    found = kinds_of(job.optimizer, tensors(job.model).values())
    assert {tensor.name.split(".")[-2] for tensor in found["lion"]} == {"wo"}
    assert "output.weight" in {tensor.name for tensor in found["muon"]}


def trained(build: Callable[[Decoder], torch.optim.Optimizer], steps: int = 4) -> dict[str, Tensor]:
    decoder = model()
    built = build(decoder)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in decoder.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        built.step()
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_groups_are_those_of_torch(kind: str, dtype: str) -> None:
    """torch's own optimizer with the same parameter groups; with state in bfloat16 up to its rounding."""
    group = {"match": "wq", "lr_factor": 0.5, "weight_decay": 0.3, "betas": [0.7, 0.8]}
    config = OptimizerConfig(kind=kind, lr=0.01, groups=[group], state_dtype=dtype)

    def torchs(decoder: Decoder) -> torch.optim.Optimizer:
        named = dict(decoder.named_parameters())
        queries = {name: p for name, p in named.items() if "wq" in name}
        matrices = [p for name, p in named.items() if p.ndim == 2 and name not in queries]
        vectors = [p for p in named.values() if p.ndim < 2]
        groups = [
            {"params": list(queries.values()), "lr": 0.005, "weight_decay": 0.3, "betas": (0.7, 0.8)},
            {"params": matrices, "weight_decay": 0.1},
            {"params": vectors, "weight_decay": 0.0},
        ]
        made = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind]
        return made(groups, lr=0.01, betas=(0.9, 0.95))

    expected, found = trained(torchs), trained(lambda decoder: built_for(decoder, config))
    tolerance = 1e-6 if dtype == "float32" else 4 * 0.01 * 2**-5
    for name, value in found.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=tolerance, msg=name)


def test_lion_follows_the_published_algorithm() -> None:
    """Algorithm 2 of arXiv:2302.06675, in float64."""
    config = OptimizerConfig(kind="lion", lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.5)
    values = {name: parameter.detach().double() for name, parameter in model().named_parameters()}
    means = {name: torch.zeros_like(value) for name, value in values.items()}
    generator = torch.Generator().manual_seed(3)
    for _ in range(4):
        for name, value in values.items():
            gradient = torch.randn(value.shape, generator=generator).double()
            update = (0.9 * means[name] + 0.1 * gradient).sign()
            values[name] = value - 0.01 * (update + (0.5 if value.ndim == 2 else 0.0) * value)
            means[name] = 0.99 * means[name] + 0.01 * gradient
    found = trained(lambda decoder: built_for(decoder, config))
    for name, value in found.items():
        # A sign may differ where the sum is zero up to rounding.
        torch.testing.assert_close(value.double(), values[name], rtol=1e-5, atol=1e-6, msg=name)


def test_lion_keeps_its_state_in_bfloat16() -> None:
    decoder = model()
    built = built_for(decoder, OptimizerConfig(kind="lion", state_dtype="bfloat16"))
    for parameter in decoder.parameters():
        parameter.grad = torch.full_like(parameter, 1.01)
    built.step()
    means = [state["exp_avg"] for state in built.state.values()]
    # 0.05 * 1.01, rounded to eight bits.
    assert all(
        mean.dtype == torch.bfloat16 and (mean == torch.tensor(0.0505).bfloat16()).all() for mean in means
    )


def test_lion_drops_a_step_on_the_device() -> None:
    with torch.device("meta"):
        parameter = torch.nn.Parameter(torch.empty(4, 3))
        built = Lion([{"params": [parameter], "weight_decay": 0.1, "betas": (0.9, 0.99)}], 0.1, torch.float32)
        built.found_inf = torch.zeros(())
    parameter.grad = torch.empty_like(parameter)
    with waits() as found:
        built.step()
    assert found == []
    parameter = torch.nn.Parameter(torch.ones(3))
    built = Lion([{"params": [parameter], "weight_decay": 0.1, "betas": (0.9, 0.99)}], 0.1, torch.float32)
    parameter.grad = torch.full((3,), torch.nan)
    built.found_inf = torch.ones(())
    built.step()
    assert parameter.equal(torch.ones(3)) and not built.state[parameter]["exp_avg"].any()


def test_several_kinds_are_one_optimizer() -> None:
    """One state and the groups of all; the settings of a group change the update of its kind."""
    decoder = model()
    built = built_for(decoder, OptimizerConfig(kind="muon", groups=[{"match": "wo", "kind": "lion"}]))
    assert {group["kind"] for group in built.param_groups} == {"adamw", "lion", "muon"}
    for parameter in decoder.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    for group in built.param_groups:
        group["lr"] = 0.0
    built.step()
    assert all(parameter.equal(before[name]) for name, parameter in decoder.named_parameters())
    assert len(built.state) == len(before)
