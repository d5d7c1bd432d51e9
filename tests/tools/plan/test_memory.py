"""The plan's memory: against published runs, autograd's saved tensors, torch's allocations, inequalities."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tiers import rest_is_thorough

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[2] / "measure"))

import pass_memory as measure
from published_rows import all_rows

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.model.accounting import account
from harness.model.decoder import Decoder
from harness.model.spec import tensors
from harness.tools.plan.constants import Software
from harness.tools.plan.machine import device_of
from harness.tools.plan.memory import memory_limit, rank_memory
from harness.tools.plan.memory_parts import ActivationBytes
from harness.tools.plan.parameters import parameters_of, parameters_of_ranks, tensors_by_module
from harness.tools.plan.plan import KINDS
from harness.tools.rehearse.config import RehearseJob
from harness.util.tables import GIB

MIB = 2**20
TINY = ("model=llama3_tiny", "data=synthetic", "tokenizer=bytes", "checkpoint=disabled", "cluster.device=cpu")
LARGE = ("model=llama3_8b", "data=synthetic", "tokenizer=bytes", "precision=bf16", "cluster=slurm_h100")


def job_of(*typed: str) -> Job:
    return compose_job([*typed])


def peak(job: Job, software: Software | None = None) -> float:
    return max(rank.peak for rank in rank_memory(job, software=software))


def test_published_runs_are_met() -> None:
    """Runs without a pipeline are within 12 %, the median within 2 %; ``pytest -s`` shows the table.

    torchtitan's pipelines took 7 to 27 % more than the plan predicts. A rehearsal of the first row of table
    5, without async_tp, reserves 64.0 GiB; the plan predicts 64.9, torchtitan took 82.5.
    """
    errors, lines, pipelined = {}, [], {}
    for row in all_rows():
        planned, published = peak(row.job, row.published.software) / GIB, row.published.memory_gib
        of = pipelined if row.job.parallelism.pp > 1 else errors
        of[row.name] = planned / published - 1
        lines.append(f"{row.name:75} {planned:5.1f} {published:5.1f} {of[row.name]:+6.1%}")
    sizes = [abs(error) for error in errors.values()]
    lines.append(f"without a pipeline: median {median(sizes):.1%}, worst {max(sizes):.1%}")
    sys.stdout.write("\n".join(["", "planned GiB, published GiB, error", *lines, ""]))
    assert len(all_rows()) == 18
    assert max(sizes) <= 0.12, errors
    assert median(sizes) <= 0.02
    assert all(-0.22 <= error <= -0.06 for error in pipelined.values()), pipelined


def test_joint_ends_stay_gathered() -> None:
    job = job_of(*LARGE, "parallelism=fsdp", "parallelism.dp_shard=8", "training.seq_len=8192")
    apart, joint = (rank_memory(job, software=Software(joint_ends=joint))[0] for joint in (False, True))
    ends, block = 128256 * 4096, sum(tensor.size for tensor in tensors_by_module(job.model)["layers.0"])
    # At the peak, in the loss, the embedding and the last block are in memory too, in 16 bits.
    assert joint.allocated - apart.allocated == pytest.approx(2 * (ends + block), rel=1e-6)
    # Their gather buffer is twice as large.
    assert joint.kinds["gathered"] - apart.kinds["gathered"] == pytest.approx(
        2 * (2 * ends + block), rel=1e-3
    )
    assert joint.kinds["gradients"] == apart.kinds["gradients"]
    pipelined = job_of(*LARGE, "parallelism=fsdp", "parallelism.pp=2", "parallelism.dp_shard=4")
    assert rank_memory(pipelined, software=Software(joint_ends=True)) == rank_memory(pipelined)


def test_outputs_that_a_pipeline_keeps() -> None:
    typed = ("parallelism=fsdp", "parallelism.pp=2", "parallelism.dp_shard=4", "parallelism.pp_schedule=1F1B")
    batch = ("training.seq_len=8192", "training.local_batch_size=8", "training.global_batch_size=32")
    job = job_of(*LARGE, *typed, *batch)
    new, old = (rank_memory(job, software=Software(keeps_outputs=kept)) for kept in (False, True))
    boundary, logits = 2 * 8192 * 4096, 2 * 8192 * 128256
    # Before the last of 8 microbatches 7 are done on the last stage, and 6 on the first, without inputs.
    assert old[1].allocated - new[1].allocated == 7 * (boundary + logits)
    assert old[0].allocated - new[0].allocated == 6 * boundary


def test_a_ring_that_gathers_has_the_keys_and_values_of_all_ranks() -> None:
    layout = ("parallelism=fsdp_cp", "parallelism.cp=8", "parallelism.dp_shard=1")
    ring = [*LARGE, *layout, "training.seq_len=8192", "training.local_batch_size=1"]
    late = {
        method: ActivationBytes(job_of(*ring, f"parallelism.{method}")).block(0).late_backward
        for method in ("cp_rotate_method=allgather", "cp_rotate_method=alltoall", "cp_method=ulysses")
    }
    gathers, sends, ulysses = late.values()
    tokens, queries, both = 8192 // 8, 32 * 128, 2 * 8 * 128
    assert gathers - sends == 6 * 2 * tokens * both
    assert sends - ulysses == tokens * (2 * (queries + 4 * both) + 4 * (queries + 3 * both))
    repeated = ActivationBytes(job_of(*ring), repeats_keys=True).block(0).late_backward
    # Four times as many: gathered and sent, the last step's gradients, sums; also before and after the ring.
    assert repeated - gathers == 3 * tokens * both * (2 * (8 + 2 + 2) + 4 * 3)


REHEARSED = Path(__file__).parents[3] / "tests/measure/rehearsal/results.jsonl"
FEW = ("8b_fsdp8_sel_op", "8b_fsdp8_full_c", "8b_tp8", "8b_pp2_fsdp4", "70b_fsdp64", "qwen3_30b_fsdp_ep8")


def rehearsed_ranks() -> dict[str, list[dict[str, Any]]]:
    """Rows of full-size jobs that completed, by the job's name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in map(json.loads, REHEARSED.read_text().splitlines()):
        if row["set"] == "full" and row["failure"] is None:
            found.setdefault(row["job"], []).append(row)
    return found


def errors_of(rows: list[dict[str, Any]]) -> list[float]:
    """Relative errors of the plan against the memory that torch's allocator reserved."""
    job = compose_job(rows[0]["overrides"], config_name="rehearse", schema=RehearseJob).plain
    memory = rank_memory(job)
    return [memory[row["pp_rank"]].peak / row["memory"]["reserved"] - 1 for row in rows]


@pytest.mark.parametrize("name", rest_is_thorough(rehearsed_ranks(), *FEW))
def test_reserved_memory_of_rehearsals_is_predicted(name: str) -> None:
    assert max(map(abs, errors_of(rehearsed_ranks()[name]))) <= 0.08


@pytest.mark.thorough
def test_median_error_against_rehearsals() -> None:
    errors = [error for rows in rehearsed_ranks().values() for error in errors_of(rows)]
    assert len(rehearsed_ranks()) >= 40
    assert median(map(abs, errors)) <= 0.02


def saved_by_autograd(job: Job, layer: int) -> int:
    """Bytes that autograd saves in one block's forward pass, without parameters and tables."""
    dtype = getattr(torch, job.precision.param_dtype)
    part = Decoder(job.model, job.training.seq_len)
    part.to(dtype)
    part.materialize_buffers(torch.device("cpu"))
    known = [*part.parameters(), part.rope, part.positions]
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    x_BTC = torch.randn(job.local_batch_size, job.training.seq_len, job.model.dim, dtype=dtype)
    saved: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    block = part.blocks[layer]
    mask = part._masks(None, x_BTC, part.seq_len)[block.attention.inner.spec]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x_BTC.requires_grad_(), part.rope, mask, part.positions)
    return sum(saved.values())


# Only files of other models than decoders name their architecture; those of Flux are rehearsed.
DEBUG = sorted(
    file.stem
    for file in (Path(__file__).parents[3] / "conf" / "model").glob("*_debug.yaml")
    if "\narchitecture:" not in file.read_text()
)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", DEBUG)
def test_blocks_declare_what_autograd_saves(model: str, precision: str) -> None:
    typed = ("data=synthetic", "tokenizer=bytes", "cluster.device=cpu", "training.global_batch_size=2")
    job = job_of(f"model={model}", f"precision={precision}", *typed, "training.seq_len=32")
    # Routers also save copies of small parameters and a few numbers per expert; attention with a window saves
    # its mask, T x T values.
    exact = not job.model.moe.enabled and job.model.attention.window is None
    tolerance = 0.0 if exact else 0.03 if model == "gpt_oss_debug" else 0.02
    for layer in (0, job.model.n_layers - 1):
        declared, saved = ActivationBytes(job).block(layer).kept, saved_by_autograd(job, layer)
        assert declared == pytest.approx(saved, rel=tolerance, abs=0 if tolerance else 1), layer


SIZE = (
    *("model.dim=128", "model.n_heads=4", "model.n_kv_heads=2", "model.ffn_hidden_dim=384"),
    *("model.n_layers=4", "model.vocab_size=1024", "training.seq_len=128", "training.global_batch_size=4"),
)


@pytest.mark.parametrize(
    "typed",
    [
        ["activation_checkpoint=none"],
        ["activation_checkpoint=full"],
        ["activation_checkpoint=selective_op"],
        ["activation_checkpoint=selective_layer"],
        ["activation_checkpoint=full", "precision=bf16"],
        ["training.loss_chunks=8", "model.vocab_size=4096"],
        ["training.local_batch_size=2"],
        ["training.global_batch_size=1", "training.seq_len=32"],
    ],
    ids=" ".join,
)
def test_a_pass_takes_what_torch_allocates(typed: list[str]) -> None:
    """Torch's allocator measures the pass only; parameters and optimizer state were allocated before."""
    groups = [each for each in typed if "." not in each.split("=")[0]]
    values = [each for each in typed if each not in groups]
    job = job_of(*TINY, *groups, "metrics.console=none", *SIZE, *values)
    [rank] = rank_memory(job)
    planned = rank.peak - sum(rank.kinds[kind] for kind in ("parameters", "optimizer", "runtime"))
    assert planned / MIB == pytest.approx(measure.measure_pass(job)["peak"], rel=0.03)


def test_ranks_hold_shares_of_the_model_and_its_optimizer() -> None:
    job = job_of(
        *LARGE, "parallelism=fsdp_tp_pp", *(f"parallelism.{axis}=2" for axis in ("dp_shard", "tp", "pp"))
    )
    ranks = [parameters_of(job, rank) for rank in range(2)]
    norms = (2 * job.model.n_layers + 1) * job.model.dim  # replicated by tensor parallel
    parameters = account(job.model, 8192).parameters
    assert 4 * sum(rank.held for rank in ranks) == parameters + norms
    for rank in ranks:
        assert rank.parameter_bytes == rank.gradient_bytes == 4 * rank.held
        assert rank.optimizer_bytes == 8 * rank.held + 4 * len(rank.tensors)


def test_uneven_shards_are_the_first_ranks() -> None:
    """257 rows over three ranks are 86, 86 and 85."""
    shards = ("parallelism.dp_shard=3", "training.global_batch_size=6")
    job = job_of(*TINY, "parallelism=fsdp", *shards, "model.vocab_size=257")
    tensors = {tensor.name: tensor for tensor in parameters_of(job, 0).tensors}
    assert tensors["tok_embeddings.weight"].sharded == (86, job.model.dim)


def test_experts_are_sharded_by_their_mesh() -> None:
    typed = ("model=deepseek_v3_debug", "data=synthetic", "tokenizer=bytes", "cluster.device=cpu")
    job = job_of(*typed, "parallelism=fsdp_ep", "parallelism.dp_shard=4", "parallelism.ep=2")
    tensors = {tensor.name: tensor for tensor in parameters_of(job, 0).tensors}
    experts, hidden, dim = job.model.moe.num_experts, job.model.moe.hidden_dim, job.model.dim
    layer = job.model.expert_layers[0]
    assert tensors[f"layers.{layer}.moe.experts.w1"].gathered == (experts // 2, hidden, dim)
    assert tensors[f"layers.{layer}.moe.experts.w1"].sharded == (experts // 4, hidden, dim)
    assert tensors[f"layers.{layer}.moe.experts.w1"].group == f"layers.{layer}.experts"
    assert tensors[f"layers.{layer}.moe.router.weight"].sharded == (experts // 4, dim)


def test_options_that_save_memory_do() -> None:
    batch = ("training.local_batch_size=2", "training.global_batch_size=16", "parallelism.dp_shard=8")
    base = (*LARGE, *batch, "training.seq_len=8192")
    modes = ("full", "selective_op", "selective_layer", "none")
    peaks = [peak(job_of(*base, f"activation_checkpoint={mode}")) for mode in modes]
    assert peaks == sorted(peaks)
    compiled = peak(job_of(*base, "compile=on", "compile.components=[blocks]"))
    assert compiled < peaks[-1]
    budget = [
        peak(
            job_of(
                *base,
                "compile=on",
                "activation_checkpoint=memory_budget",
                f"activation_checkpoint.memory_budget={b}",
            )
        )
        for b in (0.0, 0.5, 1.0)
    ]
    assert budget == sorted(budget)
    full = (*base, "activation_checkpoint=full")
    assert peak(job_of(*full, "training.loss_chunks=8")) < peaks[0]
    assert peak(job_of(*full, "compile=on")) < peaks[0]
    in_backward = ("training.max_norm=0", "optimizer.in_backward=true")
    assert peak(job_of(*full, *in_backward)) <= peaks[0]
    replicas = ("parallelism.dp_replicate=4", "parallelism.dp_shard=2")
    assert peak(job_of(*full, *replicas)) > peaks[0]


def test_microbatches_in_flight_follow_the_schedule() -> None:
    pipeline = ("parallelism=pp", "parallelism.pp=4", "parallelism.pp_microbatch_size=2")
    batch = ("training.local_batch_size=32", "training.global_batch_size=32", "training.seq_len=8192")
    base = (*LARGE, *pipeline, *batch, "activation_checkpoint=full")
    first, *_, last = rank_memory(job_of(*base, "training.loss_chunks=8"))
    # 1F1B: the first rank has four microbatches in flight, the last rank one.
    assert first.kinds["activations"] > 2 * last.kinds["activations"]
    assert (first.stages, last.stages) == ((0,), (3,))
    # GPipe has all sixteen.
    assert peak(job_of(*base, "parallelism.pp_schedule=GPipe")) > 1.1 * peak(job_of(*base))


def test_the_kinds_are_those_of_one_moment() -> None:
    job = job_of(
        *LARGE, "parallelism.dp_shard=8", "training.global_batch_size=8", "activation_checkpoint=full"
    )
    [rank] = rank_memory(job)
    assert set(rank.kinds) == set(KINDS) and all(size >= 0 for size in rank.kinds.values())
    assert rank.peak == pytest.approx(sum(rank.kinds.values()))


def test_a_device_has_less_memory_than_its_name_says() -> None:
    job = job_of(*LARGE, "parallelism.dp_shard=8", "training.global_batch_size=8")
    limit = memory_limit(job, device_of(job))
    assert limit is not None and 77 < limit / GIB < 79
    assert memory_limit(job_of(*TINY), None) is None


LAYOUT = [
    *("parallelism.pp=2", "parallelism.dp_shard=2", "parallelism.tp=2", "cluster.accelerator=H100 SXM"),
    *("training.local_batch_size=4", "cluster.device=cuda", "cluster.kind=slurm", "cluster.ranks_per_node=8"),
]


@pytest.mark.parametrize(
    "model", ["llama3_debug", "deepseek_v3_debug", "gpt_oss_debug", "llama4_debug", "mistral_debug"]
)
def test_equal_blocks_share_their_shards(model: str) -> None:
    """Groups of the optimizer that change nothing make every block one of its own."""
    job = compose_job([f"model={model}", *LAYOUT])
    groups = [{"match": rf"layers\.{layer}\.", "lr_factor": 1.0} for layer in range(job.model.n_layers)]
    apart = replace(job, optimizer=replace(job.optimizer, groups=groups))
    shared, own = parameters_of_ranks(job), parameters_of_ranks(apart)
    modules = [[module for rank in ranks for module in rank.held_modules] for ranks in (shared, own)]
    distinct = [len(set(map(id, each))) for each in modules]
    assert distinct[0] < distinct[1] == len(modules[1])
    assert [rank.tensors for rank in shared] == [rank.tensors for rank in own]
    assert [each.spec for rank in shared for each in rank.tensors] == list(tensors(job.model).values())
    assert [rank.optimizer_bytes for rank in shared] == [rank.optimizer_bytes for rank in own]
    assert rank_memory(job) == rank_memory(apart)
