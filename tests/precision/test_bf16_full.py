"""precision=bf16_full: dtypes, and agreement of layouts; and optimizer.in_backward."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from equal import assert_equal
from jobs import tiny
from precision_runs import Outcome, most_gradients_in_memory, train
from tiers import rest_is_thorough

from harness.config.job import Job
from harness.launch.pool import RankPool

SMALL = ("training.steps=10", "training.seq_len=64", "training.global_batch_size=4", "data.mask_fraction=0.3")
STEPS = 4


@cache
def job_of(*overrides: str) -> Job:
    return tiny(*SMALL, *overrides)


def outcomes(pool: RankPool, *overrides: str) -> list[Outcome]:
    job = job_of(*overrides)
    return pool.run(job.world_size, train, job.to_json(), STEPS)


LAYOUTS = ["fsdp parallelism.dp_shard=4", "tp", "pp", "fsdp_tp"]


@pytest.mark.parametrize("layout", rest_is_thorough(LAYOUTS, "pp"))
def test_layouts_agree(pool: RankPool, layout: str) -> None:
    [alone] = outcomes(pool, "precision=bf16_full")
    assert {weight.dtype for weight in alone.weights.values()} == {torch.bfloat16}
    assert alone.optimizer_dtypes == {torch.bfloat16}
    for each in outcomes(pool, "precision=bf16_full", *f"parallelism={layout}".split()):
        # The tolerances of bfloat16 in harness parity.
        assert each.losses == pytest.approx(alone.losses, rel=1e-3)
        assert each.norms == pytest.approx(alone.norms, rel=5e-2)
        assert each.optimizer_dtypes == {torch.bfloat16}
        for name, weight in each.weights.items():
            difference = (weight - alone.weights[name]).float().norm() / alone.weights[name].float().norm()
            assert difference < 1e-2, name


def test_it_is_not_mixed_precision(pool: RankPool) -> None:
    [full], [mixed] = outcomes(pool, "precision=bf16_full"), outcomes(pool, "precision=bf16")
    assert {weight.dtype for weight in mixed.weights.values()} == {torch.float32}
    # Equal up to rounding at first; then updates smaller than half a bfloat16 step are lost.
    assert full.losses[0] == pytest.approx(mixed.losses[0], rel=1e-3)
    assert full.losses[1:] != mixed.losses[1:]


KINDS = {
    "fp32": [],
    "bf16": ["precision=bf16", "optimizer.state_dtype=bfloat16"],
    "bf16_full": ["precision=bf16_full"],
}


IN_BACKWARD = [
    ("single", "fp32"),
    ("tp", "fp32"),
    ("hsdp", "bf16"),
    ("fsdp_tp", "bf16_full"),
    ("fsdp parallelism.cpu_offload=true", "fp32"),
]


@pytest.mark.parametrize(
    "case", rest_is_thorough(IN_BACKWARD, *IN_BACKWARD[:1], *IN_BACKWARD[3:]), ids="-".join
)
def test_update_in_backward_is_the_update_after_it(pool: RankPool, case: tuple[str, str]) -> None:
    """Bitwise, except the norm, whose squares are added in another order."""
    layout, kind = case
    overrides = (*KINDS[kind], *f"parallelism={layout}".split(), "training.max_norm=0")
    expected = outcomes(pool, *overrides)
    found = outcomes(pool, *overrides, "optimizer.in_backward=true")
    for rank, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.losses == b.losses
        assert a.norms == pytest.approx(b.norms, rel=1e-12)
        assert_equal(a.weights, b.weights, f"rank {rank}")
        assert (a.gradients_left, b.gradients_left > 0) == (0, True)


@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_one_gradient_at_a_time_is_in_memory(pool: RankPool, layout: str) -> None:
    """At every update, no other parameter has a gradient."""
    job = job_of(f"parallelism={layout}", "training.max_norm=0", "optimizer.in_backward=true")
    assert set(pool.run(job.world_size, most_gradients_in_memory, job.to_json())) == {1}
