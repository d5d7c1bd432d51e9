"""MoE models on expert-parallel layouts against one process; and tests that sabotage is detected."""

from unittest import mock

import pytest
import torch
from jobs import batches_of
from layouts import layout, reference, require_parity
from waits import ON_HOST, waits

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.pipeline import split_modules
from harness.data.batch import Batch
from harness.model.decoder import Decoder
from harness.model.kernels import SdpaKernel
from harness.parallelism.activation_checkpoint import apply_activation_checkpoint
from harness.tools.parity.parity import single_process

DEEPSEEK = "model=deepseek_v3_debug"


def test_balancing_biases_are_bitwise_equal_after_twenty_steps(pool):
    job = layout("ep", DEEPSEEK)
    require_parity(pool, "ep", job, steps=20)
    results = reference(pool, job, 20)[-1]
    biases = {name: value for name, value in results.items() if "balance_bias" in name}
    assert len(biases) == len(job.model.expert_layers)
    # Biases changed, because routing was uneven.
    assert all(bias.any() for bias in biases.values()), biases


def stepped(job_json):
    """Tokens routed to each expert in a step, and how often the host reads lengths from its device."""
    from harness.train.engine import Engine

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    batch = batches_of(job, engine.rows).next()
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
def test_every_token_is_counted_once_and_lengths_read_once_per_layer(pool, name):
    """Also with recomputation, and a validation before (trap 18)."""
    job = layout(name, DEEPSEEK)
    [(expected, _)] = pool.run(1, stepped, single_process(job).to_json())
    assert {sum(row) for row in expected} == {8 * 64 * job.model.moe.top_k}
    found = pool.run(job.world_size, stepped, job.to_json())
    assert [loads for loads, _ in found] == [expected] * job.world_size
    if job.parallelism.ep > 1:
        reads = len(job.model.expert_layers) * job.accumulation_steps
        assert [number for _, number in found] == [reads] * job.world_size


def gathers_and_waits(job_json):
    """FSDP's all-gathers of a step, by a parameter of each, and the waits of experts for their lengths."""
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as fsdp

    from harness.parallelism.expert import ExpertExchange
    from harness.train.engine import Engine

    job, calls = Job.from_json(job_json), mock.Mock()
    calls.gather.side_effect, calls.wait.side_effect = (
        fsdp.foreach_all_gather,
        ExpertExchange._lengths,
    )
    engine = Engine(job, torch.device("cpu"))
    tokens = torch.zeros(len(engine.rows), job.training.seq_len, dtype=torch.int64)
    with (
        mock.patch.object(fsdp, "foreach_all_gather", calls.gather),
        mock.patch.object(ExpertExchange, "_lengths", lambda *args: calls.wait(*args)),
    ):
        engine.gradients(Batch(tokens, tokens))
    return [
        args[0][0]._param_fqn if name == "gather" else name for name, args, _ in calls.mock_calls
    ]


def test_the_next_block_is_gathered_before_experts_wait(pool):
    job = layout("fsdp_ep_recompute_full", DEEPSEEK)
    events = pool.run(job.world_size, gathers_and_waits, job.to_json())[0]
    waits = [place for place, event in enumerate(events) if event == "wait"]
    for place, layer in zip(
        waits, job.model.expert_layers, strict=False
    ):  # then those of recomputation
        last = layer + 1 == job.model.n_layers
        wanted = (
            ["norm."] if last else [f"layers.{layer + 1}.att", f"layers.{layer + 1}.moe.experts."]
        )
        assert all(any(name.startswith(each) for name in events[:place]) for each in wanted), events


@pytest.mark.parametrize("mode", ["none", "full", "selective_op"])
def test_experts_in_float32_wait_once_per_layer(mode):
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
