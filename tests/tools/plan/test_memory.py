"""The plan's memory: against published runs, autograd's saved tensors, torch's allocations, inequalities."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "llama3_h100"))
sys.path.insert(0, str(Path(__file__).parents[3] / "experiments" / "measure"))

import pass_memory as measure
import torchtitan_rows
from plans import LLAMA_8B, job_of

from harness.compose.composer import compose_job
from harness.model.decoder import Decoder
from harness.model.kernels import Positions
from harness.tools.plan.constants import DEFAULTS, Software
from harness.tools.plan.machine import device_of
from harness.tools.plan.memory import memory_limit, rank_memory
from harness.tools.plan.memory_parts import ActivationBytes
from harness.tools.plan.parameters import tensors_by_module
from harness.tools.rehearse.config import RehearseJob
from harness.util.words import GIB

MIB = 2**20
ROOT = Path(__file__).parents[3]
TINY = "model=llama3_tiny data=synthetic tokenizer=bytes checkpoint=disabled cluster.device=cpu"


def peak(job, software=DEFAULTS.software):
    return max(rank.peak for rank in rank_memory(job, software=software))


def test_published_runs_are_met():
    """Runs without a pipeline are within 12 %, the median within 2 %.

    torchtitan's pipelines took 7 to 27 % more than the plan predicts. A rehearsal of the first row of table
    5, without async_tp, reserves 64.0 GiB; the plan predicts 64.9, torchtitan took 82.5.
    """
    errors, pipelined = [], []
    for row, job in torchtitan_rows.jobs():
        error = peak(job, row.software) / GIB / row.memory_gib - 1
        if job.parallelism.pp > 1:
            pipelined.append(error)
        else:
            errors.append(abs(error))
    assert len(errors) + len(pipelined) == 18
    assert max(errors) <= 0.12
    assert median(errors) <= 0.02
    assert all(-0.22 <= error <= -0.06 for error in pipelined)


def test_joint_ends_stay_gathered():
    job = job_of(f"{LLAMA_8B} dp_shard=8 training.seq_len=8192")
    [apart], [joint] = (rank_memory(job, Software(joint_ends=joint)) for joint in (False, True))
    ends = 128256 * 4096
    block = sum(tensor.size for tensor in tensors_by_module(job.model)["layers.0"])
    # At the peak, in the loss, the embedding and the last block are in memory too, in 16 bits.
    assert joint.allocated - apart.allocated == pytest.approx(2 * (ends + block), rel=1e-6)
    # Their gather buffer is twice as large.
    gathered = joint.kinds["gathered"] - apart.kinds["gathered"]
    assert gathered == pytest.approx(2 * (2 * ends + block), rel=1e-3)
    assert joint.kinds["gradients"] == apart.kinds["gradients"]
    pipelined = job_of(f"{LLAMA_8B} pp=2 dp_shard=4")
    assert rank_memory(pipelined, Software(joint_ends=True)) == rank_memory(pipelined)


def test_a_layout_is_planned_the_same_after_another():
    """A rank alone reduces in place; replicas copy gradients, of modules that both layouts hold."""
    small = (
        "model.n_layers=2 model.vocab_size=1024 training.seq_len=64 training.global_batch_size=2"
    )
    line = f"{LLAMA_8B} {small}"
    alone, replicas = job_of(f"{line} dp_shard=1"), job_of(f"{line} dp_replicate=2")
    expected = rank_memory(replicas)
    assert rank_memory(alone) != expected
    assert rank_memory(replace(replicas, model=alone.model)) == expected


def test_outputs_that_a_pipeline_keeps():
    batch = "training.seq_len=8192 training.local_batch_size=8 training.global_batch_size=32"
    job = job_of(f"{LLAMA_8B} pp=2 dp_shard=4 pp_schedule=1F1B {batch}")
    new, old = (rank_memory(job, Software(keeps_outputs=kept)) for kept in (False, True))
    boundary, logits = 2 * 8192 * 4096, 2 * 8192 * 128256
    # Before the last of 8 microbatches 7 are done on the last stage, and 6 on the first, without inputs.
    assert old[1].allocated - new[1].allocated == 7 * (boundary + logits)
    assert old[0].allocated - new[0].allocated == 6 * boundary


def test_a_ring_that_gathers_has_the_keys_and_values_of_all_ranks():
    ring = f"{LLAMA_8B} cp=8 training.seq_len=8192 training.local_batch_size=1"

    def late(method, software=DEFAULTS.software):
        return ActivationBytes(job_of(f"{ring} {method}"), software).block(0).late_backward

    gathers = late("cp_rotate_method=allgather")
    sends = late("cp_rotate_method=alltoall")
    tokens, queries, both = 8192 // 8, 32 * 128, 2 * 8 * 128
    assert gathers - sends == 6 * 2 * tokens * both
    of_ring = tokens * (2 * (queries + 4 * both) + 4 * (queries + 3 * both))
    assert sends - late("cp_method=ulysses") == of_ring
    # Four times as many: gathered and sent, the last step's gradients, sums; also before and after the ring.
    repeated = late("", Software(repeats_keys=True))
    assert repeated - gathers == 3 * tokens * both * (2 * (8 + 2 + 2) + 4 * 3)


WASTEFUL = ("8b_8_layers_fp32", "v2_lite_capacity_c", "v2_lite_capacity_graphs_c")
"""Jobs of which torch's allocator wastes a fifth to two fifths."""


def test_reserved_memory_of_rehearsals_is_predicted():
    """Of full-size jobs, against torch's allocator."""
    errors = {}
    for row in map(
        json.loads, (ROOT / "experiments/measure/rehearsal/results.jsonl").read_text().splitlines()
    ):
        if row["set"] == "full" and row["failure"] is None:
            job = compose_job(row["overrides"], config_name="rehearse", schema=RehearseJob).plain
            planned, measured = rank_memory(job)[row["pp_rank"]], row["memory"]
            errors[row["job"], row["pp_rank"]] = planned.peak / measured["reserved"] - 1
            if row["job"] in WASTEFUL:
                assert planned.allocated == pytest.approx(measured["allocated"], rel=4e-3)
                del errors[row["job"], row["pp_rank"]]
    sizes = list(map(abs, errors.values()))
    assert len({name for name, _ in errors}) >= 40 and max(sizes) <= 0.09, errors
    assert median(sizes) <= 0.016


def saved_by_autograd(job, layer):
    """Bytes that autograd saves in one block's forward pass, without parameters and tables."""
    dtype = getattr(torch, job.precision.param_dtype)
    part = Decoder(job.model, job.training.seq_len)
    part.to(dtype)
    part.materialize_buffers(torch.device("cpu"))
    known = [*part.parameters(), part.rope, part.positions]
    own = {tensor.untyped_storage().data_ptr() for tensor in known}
    x_BTC = torch.randn(job.local_batch_size, job.training.seq_len, job.model.dim, dtype=dtype)
    saved = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    block = part.blocks[layer]
    mask = block.mixer.inner.mask(Positions(None, len(x_BTC), part.seq_len, x_BTC.device))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x_BTC.requires_grad_(), part.rope, mask, part.positions)
    return sum(saved.values())


DEBUG = sorted(file.stem for file in (ROOT / "conf" / "model").glob("*_debug.yaml"))


# Several chunks of Gated DeltaNet.
LENGTHS = {"qwen3_next_debug": 128, "kimi_linear_debug": 128}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", DEBUG)
def test_blocks_declare_what_autograd_saves(model, precision):
    synthetic = "data=synthetic tokenizer=bytes training.global_batch_size=2 "
    synthetic += f"training.seq_len={LENGTHS.get(model, 32)}"
    job = job_of(f"model={model} precision={precision} cluster.device=cpu {synthetic}")
    # Routers also save copies of small parameters and a few numbers per expert; attention with a window saves
    # its mask, T x T values.
    exact = not job.model.moe.enabled and job.model.attention.window is None
    tolerance = 0.0 if exact else 0.03 if model == "gpt_oss_debug" else 0.02
    for layer in (0, job.model.n_layers - 1):
        declared, saved = ActivationBytes(job).block(layer).kept, saved_by_autograd(job, layer)
        assert declared == pytest.approx(saved, rel=tolerance, abs=0 if tolerance else 1), layer


SIZE = (
    "model.dim=128 model.n_heads=4 model.n_kv_heads=2 model.ffn_hidden_dim=384 model.n_layers=4 "
    "model.vocab_size=1024 training.seq_len=128 training.global_batch_size=4 metrics.console=none"
)


@pytest.mark.parametrize(
    "typed",
    [
        "activation_checkpoint=none",
        "activation_checkpoint=full",
        "activation_checkpoint=selective_op",
        "activation_checkpoint=selective_layer",
        "activation_checkpoint=full precision=bf16",
        "training.loss_chunks=8 model.vocab_size=4096",
        "training.local_batch_size=2",
        "training.global_batch_size=1 training.seq_len=32",
    ],
)
def test_a_pass_takes_what_torch_allocates(typed):
    """Torch's allocator measures the pass only; parameters and optimizer state were allocated before."""
    job = job_of(f"{TINY} {SIZE} {typed}")
    [rank] = rank_memory(job)
    planned = rank.peak - sum(rank.kinds[kind] for kind in ("parameters", "optimizer", "runtime"))
    assert planned / MIB == pytest.approx(measure.measure_pass(job)["peak"], rel=0.03)


def test_a_device_has_less_memory_than_its_name_says():
    job = job_of(f"{LLAMA_8B} dp_shard=8")
    limit = memory_limit(job, device_of(job))
    assert limit is not None and 77 < limit / GIB < 79
    assert memory_limit(job_of(TINY), None) is None
