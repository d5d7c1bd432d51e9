"""Steps of scheduled sizes: gradients equal those of a job of these sizes, and metrics count their tokens."""

import jobs
import pytest
import torch
import yaml
from equal import assert_equal
from jobs import random_batch, tiny

from harness.metrics.mfu import Efficiency, Peak
from harness.model.accounting import account
from harness.train.engine import Engine
from harness.train.setup import process_group

CPU = torch.device("cpu")
FULL = ("training.seq_len=64", "training.global_batch_size=4", "training.local_batch_size=2")
SCHEDULE = (
    "schedule.batch_size=[{until_step:2,sequences:2}]",
    "schedule.seq_len=[{until_step:3,tokens:16}]",
)
# The auxiliary loss is a mean over the sequences of a step. A window is wider than the shorter sequences. In
# Llama 4 temperatures depend on positions, and there are chunks.
MODELS = yaml.safe_load("""
dense: model=llama3_tiny
experts_mtp: model=deepseek_v3_debug model.mtp.depth=1 model.moe.aux_loss_coeff=0.1
window_sinks: model=gpt_oss_debug model.attention.window=24
positions: model=llama4_debug
states: model=qwen3_next_debug
chunked_loss: model=llama3_tiny training.loss_chunks=3
recomputed: model=llama3_tiny activation_checkpoint=full
""")


def gradients(engine, rows, length):
    loss = engine.gradients(random_batch(rows, length, rows)).loss
    found = [
        parameter.grad.clone() for parameter in engine.parameters if parameter.grad is not None
    ]
    engine.optimizer.zero_grad()
    engine.balance.update_biases(0.0)
    return loss, found


@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_that_of_a_job_of_its_sizes(model):
    options = [*MODELS[model].split(), "model.moe.balance_coeff=0"]
    job = tiny(*FULL, *SCHEDULE, *options)
    with process_group(job, CPU):
        scheduled, engines = Engine(job, CPU), {}
        for rows, length in ((2, 16), (4, 16), (4, 64), (2, 64), (4, 16)):
            sizes = (f"training.seq_len={length}", f"training.global_batch_size={rows}")
            if sizes not in engines:
                engines[sizes] = Engine(tiny(*sizes, "training.local_batch_size=2", *options), CPU)
            loss, expected = gradients(engines[sizes], rows, length)
            found, tensors = gradients(scheduled, rows, length)
            assert found == loss
            assert_equal(tensors, expected)


def test_rows_count_the_tokens_of_their_steps(tmp_path):
    options = (
        *FULL,
        *SCHEDULE,
        "metrics.warmup_steps=0",
        "validation.interval=1",
        "validation.steps=1",
    )
    run = jobs.train(tmp_path, "training.tokens=1000", *options)
    rows = [row for row in run.rows if "loss" in row]
    # 2 x 16, 2 x 16, 4 x 16, then 4 x 64 until 1000 tokens are trained.
    assert [row["tokens"] for row in rows] == [32, 64, 128, 384, 640, 896, 1152]
    assert [row["valid_tokens"] for row in rows] == [32, 32, 64, *[256] * 4]
    assert [row["schedule.batch_size"] for row in rows] == [2, 2, *[4] * 5]
    assert [row["schedule.seq_len"] for row in rows] == [*[16] * 3, *[64] * 4]
    result = run.folder.row
    assert (result["step"], result["tokens"]) == (7, 1152)
    # Step 4, the first with 64 tokens, counts as warm-up.
    assert result["window.window_tokens"] == 128 + 3 * 256
    flops = [account(run.job.model, length).flops_per_token_full for length in (16, 64)]
    assert result["flops_per_token_full"] == pytest.approx((128 * flops[0] + 768 * flops[1]) / 896)


def test_utilization_counts_attention_at_each_length():
    model = tiny().model
    efficiency = Efficiency(model, 64, Peak(1e9, "made up"), world_size=2)
    short, full = (account(model, length).flops_per_token_full for length in (16, 64))
    assert efficiency.row(1000.0, {})["mfu"] == pytest.approx(500 * full / 1e9)
    mixed = efficiency.row(1000.0, {16: 10, 64: 30})
    assert mixed["mfu"] == pytest.approx(500 * (0.25 * short + 0.75 * full) / 1e9)
    assert efficiency.row(None, {16: 10})["mfu"] is None


def test_a_compiled_run_compiles_once_for_each_length(tmp_path):
    compiled = ("compile=on", "compile.backend=aot_eager", "training.steps=5")
    run = jobs.train(tmp_path, *FULL, *SCHEDULE, *compiled)
    assert run.folder.row["recompiles"] == 0
