"""Muon on one process, against torch.optim.Muon and a singular value decomposition."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from test_adamw import built_for, model
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from waits import waits

from harness.config.optimizer import LR_SCALES, OptimizerConfig, lr_scale
from harness.optimizer import assignment
from harness.optimizer.assignment import Matrices
from harness.optimizer.muon import Muon, orthogonalize

CONFIG = OptimizerConfig(kind="muon", lr=0.03, weight_decay=0.2, momentum=0.9)


def is_muons(name: str, parameter: Tensor) -> bool:
    return parameter.ndim == 2 and name.startswith("layers.")


def trained(optimizers: Any, steps: int = 5) -> dict[str, Tensor]:
    """Parameters after some steps of the optimizers that ``optimizers`` builds for a model."""
    decoder = model()
    built = optimizers(decoder)
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        for parameter in decoder.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        for each in built:
            each.step()
    return {name: parameter.detach() for name, parameter in decoder.named_parameters()}


def torchs(config: OptimizerConfig) -> dict[str, Tensor]:
    """The same training by torch.optim.Muon (in bfloat16) and torch.optim.AdamW."""

    def build(decoder: Any) -> list[torch.optim.Optimizer]:
        named = dict(decoder.named_parameters())
        matrices = [p for name, p in named.items() if is_muons(name, p)]
        tables = [p for name, p in named.items() if p.ndim == 2 and not is_muons(name, p)]
        adamw: dict[str, Any] = {"lr": config.lr, "betas": (config.beta1, config.beta2), "eps": config.eps}
        return [
            torch.optim.Muon(
                matrices,
                lr=config.lr,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
                adjust_lr_fn=config.lr_scale,
            ),
            torch.optim.AdamW(tables, weight_decay=config.weight_decay, **adamw),
            torch.optim.AdamW([p for p in named.values() if p.ndim < 2], weight_decay=0.0, **adamw),
        ]

    return trained(build)


@pytest.mark.parametrize("scale", LR_SCALES)
def test_equals_torchs(scale: str) -> None:
    config = dataclasses.replace(CONFIG, lr_scale=scale, newton_schulz_dtype="bfloat16")
    expected = torchs(config)
    for name, value in trained(lambda decoder: [built_for(decoder, config)]).items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (8, 8)], ids=str)
def test_singular_values_become_about_one(shape: tuple[int, int]) -> None:
    """The iteration changes singular values only, to 0.7 to 1.2 (the published range of five steps)."""
    torch.manual_seed(0)
    matrices = torch.randn(3, *shape, dtype=torch.float64)
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    found = left.mT @ orthogonalize(matrices.clone(), 5) @ right.mT
    values = found.diagonal(dim1=1, dim2=2)
    torch.testing.assert_close(found, torch.diag_embed(values), rtol=0, atol=1e-9)
    assert values.min() > 0.6
    assert values.max() < 1.25


def test_a_matrix_of_zeros_stays_zero() -> None:
    assert not orthogonalize(torch.zeros(1, 4, 6), 5).any()


def test_one_step_by_hand_in_bfloat16() -> None:
    """Parameter and momentum are updated in float32 from the stored values, then rounded."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(8, 6).bfloat16())
    group = {"params": [parameter], "lr": 0.5, "weight_decay": 0.1}
    built = muon([group], torch.bfloat16)
    momentum = torch.zeros(8, 6)
    for _ in range(3):
        value = parameter.detach().float()
        parameter.grad = torch.randn(8, 6).bfloat16()
        built.step()
        momentum = 0.9 * momentum + 0.1 * parameter.grad.float()
        update = orthogonalize((0.1 * parameter.grad.float() + 0.9 * momentum)[None].clone(), 5)[0]
        value = value * (1 - 0.5 * 0.1) - 0.5 * 0.2 * 8**0.5 * update
        stored = built.state[parameter]["momentum_buffer"]
        assert (stored.dtype, parameter.dtype) == (torch.bfloat16, torch.bfloat16)
        torch.testing.assert_close(stored.float(), momentum, rtol=2**-8, atol=1e-6)
        torch.testing.assert_close(parameter.detach().float(), value, rtol=2**-7, atol=1e-5)
        momentum = stored.float()


def muon(groups: list[dict[str, Any]], state_dtype: torch.dtype = torch.float32) -> Muon:
    scale = lr_scale("match_rms_adamw")
    return Muon(groups, 1.0, state_dtype, momentum=0.9, steps=5, dtype=torch.float32, scale=scale)


def steps_of(dropped: list[bool]) -> tuple[Tensor, Tensor]:
    """Parameter and momentum after steps of equal gradients, some of them dropped and not finite."""
    torch.manual_seed(0)
    parameter = torch.nn.Parameter(torch.randn(2, 8, 6))
    built = muon([{"params": [parameter], "weight_decay": 0.1}])
    gradient = torch.randn(2, 8, 6)
    for drop in dropped:
        parameter.grad = torch.full_like(gradient, torch.inf) if drop else gradient.clone()
        built.found_inf = torch.tensor(float(drop))
        built.step()
    return parameter.detach(), built.state[parameter]["momentum_buffer"]


def test_a_dropped_step_changes_nothing() -> None:
    for found, expected in zip(steps_of([False, True, False]), steps_of([False, False]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_the_host_does_not_wait() -> None:
    """Experts and two matrices of equal shapes, with a check of the device for finite numbers."""
    with torch.device("meta"):
        shapes = [(2, 8, 6), (8, 6), (8, 6), (4, 12)]
        parameters = [torch.nn.Parameter(torch.empty(shape)) for shape in shapes]
        built = muon([{"params": parameters, "weight_decay": 0.1}])
        built.found_inf = torch.zeros(())
    for parameter in parameters:
        parameter.grad = torch.empty_like(parameter)
    with waits() as found:
        built.step()
    assert found == []


SHARED = [Matrices(1, 512, 512, 4)] * 5 + [Matrices(1, 1536, 512, 4)] * 6 + [Matrices(6, 64, 32, 2)]


@pytest.mark.parametrize("round_values", [2**24, 2**20], ids=["one round", "rounds"])
def test_every_matrix_has_one_owner(monkeypatch: pytest.MonkeyPatch, round_values: int) -> None:
    monkeypatch.setattr(assignment, "ROUND_VALUES", round_values)
    units = [unit for units in assignment.assign(SHARED) for unit in units]
    owned = sorted((unit.tensor, matrix) for unit in units for matrix in range(unit.first, unit.stop))
    assert owned == [(index, matrix) for index, of in enumerate(SHARED) for matrix in range(of.count)]
    work = [0.0] * 4
    for unit in units:
        if SHARED[unit.tensor].holders == 4:
            work[unit.owner] += assignment.orthogonalization_flops(
                SHARED[unit.tensor].rows, SHARED[unit.tensor].columns
            )
    largest = assignment.orthogonalization_flops(1536, 512)
    assert max(work) - min(work) <= largest
    for each in assignment.assign(SHARED):
        for owner in range(4):
            values = sum(SHARED[unit.tensor].values * unit.count for unit in each if unit.owner == owner)
            assert values <= max(round_values, 1536 * 512)


def test_flops_are_those_of_the_products() -> None:
    with FlopCounterMode(display=False) as counter:
        orthogonalize(torch.randn(1, 12, 8), 3)
    assert counter.get_total_flops() == assignment.orthogonalization_flops(12, 8, 3)
