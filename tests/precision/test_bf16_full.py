"""precision=bf16_full: dtypes, and agreement of layouts; and optimizer.in_backward."""

from __future__ import annotations

import pytest
import torch
from equal import assert_equal
from jobs import Trained, tiny, train_engine

from harness.config.job import Job
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankPool
from harness.train.engine import Engine
from harness.train.objective import loader_of

SMALL = ("training.steps=10", "training.seq_len=64", "training.global_batch_size=4", "data.mask_fraction=0.3")


def trained(pool: RankPool, *overrides: str) -> list[Trained]:
    job = tiny(*SMALL, *overrides)
    return pool.run(job.world_size, train_engine, job, 4)


def test_everything_is_bfloat16_on_every_rank(pool: RankPool) -> None:
    [alone], [mixed] = trained(pool, "precision=bf16_full"), trained(pool, "precision=bf16")
    assert {weight.dtype for weight in mixed.weights.values()} == {torch.float32}
    # Equal up to rounding at first; then updates smaller than half a bfloat16 step are lost.
    assert alone.losses[0] == pytest.approx(mixed.losses[0], rel=1e-3)
    assert alone.losses[1:] != mixed.losses[1:]
    for each in (alone, *trained(pool, "precision=bf16_full", "parallelism=pp")):
        # The tolerances of bfloat16 in harness parity.
        assert each.losses == pytest.approx(alone.losses, rel=1e-3)
        assert each.norms == pytest.approx(alone.norms, rel=5e-2)
        states = [value for state in each.state.values() for name, value in state.items() if name != "step"]
        assert {value.dtype for value in (*states, *each.weights.values())} == {torch.bfloat16}
        for name, weight in each.weights.items():
            difference = (weight - alone.weights[name]).float().norm() / alone.weights[name].float().norm()
            assert difference < 1e-2, name


@pytest.mark.parametrize(
    "options",
    [
        "precision=fp32",
        "parallelism=fsdp_tp precision=bf16_full",
        "parallelism=fsdp parallelism.cpu_offload=true",
    ],
)
def test_update_in_backward_is_the_update_after_it(pool: RankPool, options: str) -> None:
    """Bitwise, except the norm, whose squares are added in another order."""
    overrides = (*options.split(), "training.max_norm=0")
    expected = trained(pool, *overrides)
    found = trained(pool, *overrides, "optimizer.in_backward=true")
    for rank, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert a.losses == b.losses
        assert a.norms == pytest.approx(b.norms, rel=1e-12)
        assert_equal(a.weights, b.weights, f"rank {rank}")
        assert (a.gradients_left, b.gradients_left > 0) == (0, True)


def gradients_during_updates(job: Job) -> list[int]:
    """Number of parameters that have a gradient at each update in backward."""
    engine = Engine(job, torch.device("cpu"))
    counts: list[int] = []
    update = engine.optimizer.step

    def step() -> None:
        counts.append(sum(parameter.grad is not None for parameter in engine.parameters))
        update()

    engine.optimizer.step = step  # type: ignore[method-assign]
    engine.gradients(loader_of(job, build_tokenizer(job.tokenizer), engine.rows).next())
    return [*counts, len(engine.parameters) - len(counts)]


@pytest.mark.parametrize("layout", ["single", "fsdp"])
def test_one_gradient_at_a_time_is_in_memory(pool: RankPool, layout: str) -> None:
    job = tiny(*SMALL, f"parallelism={layout}", "training.max_norm=0", "optimizer.in_backward=true")
    for *counts, not_updated in pool.run(job.world_size, gradients_during_updates, job):
        assert set(counts) == {1} and not_updated == 0
