"""Ranks wait for the rank that tokenizes, without a collective, whose timeout would end the job."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from harness.cluster.pool import RankPool
from harness.loop.batches import _wait_for_all

TIMEOUT_SECONDS, BUILDING_SECONDS = 0.5, 1.0


def wait_twice() -> list[tuple[float, float]]:
    """Return when this rank entered and left each of two waits; rank 0 enters both late."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    times = []
    for _ in range(2):
        if dist.get_rank() == 0:
            time.sleep(BUILDING_SECONDS)  # longer than a collective allows
        entered = time.monotonic()
        _wait_for_all()
        times.append((entered, time.monotonic()))
    return times


def test_ranks_wait_for_a_builder_longer_than_for_a_collective(pool: RankPool) -> None:
    """The second wait is not mistaken for the first."""
    ranks = pool.run(3, wait_twice)
    for wait in range(2):
        entered, _ = ranks[0][wait]
        assert all(left > entered for _, left in (rank[wait] for rank in ranks))
