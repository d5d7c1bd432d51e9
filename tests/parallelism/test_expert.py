"""MoE models on expert-parallel layouts against one process; and tests that sabotage is detected."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from layouts import layout, reference, require_parity, verdict_of
from waits import ON_HOST, waits

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.pipeline import split_modules
from harness.launch.pool import RankPool
from harness.model.decoder import Decoder
from harness.model.kernels import SdpaKernel
from harness.parallelism.activation_checkpoint import apply_activation_checkpoint
from harness.tools.parity.parity import Trace, single_process, trace

DEEPSEEK = "model=deepseek_v3_debug"


def test_balancing_biases_are_bitwise_equal_after_twenty_steps(pool: RankPool) -> None:
    job = layout("ep", DEEPSEEK)
    require_parity(pool, "ep", job, steps=20)
    biases = reference(pool, job, 20).biases
    assert len(biases) == len(job.model.expert_layers)
    # Biases changed, because routing was uneven.
    assert all(bias.any() for bias in biases.values()), biases


def without_summed_counts(job_json: str, steps: int) -> Trace:
    """Sabotage: every rank updates the biases by its own counts."""
    from harness.parallelism import balance

    without_sum = SimpleNamespace(all_reduce=lambda tensor: None)
    with mock.patch.object(balance, "dist", without_sum):
        return trace(job_json, steps)


def with_all_biases_of_outputs(job_json: str, steps: int) -> Trace:
    """Sabotage: every rank adds the bias of a row-parallel product, which is then summed (trap 17)."""
    from harness.model.moe import Experts

    original = Experts.forward

    def forward(self, x_RC, load_E):  # type: ignore[no-untyped-def]
        self.output_shares = 1
        return original(self, x_RC, load_E)

    with mock.patch.object(Experts, "forward", forward):
        return trace(job_json, steps)


def with_aux_loss_of_own_tokens(job_json: str, steps: int) -> Trace:
    """Sabotage: the auxiliary loss uses the counts of this rank's part of a sequence only."""
    from harness.parallelism import expert

    with mock.patch.object(expert, "_summed", lambda groups, counts: counts):
        return trace(job_json, steps)


def with_rows_in_order_of_ranks(job_json: str, steps: int) -> Trace:
    """Sabotage: received rows stay ordered by rank instead of by expert."""
    from harness.parallelism import expert

    with mock.patch.object(expert, "transposed", lambda x, lengths: x):
        return trace(job_json, steps)


@pytest.mark.parametrize(
    ("model", "name", "sabotage"),
    [
        ("deepseek_v3_debug", "ep", without_summed_counts),
        ("gpt_oss_debug", "tp_experts", with_all_biases_of_outputs),
        ("deepseek_v3_debug", "tp_ep", with_aux_loss_of_own_tokens),
        ("deepseek_v3_debug", "ep", with_rows_in_order_of_ranks),
    ],
)
def test_sabotage_is_detected(
    pool: RankPool, model: str, name: str, sabotage: Callable[[str, int], Trace]
) -> None:
    # A weight at which the auxiliary loss is not negligible.
    overrides = [] if model == "gpt_oss_debug" else ["model.moe.aux_loss_coeff=1"]
    job = layout(name, f"model={model}", *overrides)
    require_parity(pool, name, job)
    assert not verdict_of(pool, name, job, run=sabotage).passed


def stepped(job_json: str) -> tuple[list[list[int]], int]:
    """Tokens routed to each expert in a step, and how often the host reads lengths from its device."""
    from harness.data.tokenizer import build_tokenizer
    from harness.train.engine import Engine
    from harness.train.objective import loader_of

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    batch = loader_of(job, build_tokenizer(job.tokenizer), engine.rows).next()
    engine.evaluate(batch)
    with waits() as found:
        norm = engine.gradients(batch).norm
    engine.update(norm)
    assert engine.balance.load_ME is not None
    metrics = engine.balance.metrics(engine.balance.load_ME, job.sizes.at(1).tokens)
    assert metrics["moe.dropped"] == 0
    assert metrics["moe.load_max"] > 1 > metrics["moe.load_min"]
    return engine.balance.load_ME.tolist(), found.count(ON_HOST)


@pytest.mark.parametrize("name", ["fsdp_ep_recompute_full", "pp_1f1b"])
def test_every_token_is_counted_once_and_lengths_read_once_per_layer(pool: RankPool, name: str) -> None:
    """Also with recomputation, and a validation before (trap 18)."""
    job = layout(name, DEEPSEEK)
    [(expected, _)] = pool.run(1, stepped, single_process(job).to_json())
    assert {sum(row) for row in expected} == {8 * 64 * job.model.moe.top_k}
    found = pool.run(job.world_size, stepped, job.to_json())
    assert [loads for loads, _ in found] == [expected] * job.world_size
    if job.parallelism.ep > 1:
        reads = len(job.model.expert_layers) * job.accumulation_steps
        assert [number for _, number in found] == [reads] * job.world_size


@pytest.mark.parametrize("mode", ["none", "full", "selective_op"])
def test_experts_in_float32_wait_once_per_layer(mode: str) -> None:
    """The grouped kernel does not support float32: nine products per layer are a loop over the experts."""
    model = ["model=qwen3_moe_debug", "data=synthetic", "tokenizer=bytes", "training.seq_len=32"]
    job = compose_job([*model, f"activation_checkpoint={mode}"])
    with torch.device("meta"):
        part = Decoder(job.model, 32, split_modules(job.parallelism, job.model.n_layers)[0])
        tokens = torch.zeros(2, 32, dtype=torch.int64)
    part.use_kernel(SdpaKernel)
    apply_activation_checkpoint(part, job.activation_checkpoint)
    with waits() as found:
        part(tokens).sum().backward()
    assert found == [ON_HOST] * len(job.model.expert_layers)
