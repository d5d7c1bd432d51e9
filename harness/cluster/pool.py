"""A pool of ranks that stay up between jobs: starting eight Pythons per layout is what makes a matrix slow.

Each job gets fresh process groups over the first ranks of the pool. After a job that failed or hung the
ranks are started anew, because gloo's connections do not survive an error.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from harness.errors import HarnessError


class RankFailed(HarnessError):
    """A rank of the pool raised, died, or did not answer in time."""


class RankPool:
    """``size`` CPU ranks that run functions together.

    Args:
        size: the most ranks a job may have.
        timeout_seconds: how long one job may take.
    """

    def __init__(self, size: int, timeout_seconds: float = 300.0) -> None:
        self.size, self.timeout_seconds = size, timeout_seconds
        self._folder = tempfile.TemporaryDirectory(prefix="harness-pool-")
        self._job = 0
        self._ranks: list[tuple[Any, Connection]] = []
        self._start()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Runs ``function(*arguments)`` on ``world_size`` ranks with a process group; returns what each returned.

        Args:
            world_size: number of ranks, at most ``size``.
            function: importable from the ranks (pickled by reference).
            arguments: picklable.

        Raises:
            RankFailed: with the traceback of the first rank that raised.
        """
        assert 1 <= world_size <= self.size, f"{world_size} ranks of {self.size}"
        self._job += 1
        store = str(Path(self._folder.name) / f"store{self._job}")
        for _, connection in self._ranks[:world_size]:
            connection.send((world_size, store, function, arguments))
        try:
            return self._collect(world_size)
        except RankFailed:
            self.close()
            self._folder = tempfile.TemporaryDirectory(prefix="harness-pool-")
            self._start()
            raise

    def close(self) -> None:
        """Ends the ranks."""
        for process, connection in self._ranks:
            connection.close()
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        context = mp.get_context("spawn")
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs), daemon=True)
            with _environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", CUDA_VISIBLE_DEVICES=""):
                process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, world_size: int) -> list[Any]:
        deadline = time.monotonic() + self.timeout_seconds
        pending = {connection: rank for rank, (_, connection) in enumerate(self._ranks[:world_size])}
        results: list[Any] = [None] * world_size
        while pending:
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"ranks {sorted(pending.values())} did not answer in {self.timeout_seconds} s")
            failures = []
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = connection.recv()
                except EOFError:
                    ok, value = False, "the process died"
                if ok:
                    results[rank] = value
                else:
                    failures.append(f"rank {rank}: {value}")
            if failures:
                raise RankFailed("\n".join(failures))
        return results


class _environment:
    """Sets environment variables while a child is started, which inherits them."""

    def __init__(self, **variables: str) -> None:
        self.variables = variables

    def __enter__(self) -> None:
        self.before = {name: os.environ.get(name) for name in self.variables}
        os.environ.update(self.variables)

    def __exit__(self, *_: object) -> None:
        for name, value in self.before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _serve(rank: int, connection: Connection) -> None:
    """The life of a rank: wait for a job, do it, answer."""
    import torch
    import torch.distributed as dist
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    torch.set_num_threads(1)
    while True:
        try:
            world_size, store, function, arguments = connection.recv()
        except EOFError:
            return
        # Cached sharding decisions hold the meshes, and with them the process groups, of earlier jobs.
        _clear_sharding_prop_cache()
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
            value = function(*arguments)
            dist.destroy_process_group()
        except BaseException:
            connection.send((False, traceback.format_exc()))
            return
        connection.send((True, value))
