"""Emulated float8: the recipes against hand-computed values and bfloat16, and layouts against one process."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from equal import assert_equal
from jobs import tiny
from layouts import require_agreement
from precision_runs import (
    E4M3,
    E5M2,
    Outcome,
    difference,
    rounded,
    rounded_in_blocks,
    trace_alone,
    trace_with_float8_gathers,
    train,
)
from tiers import rest_is_thorough
from torch import nn

from harness.config.job import Job
from harness.config.precision import FLOAT8, PrecisionConfig
from harness.launch.pool import RankPool
from harness.precision.swap import swap_linears
from harness.tools.parity.parity import Trace, compare, trace

RECIPES = [*FLOAT8, "mxfp8"]
SMALL = [
    *("training.steps=10", "training.seq_len=64", "training.global_batch_size=4"),
    *("data.mask_fraction=0.3", "model.n_kv_heads=8"),
]
CPU = torch.device("cpu")


@cache
def job_of(*overrides: str) -> Job:
    return tiny(*SMALL, *overrides)


def alone(pool: RankPool, *overrides: str, steps: int = 1) -> Trace:
    return trace_alone(pool, job_of(*overrides), steps)


def precision_of(linear: str, dtype: str = "float32") -> tuple[str, ...]:
    return (f"precision.linear={linear}", f"precision.param_dtype={dtype}", "precision.emulate=true")


@pytest.mark.parametrize("linear", RECIPES)
def test_a_linear_by_hand(linear: str) -> None:
    """Output and gradients of a swapped linear against reference casts and products in float64."""
    torch.manual_seed(0)
    plain = nn.Linear(64, 96, bias=False)
    model = nn.ModuleDict({"wq": plain, "kept": nn.Linear(64, 32, bias=False)})
    x, g = torch.randn(128, 64) * torch.logspace(-2, 2, 128)[:, None], torch.randn(128, 96)
    w = plain.weight.detach()
    if linear == "float8_tensorwise":
        y = rounded(x, E4M3, (0, 1), False) @ rounded(w, E4M3, (0, 1), False).T
        gx = rounded(g, E5M2, (0, 1), False) @ rounded(w, E4M3, (0, 1), False)
        gw = rounded(g, E5M2, (0, 1), False).T @ rounded(x, E4M3, (0, 1), False)
    elif linear == "mxfp8":
        y = rounded_in_blocks(x) @ rounded_in_blocks(w).T
        gx = rounded_in_blocks(g) @ rounded_in_blocks(w.T.contiguous()).T
        gw = rounded_in_blocks(g.T.contiguous()) @ rounded_in_blocks(x.T.contiguous()).T
    else:
        y = rounded(x, E4M3, (1,), True) @ rounded(w, E4M3, (1,), True).T
        over = (0, 1) if linear == "float8_rowwise_hp" else (0,)
        gx = rounded(g, E4M3, (1,), True) @ rounded(w, E4M3, over, True)
        gw = g.double().T @ x.double()
        if linear == "float8_rowwise":
            gw = rounded(g, E4M3, (0,), True).T @ rounded(x, E4M3, (0,), True)
    swap_linears(model, ["wq"], PrecisionConfig(linear=linear, emulate=True), CPU)
    assert type(model["kept"]) is nn.Linear and type(model["wq"]) is not nn.Linear
    assert [name for name, _ in model.named_parameters()] == ["wq.weight", "kept.weight"]
    assert model["wq"].weight is plain.weight
    inputs = x.clone().requires_grad_()
    output = model["wq"](inputs)
    output.backward(g)
    for found, expected in ((output, y), (inputs.grad, gx), (plain.weight.grad, gw)):
        assert difference(found, expected) < 1e-6
    assert 0.01 < difference(output, x.double() @ w.double().T) < 0.05


# Error of the gradients against bfloat16: of all, and of the weights of swapped linears. Tensorwise rounds
# gradients to two bits of mantissa, the others to three; rowwise_hp rounds them once less.
ERRORS = {
    "float8_tensorwise": (1e-2, 0.09),
    "float8_rowwise": (1e-2, 0.065),
    "float8_rowwise_hp": (1e-2, 0.05),
    "mxfp8": (1e-2, 0.065),
}


@pytest.mark.parametrize("linear", RECIPES)
def test_against_bfloat16(pool: RankPool, linear: str) -> None:
    expected = alone(pool, "precision.param_dtype=bfloat16")
    found = alone(pool, *precision_of(linear, "bfloat16"))
    assert found.losses == pytest.approx(expected.losses, rel=1e-3)
    assert found.norms == pytest.approx(expected.norms, rel=2e-2)
    swapped = [name for name in expected.gradients[0] if ".attention.w" in name or ".feed_forward.w" in name]
    assert len(swapped) == 28
    all_error, swapped_error = ERRORS[linear]
    assert error(found, expected, list(expected.gradients[0])) < all_error
    assert swapped_error / 2 < error(found, expected, swapped) < swapped_error


def error(found: Trace, expected: Trace, names: list[str]) -> float:
    """Relative error of the named gradients, as one vector."""
    vectors = [
        torch.cat([t.gradients[0][name].double().flatten() for name in names]) for t in (found, expected)
    ]
    return difference(vectors[0], vectors[1])


# A layout, and the number of rows per forward pass of its ranks. The single process uses the same number,
# because scales are computed over all rows of a forward pass.
LAYOUTS = {
    "fsdp": ("parallelism=fsdp parallelism.dp_shard=2", 2),
    "pp": ("parallelism=pp", 1),
    "tp": ("parallelism=tp", 4),
    "fsdp_tp": ("parallelism=fsdp_tp", 2),
}


CASES = [
    *((linear, layout) for linear in ("float8_tensorwise", "mxfp8") for layout in LAYOUTS),
    *((linear, "fsdp_tp") for linear in ("float8_rowwise", "float8_rowwise_hp")),
]
CORE = [("float8_tensorwise", "fsdp_tp"), ("float8_rowwise_hp", "fsdp_tp")]


@pytest.mark.parametrize("case", rest_is_thorough(CASES, *CORE), ids="-".join)
def test_layout_agrees_with_one_process(pool: RankPool, case: tuple[str, str]) -> None:
    """In float32, with the tolerance of layouts without float8, except under tensor parallelism.

    Tensor parallelism adds in another order, so a value between two float8 values may be rounded to the other
    one. In the two-bit gradients of tensorwise, one such value changes a weight's gradient by half a percent.
    """
    linear, layout = case
    overrides, rows = LAYOUTS[layout]
    expected = alone(pool, *precision_of(linear), f"training.local_batch_size={rows}")
    job = job_of(*precision_of(linear), *overrides.split())
    found = pool.run(job.world_size, trace, job.to_json(), 1)
    tolerance = 1e-2 if layout in ("tp", "fsdp_tp") else 1e-6
    verdict = compare(layout, job.world_size, expected, found, (1e-6, tolerance))
    require_agreement(verdict)
    assert verdict.norm < 1e-6


def test_scales_depend_on_the_rows_of_a_forward_pass(pool: RankPool) -> None:
    """Another number of rows gives other numbers, so the test above is meaningful."""
    two = alone(pool, *precision_of("float8_tensorwise"), "training.local_batch_size=2")
    four = alone(pool, *precision_of("float8_tensorwise"), "training.local_batch_size=4")
    assert not compare("rows", 1, two, [four], (1e-3, 1e-2)).passed
    # mxfp8: the scale of a block of 32 values does not depend on other rows.
    two, four = (alone(pool, *precision_of("mxfp8"), f"training.local_batch_size={n}") for n in (2, 4))
    require_agreement(compare("rows", 1, two, [four], (1e-6, 1e-6)))


def test_tensor_parallelism_that_gathers_float8(pool: RankPool) -> None:
    """GPUs cast, then gather; the result equals that of gathering, then casting."""
    job = job_of(*precision_of("float8_tensorwise", "bfloat16"), "parallelism=fsdp_tp")
    [expected, *_] = pool.run(4, trace, job.to_json(), 1)
    found = pool.run(4, trace_with_float8_gathers, job.to_json(), 1)
    verdict = compare("float8 gathers", 4, expected, found, (1e-6, 1e-6))
    require_agreement(verdict)


def outcomes(pool: RankPool, *overrides: str) -> list[Outcome]:
    job = job_of(*overrides)
    return pool.run(job.world_size, train, job.to_json(), 3)


def assert_same(left: list[Outcome], right: list[Outcome]) -> None:
    for rank, (a, b) in enumerate(zip(left, right, strict=True)):
        assert (a.losses, a.norms) == (b.losses, b.norms)
        assert_equal(a.weights, b.weights, f"rank {rank}")


@pytest.mark.parametrize("layout", rest_is_thorough(["fsdp_tp", "hsdp", "fsdp"], "fsdp"))
def test_gathering_weights_in_float8(pool: RankPool, layout: str) -> None:
    """Bitwise equal to casting after the gather, in float32; precomputed scales change nothing."""
    tensorwise = (*precision_of("float8_tensorwise"), *f"parallelism={layout}".split())
    gathered = outcomes(pool, *tensorwise, "precision.enable_fsdp_float8_all_gather=true")
    ahead = "precision.precompute_float8_dynamic_scale_for_fsdp=true"
    assert_same(gathered, outcomes(pool, *tensorwise))
    assert_same(gathered, outcomes(pool, *tensorwise, "precision.enable_fsdp_float8_all_gather=true", ahead))


@pytest.mark.parametrize("linear", rest_is_thorough(["float8_tensorwise", "mxfp8"], "float8_tensorwise"))
def test_recomputation_and_compile_change_nothing(pool: RankPool, linear: str) -> None:
    float8 = (*precision_of(linear, "bfloat16"), "parallelism=fsdp", "model.n_layers=2")
    plain = outcomes(pool, *float8)
    assert_same(outcomes(pool, *float8, "activation_checkpoint=selective_op"), plain)
    assert_same(outcomes(pool, *float8, "compile=on", "compile.backend=aot_eager"), plain)


def test_a_head_in_float8(pool: RankPool) -> None:
    """If the filter does not match it, the head multiplies in float8."""
    float8 = (*precision_of("float8_rowwise"), "precision.filter_fqns=[wk]")
    head = alone(pool, *float8).gradients[0]["output.weight"]
    plain = alone(pool, *precision_of("float8_rowwise")).gradients[0]["output.weight"]
    assert 0.01 < difference(head, plain.double()) < 0.1


def test_gathering_in_float8_skips_a_rounding_to_bfloat16(pool: RankPool) -> None:
    """So the field is part of the numerics."""
    tensorwise = (*precision_of("float8_tensorwise", "bfloat16"), "parallelism=fsdp")
    option = "precision.enable_fsdp_float8_all_gather=true"
    assert job_of(*tensorwise).numerics_id != job_of(*tensorwise, option).numerics_id
    [dynamic, *_], [gathered, *_] = outcomes(pool, *tensorwise), outcomes(pool, *tensorwise, option)
    assert dynamic.losses != gathered.losses
    assert dynamic.losses == pytest.approx(gathered.losses, rel=1e-3)
