"""The loader of a job: everything it is told follows from the job, the rows and this process's place."""

from __future__ import annotations

import time

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from harness.data.loader import Loader, build_loader
from harness.data.tokenizer import Tokenizer
from harness.job import Job
from harness.loop.setup import local_rank


def loader_of(job: Job, tokenizer: Tokenizer, rows: range, split: str = "train") -> Loader:
    """Loads the given rows of every global batch of a job.

    Args:
        job: the resolved job.
        tokenizer: the job's.
        rows: rows of the global batch.
        split: ``train`` or ``validation``.
    """
    return build_loader(
        job.data,
        tokenizer,
        seq_len=job.training.seq_len,
        global_batch_size=job.global_batch_size,
        seed=job.training.seed,
        rows=rows,
        split=split,
        model_vocab_size=job.model.vocab_size,
        wait_for_all=_wait_for_all,
        is_builder=local_rank() == 0,
    )


_ARRIVED = "tokens are there"
_LONGEST_POLL_SECONDS = 1.0


def _wait_for_all() -> None:
    """Wait until every rank has called this, however long one of them tokenizes.

    Ranks count themselves in the store at which they met. A pending collective would end the job when its
    timeout is over.
    """
    if not dist.is_initialized():
        return
    store, ranks, pause = _get_default_store(), dist.get_world_size(), 0.01
    arrived = store.add(_ARRIVED, 1)
    # Of all calls so far; nobody calls again before all have called as often.
    expected = -(-arrived // ranks) * ranks
    while arrived < expected:
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
        arrived = store.add(_ARRIVED, 0)
