"""What stages of a pipeline send each other: in an order that one stream on each rank can follow.

NCCL carries out what a rank sends and receives in one group one after another, and each of it waits for the
other side. gloo does not, so an order that would never come to its end does on CPUs.
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


def left_over(ranks: Sequence[Sequence[Sequence[Operation]]]) -> list[int]:
    """How many batches every rank is left with where each does one after another.

    A batch is over when all of it is, which takes the other side's batch to be its turn.
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


def test_what_the_replay_finds() -> None:
    to, back = ("send", 1), ("receive", 1)
    assert left_over([[[to], [back]], [[("receive", 0)], [("send", 0)]]]) == [0, 0]
    assert left_over([[[to], [back]], [[("send", 0)], [("receive", 0)]]]) == [2, 2], "both send first"
    assert left_over([[[to, back]], [[("send", 0), ("receive", 0)]]]) == [0, 0], "but may, at once"
    assert left_over([[[to], [to]], [[("receive", 0)]]]) == [1, 0], "nobody takes the second"


def exchanged(job_json: str) -> list[list[list[Operation]]]:
    """What this rank sends and receives in a step, and in a validation, as torch puts it together."""
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
    """As torch 2.13 hands them to NCCL: what is of one kind is no batch. Before, all was."""
    alone = [[[each] for each in batch] if len(dict(batch)) == 1 else [batch] for batch in batches]
    return [batch for of_one in alone for batch in of_one]


TABLE = [f"{name}-{pp}-{times}" for name in SCHEDULES for pp in (2, 4) for times in (1, 2)]
CORE = ["1F1B-4-2", "InterleavedZeroBubble-4-1", "DualPipeV-4-1"]


@pytest.mark.parametrize("row", rest_is_thorough(TABLE, *CORE))
def test_one_stream_a_rank_comes_to_its_end(pool: RankPool, row: str) -> None:
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
        assert left_over(batches) == [0] * int(pp)
        assert left_over(list(map(one_by_one, batches))) == [0] * int(pp)
