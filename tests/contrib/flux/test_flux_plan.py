"""The plan of Flux: times of pictures."""

from __future__ import annotations

from harness.compose.composer import compose_job
from harness.tools.plan.make import make_plan


def test_time_of_a_picture_grows_with_its_tokens() -> None:
    """The published model on 16 GPUs: more pixels take more time, and MFU stays possible."""
    times = []
    for tokens in (256, 1024, 4096):
        plan = make_plan(
            compose_job(
                [
                    *("model=flux_dev", "data=latents_synthetic", f"training.seq_len={512 + tokens}"),
                    *("parallelism=fsdp", "parallelism.dp_shard=16", "precision=bf16", "compile=on"),
                    *("activation_checkpoint=full", "cluster=slurm_h100", "cluster.nodes=2"),
                    *("training.local_batch_size=4", "training.global_batch_size=64"),
                ]
            )
        )
        assert plan.speed is not None and plan.speed.mfu is not None and 0.1 < plan.speed.mfu < 0.6
        times.append(plan.speed.step_seconds)
    assert times[0] < times[1] < times[2]
    assert plan.accounting.parameters == 11_901_408_320
