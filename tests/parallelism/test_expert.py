"""MoE models on expert-parallel layouts against one process; and tests that sabotage is detected."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from jobs import batches_of
from layouts import layout, reference, require_parity
from waits import ON_HOST, waits

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.config.pipeline import split_modules
from harness.config.training import ROUTINGS
from harness.data.batch import Batch
from harness.model.decoder import Decoder
from harness.model.kernels import SdpaKernel
from harness.parallelism.activation_checkpoint import apply_activation_checkpoint
from harness.parallelism.expert import (
    ExpertExchange,
    moved,
    places_by_expert,
    places_in_messages,
)
from harness.tools.parity.parity import single_process
from harness.tools.plan.loads import rows_of_experts
from harness.train.engine import Engine
from harness.util.errors import CapacityError

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
    ranks = job.parallelism.ep
    layers = [row.view(ranks, -1).sum(1).tolist() for row in engine.balance.load_ME]
    fullest = [max(loads) * ranks / sum(loads) for loads in layers]
    shown = [metrics.get(f"moe.rank_load_max.{layer}") for layer in job.model.expert_layers]
    assert shown == (pytest.approx(fullest) if ranks > 1 else [None] * len(fullest))
    assert metrics.get("moe.rank_load_max") == (max(shown) if ranks > 1 else None)
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


@pytest.mark.parametrize("room", [1, 5, 9, 24])
@pytest.mark.parametrize("tokens", [0, 1, 17, 24])
def test_messages_have_rows_in_order_then_zeros(room, tokens):
    """Rows of 3 ranks with 4 experts each; the rest of 24 are padding, which takes no place."""
    experts_R = torch.randint(0, 12, (tokens,)).sort().values
    length_G = torch.bincount(experts_R // 4, minlength=3)
    x_RC = torch.arange(1.0, 25).unsqueeze(1).requires_grad_()
    rows_P, places_R = places_in_messages(length_G, 24, room)
    messages = moved(x_RC, rows_P, places_R)
    expected = torch.zeros(3, room)
    for message, rows in zip(expected, x_RC[:tokens, 0].split(length_G.tolist()), strict=True):
        message[: len(rows)] = rows[:room].detach()
    assert torch.equal(messages.view(3, room), expected)
    back = moved(messages, places_R, rows_P)
    sent = torch.isin(x_RC, expected) & (x_RC <= tokens)
    assert torch.equal(back, x_RC * sent)
    # A place that is empty gives no gradient, and a row without a place gets none.
    messages.backward(torch.full_like(messages, 2))
    assert torch.equal(x_RC.grad, 2.0 * sent)


@pytest.mark.parametrize("room", [3, 8, 20])
def test_rows_of_messages_are_sorted_by_expert_and_empty_places_last(room):
    got_GE = torch.randint(0, 6, (3, 4))
    place_P, length_E = places_by_expert(got_GE, room)
    numbers = [
        torch.arange(5).repeat_interleave(F.pad(row, (0, 1), value=room))[:room] for row in got_GE
    ]
    experts_P = torch.cat(numbers)
    assert torch.equal(place_P.argsort(), experts_P.sort(stable=True).indices)
    assert torch.equal(length_E, torch.bincount(experts_P, minlength=5)[:4])


@pytest.mark.parametrize(
    "name", ["fsdp_ep_capacity_recompute_full", "fsdp_ep_pp_zbv_capacity", "ep_capacity_accumulate"]
)
def test_with_a_capacity_the_host_reads_no_lengths(pool, name):
    job = layout(name, DEEPSEEK)
    assert [reads for _, reads in pool.run(job.world_size, stepped, job.to_json())] == [
        0
    ] * job.world_size


def exchanged(job_json):
    """Rows that this rank sends to each rank of experts in two steps, by call."""
    found = []
    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    batch = batches_of(engine.job, engine.rows).next()
    lengths = ExpertExchange._lengths

    def seen(exchange, given, got, rows):
        found.append(given.sum(1).tolist())
        return lengths(exchange, given, got, rows)

    with mock.patch.object(ExpertExchange, "_lengths", seen):
        for _ in range(2):
            engine.evaluate(batch)
            engine.update(engine.gradients(batch).norm)
    return found


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize(
    "name", ["ep_accumulate", "fsdp_tp_ep", "fsdp_cp_gather_ep", "fsdp_tp_ep_experts"]
)
def test_rows_of_ranks_are_those_of_the_plan(pool, name, routing):
    """A validation has the rows of the step after it."""
    job = layout(name, "model=qwen3_moe_debug", f"debug.routing={routing}")
    ranks = job.parallelism
    copies = ranks.tp if ranks.splits_experts else 1
    for rank, sent in enumerate(pool.run(job.world_size, exchanged, job.to_json())):
        group, sender = divmod(rank // copies, ranks.ep)
        expected = []
        for step in (1, 2):
            counts = [rows_of_experts(job, layer, step) for layer in job.model.expert_layers]
            rows = [each[group, sender].view(ranks.ep, -1).sum(1).tolist() for each in counts]
            expected += rows * 2 * job.accumulation_steps
        assert sent == expected


def validated(job_json):
    """The error of a validation on experts that get all rows of one rank."""
    engine = Engine(Job.from_json(job_json), torch.device("cpu"))
    tokens = torch.full((len(engine.rows), engine.length), dist.get_rank())
    with pytest.raises(CapacityError) as refused:
        engine.evaluate(Batch(tokens, tokens))
    return str(refused.value)


def test_a_validation_without_room_is_refused(pool):
    """Equal tokens have equal experts."""
    job = layout("ep_capacity", "model=qwen3_moe_debug")
    said = set(pool.run(job.world_size, validated, job.to_json()))
    assert len(said) == 1 and "=1.3: a validation needs " in said.pop()
