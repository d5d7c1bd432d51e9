"""Flux on layouts: the same numbers as one process, exact resume, and resuming on another layout."""

import sys
from pathlib import Path

import pytest
from layouts import layout, require_parity

from harness.compose.composer import compose_job

sys.path.append(str(Path(__file__).parents[2] / "checkpoint"))
from resumable_runs import train
from tiny_flux import SMALL

GUIDED = (*SMALL, "model.options.guidance=true", "training.objective_options.caption_dropout=0.5")


# Those that split what only Flux has: two streams, and tokens of pictures.
@pytest.mark.parametrize(
    "name", ["tp_cp_ulysses", "tp_no_sequence", "fsdp_uneven", "fsdp_compiled_recompute_full"]
)
def test_layouts_agree_with_one_process(pool, name):
    require_parity(pool, name, layout(name, *GUIDED))


def run(pool, folder, *overrides, stop_after=None):
    job = compose_job([*GUIDED, f"runs_dir={folder}", *overrides])
    folder.mkdir(exist_ok=True)
    return pool.run(job.world_size, train, job.to_json(), str(folder), stop_after)


def test_stopped_and_resumed_is_bitwise_the_run_that_was_not(pool, tmp_path):
    """Noise, times and dropped captions continue, and so does the moving average of the weights."""
    common = ("parallelism=fsdp", "parallelism.dp_shard=2", "training.steps=4")
    straight = run(pool, tmp_path / "straight", *common, "checkpoint=disabled")
    first = run(pool, tmp_path / "stopped", *common, stop_after=2)
    second = run(pool, tmp_path / "stopped", *common)
    for whole, before, after in zip(straight, first, second, strict=True):
        assert before.reason == "interrupted" and str(after.resumed_from).endswith("step-2")
        assert {**before.losses, **after.losses} == whole.losses
        assert {**before.batches, **after.batches} == whole.batches
        assert after.state == whole.state
