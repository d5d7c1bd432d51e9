"""The loader of a job: everything it is told follows from the job, the rows and this process's place."""

from __future__ import annotations

import torch.distributed as dist

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
        barrier=_barrier,
        is_builder=local_rank() == 0,
    )


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()
