"""Sends and receives between pipeline stages: their order must not deadlock with one stream per rank.

NCCL executes a rank's sends and receives in one group sequentially, and each waits for the other side. gloo
does not, so an order that deadlocks with NCCL works on CPUs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiers import rest_is_thorough

from harness.cluster.pool import RankPool
from harness.compose import compose_job
from harness.job import Job
from harness.parallelism.schedules import SCHEDULES

Operation = tuple[str, int]
"""``send`` or ``receive``, and the other rank."""


def unfinished(ranks: Sequence[Sequence[Sequence[Operation]]]) -> list[int]:
    """Replay the batches of every rank sequentially; return each rank's number of unfinished batches.

    An operation finishes when its counterpart is in the other rank's current batch.
    """
    waiting = [[list(batch) for batch in batches] for batches in ranks]
    moved = True
    while moved:
        moved = False
        for rank, batches in enumerate(waiting):
            for kind, other in list(batches[0]) if batches else []:
                meets = ("receive" if kind == "send" else "send", rank)
                if waiting[other] and meets in waiting[other][0]:
                    batches[0].remove((kind, other))
                    waiting[other][0].remove(meets)
                    moved = True
        waiting = [[batch for batch in batches if batch] for batches in waiting]
    return list(map(len, waiting))


def test_the_replay() -> None:
    to, back = ("send", 1), ("receive", 1)
    assert unfinished([[[to], [back]], [[("receive", 0)], [("send", 0)]]]) == [0, 0]
    assert unfinished([[[to], [back]], [[("send", 0)], [("receive", 0)]]]) == [2, 2], "both send first"
    assert unfinished([[[to, back]], [[("send", 0), ("receive", 0)]]]) == [0, 0], "legal in one batch"
    assert unfinished([[[to], [to]], [[("receive", 0)]]]) == [1, 0], "the second is never received"


def exchanged(job_json: str) -> list[list[list[Operation]]]:
    """This rank's sends and receives in a step, and in a validation, in torch's batches."""
    import torch.distributed as dist
    from torch.distributed.pipelining import schedules

    from harness.data.tokenizer import build_tokenizer
    from harness.loop.batches import loader_of
    from harness.loop.engine import Engine

    job = Job.from_json(job_json)
    engine = Engine(job, torch.device("cpu"))
    batch = loader_of(job, build_tokenizer(job.tokenizer), engine.rows).next()
    found: list[list[Operation]] = []
    original = schedules._batch_p2p

    def recorded(operations: list[dist.P2POp], *args: Any, **kwargs: Any) -> Any:
        found.append([("send" if o.op is dist.isend else "receive", o.group_peer) for o in operations])
        return original(operations, *args, **kwargs)

    parts = []
    schedules._batch_p2p = recorded
    try:
        for run in (engine.gradients, engine.evaluate):
            run(batch)
            parts.append([operations for operations in found if operations])
            found.clear()
    finally:
        schedules._batch_p2p = original
    return parts


def one_by_one(batches: list[list[Operation]]) -> list[list[Operation]]:
    """Batches as torch 2.13 passes them to NCCL: one with sends only or receives only is split up."""
    split = [[[each] for each in batch] if len(dict(batch)) == 1 else [batch] for batch in batches]
    return [batch for parts in split for batch in parts]


TABLE = [f"{name}-{pp}-{times}" for name in SCHEDULES for pp in (2, 4) for times in (1, 2)]
CORE = ["1F1B-4-2", "InterleavedZeroBubble-4-1", "DualPipeV-4-1"]


@pytest.mark.parametrize("row", rest_is_thorough(TABLE, *CORE))
def test_one_stream_per_rank_does_not_deadlock(pool: RankPool, row: str) -> None:
    name, pp, times = row.split("-")
    job = compose_job(
        [
            *("model=llama3_tiny", "model.n_layers=8", "data=synthetic", "tokenizer=bytes"),
            *("training.seq_len=16", f"training.global_batch_size={8 * int(times)}", "cluster.device=cpu"),
            *(f"parallelism.pp={pp}", f"parallelism.pp_schedule={name}"),
        ]
    )
    ranks = pool.run(int(pp), exchanged, job.to_json())
    for run in range(2):
        batches = [parts[run] for parts in ranks]
        assert all(batches)
        assert unfinished(batches) == [0] * int(pp)
        assert unfinished(list(map(one_by_one, batches))) == [0] * int(pp)
