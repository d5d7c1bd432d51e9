"""Loads of ranks of experts: the others wait for the fullest one, which needs the most memory."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

from harness.config.job import Job
from harness.metrics.jsonl import read_rows
from harness.metrics.recorder import METRICS_FILE
from harness.tools.plan.constants import Software

if TYPE_CHECKING:
    from torch import Tensor

    from harness.model.workloads import Workload

COLUMN = "moe.rank_load_max."
"""Its columns have a layer's number at the end."""
COUNTED_LAYERS = 4
"""Layers whose rows a plan counts with ``debug.routing``: the first ones, in step 1."""


def known_imbalance(job: Job, software: Software) -> float | None:
    """Rows that the fullest rank of experts computes, as a multiple of the mean; None: unknown."""
    layout = job.parallelism
    if layout.fixes_messages:
        return layout.share_computed(routed_tokens(job) * job.model.moe.top_k)
    if layout.ep == 1 or job.model.moe.force_balance:
        return 1.0
    if job.debug.routing is None:
        return software.expert_imbalance
    layers = job.model.expert_layers[:COUNTED_LAYERS]
    received = [rows_by_rank(job, layer).sum(1) for layer in layers]
    return fmean(float(rows.max() / rows.double().mean()) for rows in received)


def routed_tokens(job: Job) -> int:
    """Tokens of a microbatch that a rank sends to experts."""
    layout = job.parallelism
    parts = layout.tp if layout.uses_sequence_parallel and not layout.splits_experts else 1
    return job.microbatch_size * job.training.seq_len // layout.cp // parts


def rows_by_rank(job: Job, layer: int) -> Tensor:
    """Rows of a microbatch in step 1 with ``debug.routing``, by group, sender and receiver."""
    return rows_of_experts(job, layer).unflatten(2, (job.parallelism.ep, -1)).sum(3)


def rows_of_experts(job: Job, layer: int, step: int = 1) -> Tensor:
    """Rows of a microbatch with ``debug.routing``, as ``rows_sent``."""
    from harness.parallelism.balance import workload_of
    from harness.parallelism.expert import rows_sent

    experts_TK = _chosen(workload_of(job, layer, step), job.training.seq_len)
    rows = rows_sent(job.parallelism, job.model.moe.num_experts, experts_TK)
    return rows * job.microbatch_size


# Layouts of a search have the same workload.
@lru_cache(maxsize=2 * COUNTED_LAYERS)
def _chosen(workload: Workload, length: int) -> Tensor:
    import torch

    return workload.choose(torch.arange(length))


def measured_imbalance(run_dir: str | None) -> float | None:
    """The mean of a run's layers over the last half of its rows; None: they lack the columns."""
    rows = []
    if run_dir is not None and (path := Path(run_dir, METRICS_FILE)).is_file():
        rows = read_rows(path)[0]
    of_steps = []
    for row in rows:
        of_layers = [value for name, value in row.items() if name.startswith(COLUMN)]
        if of_layers:
            of_steps.append(fmean(of_layers))
    return fmean(of_steps[len(of_steps) // 2 :]) if of_steps else None
