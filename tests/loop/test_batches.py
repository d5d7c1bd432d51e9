"""Ranks wait for the one that tokenizes, without a collective whose timeout would end the job."""

from __future__ import annotations

import time
from datetime import timedelta

import torch.distributed as dist

from harness.cluster.pool import RankPool
from harness.loop.batches import _wait_for_all

TIMEOUT_SECONDS, BUILDING_SECONDS = 0.5, 1.5


def wait_twice() -> tuple[float, float]:
    """Rank 0 comes late to the first meeting, by more than a collective may take."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    began = time.monotonic()
    if dist.get_rank() == 0:
        time.sleep(BUILDING_SECONDS)
    _wait_for_all()
    met = time.monotonic()
    _wait_for_all()
    return met - began, time.monotonic() - met


def test_ranks_wait_for_a_builder_longer_than_for_a_collective(pool: RankPool) -> None:
    for first, second in pool.run(3, wait_twice):
        assert first > BUILDING_SECONDS - 0.2
        assert second < BUILDING_SECONDS
