"""Split backward passes under FSDP: no gradient is lost when parameters are freed in between."""

from unittest import mock

import pytest
from cases import words
from layouts import require_agreement

from harness.compose.composer import Composer
from harness.launch.pool import RankFailed
from harness.tools.parity.parity import LayoutComparer, ParityConfig, ParityJob, trace

# Schedule, when parameters are freed, where they wait, what is recomputed, the axis beside the stages.
UNGATHERED = [
    "InterleavedZeroBubble-always-device-none-dp_shard",
    "DualPipeV-always-device-none-cp",
]
TABLE = [
    *UNGATHERED,
    "1F1B-always-device-selective_op-cp",
    "GPipe-never-offload-none-dp_shard",
    "Interleaved1F1B-always-offload-selective_layer-cp",
    "InterleavedZeroBubble-never-device-full-cp",
    "ZBVZeroBubble-always-offload-full-dp_shard",
    "ZBVZeroBubble-always-device-selective_layer-cp",
    "ZBVZeroBubble-always-device-selective_op-dp_shard",
    "InterleavedZeroBubble-never-device-selective_op-cp",
    "DualPipeV-default-offload-selective_layer-dp_shard",
]
# Its split passes leave gradients of one FSDP group in two dtypes.
ONE_MICROBATCH = words("""
    model=llama4_debug precision=bf16 training.seq_len=48 training.global_batch_size=4
    parallelism=fsdp_ep_pp parallelism.dp_shard=2 parallelism.pp_schedule=ZBVZeroBubble
    parallelism.pp_microbatch_size=2
""")


def compose(*overrides):
    composer = Composer("parity", ParityJob)
    return composer.job(overrides).plain


def layout(row):
    schedule, reshard, memory, recomputed, shards = row.split("-")
    return compose(
        "parallelism=pp",
        f"parallelism.pp_schedule={schedule}",
        f"parallelism.reshard_after_forward={reshard}",
        f"parallelism.cpu_offload={str(memory == 'offload').lower()}",
        f"activation_checkpoint={recomputed}",
        f"parallelism.{shards}=2",
        "training.seq_len=32",
    )


@pytest.fixture(scope="module")
def judge(pool):
    return LayoutComparer(pool, ParityConfig(steps=2))


@pytest.mark.parametrize("row", TABLE)
def test_parameters_freed_between_passes(judge, row):
    require_agreement(judge.verdict(row, layout(row)))


def test_one_microbatch_in_bfloat16(judge):
    require_agreement(judge.verdict("one microbatch", compose(*ONE_MICROBATCH)))


def without_gathering(job_json, steps):
    """Sabotage: run torch's stage, which does not gather parameters before backward."""
    from harness.parallelism.pipeline import Stage

    with mock.patch.object(Stage, "_fsdp_modules", lambda self: []):
        return trace(job_json, steps)


def with_a_parameter_left_out(job_json, steps):
    """Sabotage: lose one gradient of the first step."""
    from harness.parallelism.execute import DirectExecutor

    original = DirectExecutor.forward_backward

    def forward_backward(self, batch, *, last):
        losses = original(self, batch, last=last)
        self.part.norm.weight.grad = None
        return losses

    with mock.patch.object(DirectExecutor, "forward_backward", forward_backward):
        return trace(job_json, steps)


@pytest.mark.parametrize(
    "row", ["InterleavedZeroBubble-always-device-none-dp_shard", "DualPipeV-always-device-none-cp"]
)
def test_a_gradient_that_a_stage_would_lose_ends_the_run(pool, row):
    with pytest.raises(
        RankFailed, match=r"LostGradientError: backward gave no gradient to .*norm\.weight"
    ):
        pool.run(4, without_gathering, layout(row).to_json(), 1)


def test_a_parameter_without_a_gradient_ends_the_run(pool):
    with pytest.raises(
        RankFailed, match=r"LostGradientError: backward gave no gradient to norm\.weight"
    ):
        pool.run(1, with_a_parameter_left_out, compose().to_json(), 1)
