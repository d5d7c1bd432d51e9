"""precision=bf16_full: dtypes, and agreement of layouts."""

import pytest
import torch
from jobs import tiny, train_engine

SMALL = (
    "training.steps=10",
    "training.seq_len=64",
    "training.global_batch_size=4",
    "data.mask_fraction=0.3",
)


def trained(pool, *overrides):
    job = tiny(*SMALL, *overrides)
    return pool.run(job.world_size, train_engine, job, 4)


def test_everything_is_bfloat16_on_every_rank(pool):
    [alone], [mixed] = trained(pool, "precision=bf16_full"), trained(pool, "precision=bf16")
    assert {weight.dtype for weight in mixed.weights.values()} == {torch.float32}
    # Equal up to rounding at first; then updates smaller than half a bfloat16 step are lost.
    assert alone.losses[0] == pytest.approx(mixed.losses[0], rel=1e-3)
    assert alone.losses[1:] != mixed.losses[1:]
    for each in (alone, *trained(pool, "precision=bf16_full", "parallelism=pp")):
        # The tolerances of bfloat16 in harness parity.
        assert each.losses == pytest.approx(alone.losses, rel=1e-3)
        assert each.norms == pytest.approx(alone.norms, rel=5e-2)
        states = [
            value
            for state in each.state.values()
            for name, value in state.items()
            if name != "step"
        ]
        assert {value.dtype for value in (*states, *each.weights.values())} == {torch.bfloat16}
        for name, weight in each.weights.items():
            difference = (weight - alone.weights[name]).float().norm() / alone.weights[
                name
            ].float().norm()
            assert difference < 1e-2, name
