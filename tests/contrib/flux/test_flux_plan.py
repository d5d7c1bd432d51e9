"""The plan of Flux against the tensors and products of a step that is really built."""

from __future__ import annotations

import pytest
from tiers import rest_is_thorough

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.model.accounting import account
from harness.tools.plan.fake import cpu_version
from harness.tools.plan.fake_step import extrapolated, fake_steps, statistics_of
from harness.tools.plan.make import make_plan
from harness.tools.plan.memory import rank_memory
from harness.tools.plan.verify import verify

# Wide enough that activations, and not the batch, decide.
WIDE = (
    *("model=flux_debug", "model.dim=512", "model.ffn_hidden_dim=2048", "model.options.axes_dims=[32,48,48]"),
    *("model.n_layers=5", "data=latents_synthetic", "training.seq_len=272", "cluster.device=cpu"),
    *("training.global_batch_size=16", "training.local_batch_size=4"),
)
PEAKS = {
    "single": (),
    "fsdp": ("parallelism=fsdp", "parallelism.dp_shard=4"),
    "fsdp_ema": ("parallelism=fsdp", "parallelism.dp_shard=4", "optimizer.ema_decay=0.999"),
    "fsdp_full": ("parallelism=fsdp", "parallelism.dp_shard=4", "activation_checkpoint=full"),
    "fsdp_bf16_op": (
        *("parallelism=fsdp", "parallelism.dp_shard=4", "precision=bf16"),
        "activation_checkpoint=selective_op",
    ),
    "fsdp_tp": ("parallelism=fsdp_tp", "training.local_batch_size=8"),
    "cp": ("parallelism=cp", "parallelism.cp_method=ulysses"),
}


def job_of(*overrides: str) -> Job:
    return compose_job([*WIDE, *overrides])


@pytest.mark.parametrize("name", rest_is_thorough(PEAKS, "fsdp_tp", "fsdp_bf16_op"))
def test_planned_memory_is_that_of_the_step(name: str) -> None:
    job = job_of(*PEAKS[name])
    for step, planned in zip(fake_steps(cpu_version(job)[0]), rank_memory(job), strict=True):
        assert step.peak == pytest.approx(planned.peak - planned.kinds["runtime"], rel=0.06)
    assert verify(make_plan(job), step=True).problems == []


@pytest.mark.thorough
def test_flops_and_extrapolation() -> None:
    """From blocks of both kinds to many of them."""
    job, _ = cpu_version(job_of("model.n_layers=9", "model.options.double_layers=3"))
    found, expected = extrapolated(job, 0), statistics_of(job, 0)
    for key, value in expected.items():
        assert found[key] == pytest.approx(value, rel=0.01 if key[0] in ("peak", "kept") else 1e-9), key
    counted = account(job.model, 272).flops_per_token_full * 272 * job.global_batch_size
    assert expected["flops",] == pytest.approx(counted, rel=0.01)


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
