"""Shards that equal blocks share are those of every block by itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.compose.composer import compose_job
from harness.model.spec import tensors
from harness.tools.plan.memory import rank_memory
from harness.tools.plan.parameters import parameters_of_ranks

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
