"""Optimizers of other packages resume as themselves, or are refused after the first update."""

import pytest
from outside_optimizers import installed, train_outside
from resumable_runs import SMALL

from harness.compose.composer import compose_job
from harness.launch.pool import RankFailed

STEPS = 6


def run(pool, run_dir, *overrides, stop=None):
    run_dir.mkdir(parents=True, exist_ok=True)
    with installed():
        job = compose_job([*SMALL, f"training.steps={STEPS}", f"runs_dir={run_dir}", *overrides])
    return pool.run(job.world_size, train_outside, job.to_json(), str(run_dir), stop)


LAYOUTS = {
    "fsdp_tp": ["parallelism=fsdp_tp", "parallelism.dp_shard=2", "parallelism.tp=2"],
    "pp": ["parallelism=pp", "parallelism.pp=2", "checkpoint=async", "optimizer.ema_decay=0.9"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_numbers_in_groups_are_resumed(pool, tmp_path, layout):
    overrides = [*LAYOUTS[layout], "optimizer.kind=counting"]
    straight = run(pool, tmp_path / "straight", *overrides)
    run(pool, tmp_path / "stopped", *overrides, stop=3)
    resumed = run(pool, tmp_path / "stopped", *overrides)
    for whole, after in zip(straight, resumed, strict=True):
        assert after.resumed_from is not None
        assert after.losses == {step: loss for step, loss in whole.losses.items() if step > 3}
        assert after.state == whole.state
        for key in ("step", "estimate", "scale"):
            assert any(
                name.startswith("optimizer.group.") and name.endswith(key) for name in after.state
            )


@pytest.mark.parametrize(
    "kind, text", [("hoarding", "keeps 'last'"), ("listing", "keeps history=list")]
)
def test_what_a_checkpoint_would_lose_is_refused_after_the_first_update(pool, tmp_path, kind, text):
    """And no later: the second update of these optimizers raises another error."""
    with pytest.raises(RankFailed, match=f"optimizer.kind={kind}: {text}"):
        run(pool, tmp_path, f"optimizer.kind={kind}", "parallelism=fsdp", "parallelism.dp_shard=2")
