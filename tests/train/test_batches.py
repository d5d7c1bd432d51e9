"""Ranks wait for the rank that tokenizes, without a collective, whose timeout would end the job."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from harness.compose.composer import compose_job
from harness.config.job import Job
from harness.data.cache import cache_folder
from harness.data.sources import LocalFiles
from harness.data.tokenizer import build_tokenizer
from harness.launch.pool import RankPool
from harness.train.objective import _wait_for_all, loader_of
from harness.util.store import only_builder

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


def load_while_another_builds(job: Job) -> float:
    """Build the loader of a job whose token cache another process builds; return when it is there."""
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_SECONDS))
    loader_of(job, build_tokenizer(job.tokenizer), range(2))
    return time.monotonic()


def test_ranks_wait_for_the_builder_of_another_node(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text " * 1000)
    typed = [
        "model=llama3_tiny",
        "model.vocab_size=512",
        "data=local_text",
        f"data.paths=[{tmp_path}/*.txt]",
        "tokenizer=bytes",
    ]
    job = compose_job([*typed, f"data.cache_dir={tmp_path}/cache", "data.validation_fraction=0"])
    tokenizer = build_tokenizer(job.tokenizer)
    folder = cache_folder(LocalFiles(job.data, "paths"), tokenizer, 0.0, job.data.cache_dir)
    work = folder / ".unfinished"
    holds, ended = threading.Event(), []

    def build() -> None:
        with only_builder(work, lambda: False):
            holds.set()
            time.sleep(TIMEOUT_SECONDS + BUILDING_SECONDS)
            ended.append(time.monotonic())

    builder = threading.Thread(target=build)
    builder.start()
    holds.wait()
    ranks = pool.run(3, load_while_another_builds, job)
    builder.join()
    assert all(loaded > ended[0] for loaded in ranks) and not work.exists()
