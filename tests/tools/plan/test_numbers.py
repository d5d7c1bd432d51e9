"""Numbers of plans that ``PYTHONPATH=tests python tests/tools/plan/test_numbers.py`` wrote into a file.

Whether they are right is the question of the other tests, of published rows and of rehearsals.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from plans import job_of

from harness.tools.plan.make import make_plan

FILE = Path(__file__).with_suffix("").with_name("numbers.json")
H100 = "cluster=slurm_h100 precision=bf16 data=synthetic tokenizer=bytes training.global_batch_size=64 "
H100 += "training.seq_len=4096"
LLAMA = f"{H100} model=llama3_8b training.seq_len=8192"
FLUX = f"{H100} model=flux_dev training.seq_len=1536 data=latents_synthetic training.local_batch_size=4"
TINY = "model=llama3_debug data=synthetic tokenizer=bytes training.global_batch_size=24 cluster.device=cpu"
CASES = [
    f"{LLAMA} dp_shard=8",
    f"{LLAMA} dp_shard=8 compile=on activation_checkpoint=full training.loss_chunks=8",
    f"{LLAMA} dp_shard=8 compile=on activation_checkpoint=selective_op precision=float8_tensorwise",
    f"{LLAMA} dp_shard=8 tp=2 precision=float8_rowwise optimizer=muon cluster.nodes=2",
    f"{LLAMA} dp_shard=4 dp_replicate=2 activation_checkpoint=selective_layer",
    f"{LLAMA} dp_shard=4 tp=2 compile=on precision=float8_tensorwise",
    f"{LLAMA} dp_shard=8 model.mtp.depth=1 model.n_layers=2",
    f"{LLAMA} tp=8 compile=on training.local_batch_size=2",
    f"{LLAMA} cp=4 dp_shard=2",
    f"{LLAMA} cp=4 dp_shard=2 cp_rotate_method=alltoall cp_load_balance=false",
    f"{LLAMA} cp=4 dp_shard=2 cp_method=ulysses",
    f"{LLAMA} pp=4 dp_shard=2 training.local_batch_size=8",
    f"{LLAMA} pp=2 dp_shard=4 pp_schedule=InterleavedZeroBubble reshard_after_forward=always "
    "training.local_batch_size=8",
    f"{LLAMA} dp_shard=8 cpu_offload=true",
    f"{LLAMA} dp_shard=8 precision=float8_tensorwise precision.enable_fsdp_float8_all_gather=true",
    f"{LLAMA} dp_shard=8 precision=fp32 cluster.accelerator='H100 96GB' training.matmul_precision=high",
    f"{LLAMA} dp_shard=8 cluster.accelerator='A100 SXM 80GB' training.attention=flex",
    f"{H100} model=llama3_debug training.seq_len=256 training.local_batch_size=1",
    f"{LLAMA} dp_shard=8 compile=on activation_checkpoint=memory_budget "
    "activation_checkpoint.memory_budget=0.3",
    f"{LLAMA} pp=4 dp_shard=2 pp_schedule=GPipe training.local_batch_size=32",
    f"{LLAMA} dp_shard=16 tp=8 compile=on async_tp=true",
    f"{LLAMA} dp_shard=4 tp=2 cluster.accelerator=MI300X cluster.network_gbps=200 "
    "training.matmul_precision=high",
    f"{LLAMA} dp_replicate=8 optimizer.implementation=for-loop model.n_layers=2",
    f"{H100} model=gpt_oss_20b dp_shard=8 ep=8",
    f"{H100} model=qwen3_30b_a3b dp_shard=8 ep=4 optimizer=muon",
    f"{H100} model=qwen3_30b_a3b dp_shard=8 ep=4 tp=2 cluster.nodes=2 activation_checkpoint=selective_op",
    f"{H100} model=qwen3_30b_a3b dp_shard=8 ep=8 compile=on precision=mxfp8 cluster.accelerator=B200",
    f"{H100} model=deepseek_v3_671b dp_shard=256 ep=64 cluster.nodes=32 training.global_batch_size=512 "
    "activation_checkpoint=full",
    f"{H100} model=llama4_scout dp_shard=16 ep=4 tp=2 expert_tensor_parallel=true cluster.nodes=4",
    f"{FLUX} dp_shard=8 compile=on activation_checkpoint=full optimizer.ema_decay=0.9999",
    f"{FLUX} dp_shard=4 tp=2 activation_checkpoint=selective_op",
    TINY,
    f"{TINY} dp_shard=3 tp=2 activation_checkpoint=selective_op",
    f"{TINY} model=deepseek_v3_debug dp_shard=2 pp=2 ep=2",
]


def numbers(case):
    """Memory of every pipeline rank (MiB), parts of a step (ms), and what a rank sends (MiB)."""
    plan = make_plan(job_of(case))
    return {
        "memory": [
            {kind: round(size / 2**20, 3) for kind, size in rank.kinds.items() if size}
            | {"allocated": round(rank.allocated / 2**20, 3)}
            for rank in plan.memory
        ],
        "milliseconds": plan.speed
        and {k: round(v * 1e3, 4) for k, v in plan.speed.parts.items() if abs(v) > 1e-9},
        "traffic": {
            f"{each.axis} {each.collective} {each.ranks}": [
                each.count,
                round(each.bytes / 2**20, 3),
            ]
            for each in plan.traffic
        },
    }


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same(case):
    kept = json.loads(FILE.read_text())[case]
    found = numbers(case)
    assert found["milliseconds"] == about(kept["milliseconds"])
    assert found["traffic"] == about(kept["traffic"])
    assert found["memory"] == [about(rank) for rank in kept["memory"]]


def about(numbers):
    """The same but for rounding."""
    return numbers and {k: pytest.approx(v, rel=1e-4, abs=1e-3) for k, v in numbers.items()}


if __name__ == "__main__":
    lines = (f"{json.dumps(case)}: {json.dumps(numbers(case))}" for case in CASES)
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
