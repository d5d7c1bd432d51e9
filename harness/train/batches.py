"""Build the data loader of a job."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from harness.config.job import Job
from harness.data.batch import Loader
from harness.data.tokenizer import Tokenizer
from harness.train.objective import objective_of
from harness.train.setup import local_rank


def loader_of(job: Job, tokenizer: Tokenizer, rows: range, split: str = "train") -> Loader:
    """Return a loader of the given rows of every global batch.

    Args:
        job: the resolved job.
        tokenizer: the job's tokenizer.
        rows: rows of the global batch.
        split: ``train`` or ``validation``.
    """
    return objective_of(job.model).build_loader(
        job, tokenizer, rows, split, wait_for_all=_wait_for_all, is_builder=local_rank() == 0
    )


_ARRIVED = "tokens are there"
_LONGEST_POLL_SECONDS = 1.0


def _wait_for_all() -> None:
    """Wait until every rank has called this, however long one of them tokenizes.

    Uses a counter in the rendezvous store. A collective would time out and end the job.
    """
    if not dist.is_initialized():
        return
    store, ranks, pause = _get_default_store(), dist.get_world_size(), 0.01
    arrived = store.add(_ARRIVED, 1)
    # The counter covers all calls so far. No rank calls again before all ranks have made the same call.
    expected = -(-arrived // ranks) * ranks
    while arrived < expected:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        arrived = store.add(_ARRIVED, 0)
