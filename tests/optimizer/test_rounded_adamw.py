"""AdamW state and parameters in bfloat16: computed in float32, rounded once."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from equal import assert_equal
from test_adamw import NORMS, built_for, by_formula, model, train
from torch import Tensor
from waits import waits

from harness.compose.composer import compose_job
from harness.config.optimizer import LARGEST_BFLOAT16_BETA, OptimizerConfig
from harness.model.spec import tensors
from harness.optimizer.build import build_optimizer
from harness.optimizer.elementwise import RoundedAdamW

SPECS = tensors(model().config)
CONFIG = OptimizerConfig(lr=0.03, beta1=0.8, beta2=0.9, eps=1e-3, weight_decay=0.2, state_dtype="bfloat16")


def test_follows_the_formula_up_to_rounding() -> None:
    """Within bfloat16's rounding of the means, and not exactly, because values must have been rounded."""
    expected, found = by_formula(CONFIG), train(CONFIG)
    exact = train(dataclasses.replace(CONFIG, state_dtype="float32"))
    for name, value in found.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=0, atol=0.03 * 5 * 2**-7)
        assert not torch.equal(value, exact[name])


def test_without_rounding_it_equals_torchs() -> None:
    ours, torchs = model(), model()
    parameters = [dict(decoder.named_parameters()) for decoder in (ours, torchs)]
    constants = {"lr": 0.03, "betas": (0.8, 0.9), "eps": 1e-3}
    first = RoundedAdamW(
        [{"params": list(parameters[0].values()), "weight_decay": 0.2}],
        **constants,
        state_dtype=torch.float32,
    )
    second = torch.optim.AdamW(parameters[1].values(), **constants, weight_decay=0.2, foreach=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(4):
        for name, parameter in parameters[0].items():
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            parameters[1][name].grad = parameter.grad.clone()
        first.step()
        second.step()
    for name, parameter in parameters[0].items():
        torch.testing.assert_close(parameter, parameters[1][name], rtol=1e-6, atol=1e-7)


def bits(tensor: Tensor) -> Tensor:
    return tensor.bfloat16().float()


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16])
def test_one_step_by_hand(master: torch.dtype) -> None:
    """Parameter and means are computed in float32 from the stored values, then rounded to their dtypes."""
    torch.manual_seed(0)
    start = torch.randn(64, dtype=master)
    parameter = torch.nn.Parameter(start.clone())
    built = build_optimizer(CONFIG, [("norm.weight", parameter)], SPECS)
    mean = square = torch.zeros(64)
    value = start.float()
    for step in (1, 2, 3):
        gradient = torch.randn(64).to(master)
        parameter.grad = gradient.clone()
        built.step()
        g = gradient.float()
        mean = 0.8 * mean + 0.2 * g
        square = 0.9 * square + 0.1 * g * g
        value = value - 0.03 * (mean / (1 - 0.8**step)) / ((square / (1 - 0.9**step)).sqrt() + 1e-3)
        mean, square = bits(mean), bits(square)
        state = built.state[parameter]
        assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.bfloat16
        assert parameter.dtype == master
        # A float32 sum in another order may be rounded to the neighbouring bfloat16 value.
        torch.testing.assert_close(state["exp_avg"].float(), mean, rtol=2**-7, atol=0)
        torch.testing.assert_close(state["exp_avg_sq"].float(), square, rtol=2**-7, atol=0)
        mean, square = state["exp_avg"].float(), state["exp_avg_sq"].float()
        torch.testing.assert_close(
            parameter.detach().float(), value, rtol=1e-6 if master == torch.float32 else 2**-7, atol=1e-6
        )
        value = parameter.detach().float().clone()


def test_a_mean_still_changes_at_the_largest_beta() -> None:
    """At 0.999 it would not, so that is refused."""
    for beta, moves in ((LARGEST_BFLOAT16_BETA, True), (0.999, False)):
        config = dataclasses.replace(CONFIG, beta2=beta)
        parameter = torch.nn.Parameter(torch.ones(1))
        built = build_optimizer(config, [("norm.weight", parameter)], SPECS)
        parameter.grad = torch.ones(1)
        built.step()
        built.state[parameter]["exp_avg_sq"].fill_(1.0)
        for _ in range(500):
            parameter.grad = torch.zeros(1)
            built.step()
        assert (float(built.state[parameter]["exp_avg_sq"]) < 0.05) == moves


def test_norms_do_not_decay() -> None:
    """The parameter groups are those of torch's AdamW."""
    decoder = model()
    before = {name: parameter.detach().clone() for name, parameter in decoder.named_parameters()}
    for parameter in decoder.parameters():
        parameter.grad = torch.zeros_like(parameter)
    built_for(decoder, CONFIG).step()
    same = {name for name, parameter in decoder.named_parameters() if torch.equal(parameter, before[name])}
    assert same == NORMS


def test_state_has_the_parameters_dtype_by_default() -> None:
    assert compose_job([]).optimizer.state_dtype == "float32"
    assert compose_job(["precision=bf16_full"]).optimizer.state_dtype == "bfloat16"
    kept = compose_job(["precision=bf16_full", "optimizer.state_dtype=float32"])
    assert kept.optimizer.state_dtype == "float32"
    assert kept.numerics_id != compose_job(["precision=bf16_full"]).numerics_id


def three_steps(drop: list[bool] | None, master: torch.dtype, state: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Parameter and state after a step for each entry; None: three steps without ``found_inf``."""
    torch.manual_seed(0)
    config = dataclasses.replace(CONFIG, state_dtype=state)
    parameter = torch.nn.Parameter(torch.randn(64, 3).to(master))
    # Built directly, because build_optimizer uses torch's AdamW if everything is float32.
    built = RoundedAdamW(
        [{"params": [parameter], "weight_decay": 0.2}],
        config.lr,
        getattr(torch, state),
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )
    gradients = iter(torch.randn(3, 64, 3))
    for dropped in drop or [False] * 3:
        gradient = torch.full((64, 3), torch.nan) if dropped else next(gradients)
        parameter.grad = gradient.to(master)
        if drop is not None:
            built.found_inf = torch.tensor(float(dropped))
        built.step()
    return parameter.detach(), built.state[parameter]


FORMATS = [(torch.bfloat16, "bfloat16"), (torch.bfloat16, "float32"), (torch.float32, "bfloat16")]


@pytest.mark.parametrize(("master", "state"), [*FORMATS, (torch.float32, "float32")])
@pytest.mark.parametrize("drop", [[False] * 3, [True, False, False, True, False, True]])
def test_dropped_steps_have_no_effect(master: torch.dtype, state: str, drop: list[bool]) -> None:
    """The result is that of the three steps that were applied; the step count is 3."""
    expected, expected_state = three_steps(None, master, state)
    found, found_state = three_steps(drop, master, state)
    close = {"rtol": 2**-7 if torch.bfloat16 in (master, getattr(torch, state)) else 1e-6, "atol": 1e-6}
    torch.testing.assert_close(found, expected, **close)
    for name in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(found_state[name], expected_state[name], **close)
    assert float(found_state["step"]) == float(expected_state["step"]) == 3


@pytest.mark.parametrize(("master", "state"), FORMATS)
def test_a_dropped_step_changes_no_bit(master: torch.dtype, state: str) -> None:
    before, state_before = three_steps([False] * 3, master, state)
    after, state_after = three_steps([False] * 3 + [True], master, state)
    assert_equal(before, after)
    assert_equal(state_after, state_before)


@pytest.mark.parametrize(("master", "state"), FORMATS)
def test_the_host_does_not_wait_for_an_update(master: torch.dtype, state: str) -> None:
    parameter = torch.nn.Parameter(torch.empty(64, 3, device="meta", dtype=master))
    config = dataclasses.replace(CONFIG, state_dtype=state)
    built = build_optimizer(config, [("output.weight", parameter)], SPECS)
    assert isinstance(built, RoundedAdamW)
    with waits() as found:
        for _ in range(2):
            parameter.grad = torch.empty_like(parameter)
            built.found_inf = torch.empty((), device="meta")
            built.step()
    assert found == []
