"""A pool of rank processes that are reused between jobs: starting eight Pythons per layout is slow.

Each job gets new process groups over the first ranks of the pool. After a job that failed or hung
the pool starts new ranks, because gloo's connections do not survive an error. Ranks are forked from
a server process that has imported torch once (multiprocessing's ``forkserver``), so a new rank
costs milliseconds.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import multiprocessing as mp
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from harness.config.failures import is_consequence
from harness.util.errors import HarnessError
from harness.util.lifeline import end_when

# Wait after a job's first failure for failures of the other ranks, which may be the cause.
GRACE_SECONDS = 0.5
# Modules that the server imports before it forks ranks; the engine imports torch and most of the
# harness.
_PRELOADED = ["harness.train.engine", "harness.train.setup", "harness.data.kinds"]


@dataclass(frozen=True)
class Failure:
    """Failure of one rank as text, with kind and message of a ``HarnessError``: not all can be pickled."""

    text: str
    kind: str | None = None
    message: str = ""


class RankFailed(HarnessError):
    """A rank of the pool raised, died, or did not answer in time."""

    def __init__(self, message: str, failure: Failure | None = None) -> None:
        super().__init__(message)
        self.failure = failure


class RankPool:
    """``size`` ranks that run functions together.

    The ranks end with this process, however it ends.

    Args:
        size: maximum number of ranks of a job.
        timeout_seconds: maximum duration of a job; infinity: no maximum.
        on_gpus: whether ranks see the machine's GPUs.
    """

    def __init__(self, size: int, timeout_seconds: float = 300.0, *, on_gpus: bool = False) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.on_gpus = on_gpus
        self._job = 0
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._start()

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Run ``function(*arguments)`` on some ranks with a process group; return each rank's result.

        The function is pickled by reference.
        """
        assert 1 <= world_size <= self.size, f"{world_size} ranks of {self.size}"
        if not self._ranks:
            self._start()
        self._job += 1
        try:
            store = str(Path(self._folder.name) / f"store{self._job}")
            # A dead rank is reported by _collect.
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                for _, connection in self._ranks[:world_size]:
                    connection.send((world_size, store, function, arguments))
            return self._collect(world_size)
        except BaseException:
            # After any error, also ^C, the ranks may be in the middle of the job.
            self.close()
            raise

    def close(self) -> None:
        """End the ranks."""
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
        self._folder = tempfile.TemporaryDirectory(prefix="harness-pool-")
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, theirs, self.on_gpus), daemon=True)
            hidden = {} if self.on_gpus else {"CUDA_VISIBLE_DEVICES": ""}
            with _environment(OMP_NUM_THREADS="1", **hidden):
                process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect(self, world_size: int) -> list[Any]:
        """Wait for all answers; after the first failure, only briefly for failures of the other ranks."""
        deadline = time.monotonic() + self.timeout_seconds
        pending = {
            connection: rank for rank, (_, connection) in enumerate(self._ranks[:world_size])
        }
        results: list[Any] = [None] * world_size
        failures: list[tuple[int, Failure]] = []
        while pending:
            left = max(0.0, deadline - time.monotonic())
            ready = wait(list(pending), timeout=left if left < float("inf") else None)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    ok, value = connection.recv()
                except (EOFError, ConnectionResetError):
                    process, _ = self._ranks[rank]
                    process.join(GRACE_SECONDS)
                    ok = False
                    value = Failure(f"the process died (exit code {process.exitcode})")
                if ok:
                    results[rank] = value
                    continue
                if not failures:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
                failures.append((rank, value))
        if failures:
            # A rank that lost its peer may answer before the peer's failure is known.
            rank, failure = min(failures, key=lambda each: is_consequence(each[1].text))
            raise RankFailed(f"rank {rank} of {world_size}: {failure.text}", failure)
        if pending:
            ranks = ", ".join(map(str, sorted(pending.values())))
            raise RankFailed(
                f"no answer from rank {ranks} of {world_size} in {self.timeout_seconds:g} s"
            )
        return results


@contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _forget_meshes() -> None:
    """Clear DTensor's caches, which hold the meshes of the finished job.

    The next job could get process groups from them that no longer exist. And as long as a gloo
    group is referenced, its threads wake fifty times a second: after a hundred jobs they use
    several cores.
    """
    from torch.distributed.tensor import _redistribute
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    _clear_sharding_prop_cache()
    _redistribute.clear_redistribute_planner_cache()
    _redistribute._gen_transform_infos.cache_clear()
    gc.collect()


class _AnswerPickler(pickle.Pickler):
    """Pickles what a rank answers, with the bytes of its tensors.

    torch would share their memory, which takes a connection per tensor, and room in ``/dev/shm``: a
    container has 64 MiB of it by default.
    """

    def reducer_override(self, value: Any) -> Any:
        import torch

        if type(value) is not torch.Tensor or value.device.type != "cpu":
            return NotImplemented
        content = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return _tensor_of_bytes, (content, value.dtype, value.shape)


def _tensor_of_bytes(content: Any, dtype: Any, shape: Any) -> Any:
    import torch

    return torch.from_numpy(content).view(dtype).reshape(shape)


def _serve(rank: int, connection: Connection, on_gpus: bool) -> None:
    # ^C on the terminal reaches the ranks too. Their owner handles it, and they end with the owner.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # After a fatal signal the stacks on stderr are all that a rank leaves.
    faulthandler.enable()
    owner = mp.parent_process()
    assert owner is not None
    end_when(lambda: not owner.is_alive())
    import torch
    import torch.distributed as dist

    from harness.train.setup import backend_of, loopback_interface

    device = torch.device("cuda", rank) if on_gpus else torch.device("cpu")

    os.environ.setdefault("GLOO_SOCKET_IFNAME", loopback_interface() or "")
    torch.set_num_threads(1)
    # What was imported stays. Without this, collecting garbage after a job takes longer than most
    # jobs.
    gc.freeze()
    while True:
        try:
            world_size, store, function, arguments = connection.recv()
        except EOFError:
            return
        except Exception:  # unpickling failed: the function cannot be imported here
            connection.send((False, Failure(traceback.format_exc())))
            continue
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
        try:
            dist.init_process_group(
                backend_of(device),
                init_method=f"file://{store}",
                rank=rank,
                world_size=world_size,
                device_id=device if on_gpus else None,
            )
            # init_process_group does not synchronize: a rank that finishes its job early could
            # close its connections while another rank still opens them.
            dist.barrier()
            value = function(*arguments)
            dist.destroy_process_group()
            answer = io.BytesIO()
            _AnswerPickler(answer).dump((True, value))
            connection.send_bytes(answer.getbuffer())
            value = None
            _forget_meshes()
        except BaseException as error:
            known = (error.kind, str(error)) if isinstance(error, HarnessError) else ()
            connection.send((False, Failure(traceback.format_exc(), *known)))
            # Wait to be killed: while this rank's connections are open, its peers do not fail too.
