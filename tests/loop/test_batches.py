"""Ranks wait for the one that tokenizes, without a collective whose timeout would end the job."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from harness.cluster.pool import RankPool
from harness.loop.batches import _wait_for_all

TIMEOUT_SECONDS, BUILDING_SECONDS = 0.5, 1.0


def wait_twice() -> list[tuple[float, float]]:
    """Return when this rank came to each of two meetings and when it left; rank 0 comes late to both."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    times = []
    for _ in range(2):
        if dist.get_rank() == 0:
            time.sleep(BUILDING_SECONDS)  # longer than a collective allows
        came = time.monotonic()
        _wait_for_all()
        times.append((came, time.monotonic()))
    return times


def test_ranks_wait_for_a_builder_longer_than_for_a_collective(pool: RankPool) -> None:
    """The second meeting is not taken for the first."""
    ranks = pool.run(3, wait_twice)
    for meeting in range(2):
        came, _ = ranks[0][meeting]
        assert all(left > came for _, left in (rank[meeting] for rank in ranks))
