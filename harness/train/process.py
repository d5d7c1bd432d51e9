"""A rank's process: environment variables, malloc, garbage collection, and signals that stop a run.

Imports no torch, because torch reads some variables at import. Variables that the user has set win.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from harness.config.job import Job
from harness.util.errors import UserError


def launched_ranks() -> int | None:
    """Return the number of ranks if torchrun (or another launcher) started this process, else None.

    Raises:
        UserError: the launcher's variables are incomplete or have impossible values.
    """
    if "RANK" not in os.environ:
        return None
    given = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "0", **os.environ}
    text = given.get("WORLD_SIZE", "")
    size = int(text) if text.isdecimal() else 0
    allowed = {
        "WORLD_SIZE": range(1, MOST_RANKS),
        "RANK": range(size),
        "LOCAL_RANK": range(MOST_RANKS),
        "LOCAL_WORLD_SIZE": range(MOST_RANKS),
    }
    if size > 1:
        allowed["MASTER_PORT"] = range(1, 65536)
    for name, numbers in allowed.items():
        text = given.get(name, "")
        if not text.isdecimal() or int(text) not in numbers:
            rule = f"must be a whole number from {numbers[0]} to {numbers[-1]}"
            raise _launcher_error(f"{name}={text}", rule)
    if size > 1 and not given.get("MASTER_ADDR"):
        raise _launcher_error("MASTER_ADDR", "must be given")
    return size


def _launcher_error(variable: str, rule: str) -> UserError:
    why = f"RANK={os.environ['RANK']} means that a launcher started this process"
    return UserError(f"{variable}: {rule}; {why}; would work: torchrun, or {_WITHOUT_LAUNCHER}")


MOST_RANKS = 2**31
_WITHOUT_LAUNCHER = "env -u RANK -u WORLD_SIZE before the command, if no launcher started it"


def refuse_launched(rule: str) -> None:
    """Raise a UserError that names the variables of a launcher, if they are set."""
    if launched_ranks() is not None:
        variables = f"RANK={os.environ['RANK']} and WORLD_SIZE={os.environ['WORLD_SIZE']} are set"
        raise UserError(f"{variables}, as torchrun does: {rule}; would work: {_WITHOUT_LAUNCHER}")


CONTROLLER = "HARNESS_CONTROLLER"
"""Variable with the id of the process that started a rank."""
STARTED = "HARNESS_STARTED"
"""Variable with time.monotonic() of this machine at which the job was started."""
FLIGHT_RECORDER = "flight_recorder"
# Aliases that torch also reads, mostly older names: if the user set any of them, leave it.
_ALIASES = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
}
# Parameters of mallopt(3), from malloc.h.
_M_TRIM_THRESHOLD = -1
_M_MMAP_MAX = -4


def settings(job: Job, run_dir: Path) -> dict[str, str]:
    """Environment variables of a rank, under the names of torch 2.13 to 2.15."""
    recorded = job.debug.flight_recorder
    # 2: copy engines in place of multiprocessors, where memory is symmetric
    # (set_symm_mem_for_comm).
    nccl = {"NCCL_CTA_POLICY": "2"} if job.parallelism.fsdp_buffers == "symmetric" else {}
    # NCCL fails to register the memory of growing segments
    # (github.com/pytorch/pytorch/issues/158029).
    if job.compile.cuda_graphs:
        nccl["NCCL_GRAPH_REGISTER"] = "0"
    return nccl | {
        # Segments that grow avoid fragmentation where shapes vary.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # The rest was read in, and rehearsed with, the older implementation
        # (pytorch/pytorch/pull/192281).
        "TORCH_DIST_USE_NCCL2": "0",
        # A collective that fails ends the process, and the launcher notices that.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # Pipeline stages share one communicator, made with the mesh. torch warns that it serializes
        # its operations; every schedule still completes (tests/parallelism/test_point_to_point.py),
        # and a file whose order would not is refused when the job is composed (read_csv_schedule).
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
        "TORCH_FR_BUFFER_SIZE": str(recorded),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(recorded > 0)),
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir / FLIGHT_RECORDER / "rank_"),
    }


def set_environment(job: Job, run_dir: Path) -> None:
    """Set the variables that the user has not set. Call it before torch is imported."""
    for name, value in settings(job, run_dir).items():
        if not any(each in os.environ for each in (name, *_ALIASES.get(name, ()))):
            os.environ[name] = value


@contextmanager
def importing_torch() -> Iterator[None]:
    """Import modules without garbage collections, which take a third of the time of importing the trainer.

    Imported objects live as long as the process, so later collections skip them too.
    """
    if not gc.isenabled():
        yield
        return
    before = len(sys.modules)
    gc.disable()
    try:
        yield
        if len(sys.modules) > before:
            gc.freeze()
            atexit.register(gc.unfreeze)  # or triton, of torch 2.15, lists its objects as leaked
    finally:
        gc.enable()


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, for a process whose tensors are in host memory.

    By default malloc maps large blocks one by one and unmaps them when they are freed, so the
    kernel zeroes the same pages at every step. With this it does not, and the process keeps its
    peak size. Returns False, and does nothing, with another C library, or if the user has
    configured malloc.
    """
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    if set_by_user or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # No block gets its own mapping, and the top of the heap is never trimmed. mallopt returns 1 on
    # success.
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


COMPLETE_COLLECTION = 10
"""Every so many collections one is of all generations, which takes some ten times as long."""


@contextmanager
def garbage_collection(interval: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage every ``interval`` steps (0: when Python decides); call what it yields at each step.

    All ranks collect at the same steps, because every step waits for the slowest rank.
    """
    if interval == 0:
        yield lambda step: None
        return

    def collect(step: int) -> None:
        # What outlives a collection becomes garbage of the oldest generation, as classes that a
        # save makes.
        if step % (COMPLETE_COLLECTION * interval) == 0:
            gc.collect()
        elif step % interval == 0:
            gc.collect(1)

    gc.disable()
    gc.collect()
    try:
        yield collect
    finally:
        gc.enable()


@contextmanager
def rendezvous_store() -> Iterator[int]:
    """Keep the store where the ranks meet; yield its port.

    The store is in the controller and not in rank 0, on a port that the system picks: no other
    process can take it.
    """
    with importing_torch():
        from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def rank_environment(job: Job, port: int, started: float) -> dict[str, str]:
    """Return the environment variables that all ranks of a job share."""
    nodes, local = job.cluster.nodes_for(job.world_size)
    # A node may be unable to resolve its own name; without a network that takes minutes to fail.
    address = "127.0.0.1" if nodes == 1 else socket.gethostname()
    if job.cluster.kind == "slurm":
        address = job.cluster.env.get("MASTER_ADDR", address)
    return {
        "WORLD_SIZE": str(job.world_size),
        "LOCAL_WORLD_SIZE": str(local),
        "MASTER_ADDR": address,
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        STARTED: str(started),
        **openmp_environment(job),
    }


def threads_per_rank(job: Job) -> int:
    """Return a rank's CPU threads: the job's, those that SLURM reserves, or a share of this machine's."""
    config = job.cluster
    _, local = config.nodes_for(job.world_size)
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    reserved = config.cpus_per_rank if config.kind == "slurm" else None
    return config.threads_per_rank or reserved or max(1, cores // local)


def openmp_environment(job: Job) -> dict[str, str]:
    """Return OpenMP's thread count and spin count for a rank; set them before torch is imported.

    GNU's OpenMP threads spin for milliseconds at every barrier. On cores shared with other
    processes they take time from the thread they wait for: on two shared cores steps took up to ten
    times as long. A spin count of 1000 is as fast on an idle machine (docs/measurements.md).
    Variables set by the user are kept.
    """
    wanted = {"OMP_NUM_THREADS": str(threads_per_rank(job)), "GOMP_SPINCOUNT": "1000"}
    from_job = "OMP_NUM_THREADS" if job.cluster.threads_per_rank is not None else ""
    return {
        name: value for name, value in wanted.items() if name == from_job or name not in os.environ
    }


STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR2)

# A key press can arrive twice: from the terminal, and from a parent program that forwards it.
SAME_KEY_PRESS_SECONDS = 0.5


class StopRequest:
    """Request a stop at the next step boundary; another ^C ends the run at once.

    Records SIGINT, SIGTERM, SIGHUP, and SIGUSR2, which schedulers send before the time limit.

    The handler only sets flags. All ranks decide together at a step boundary whether to stop: a
    rank that stops alone leaves the others waiting in a collective.

    A signal that was ignored before (``nohup``, a background job of a shell script) stays ignored.

    Args:
        raises: whether a second ^C raises KeyboardInterrupt; otherwise it only sets ``insists``.

    Attributes:
        signal: the first signal received, or None.
        insists: whether another ^C followed.
    """

    def __init__(self, *, raises: bool = True) -> None:
        self.raises = raises
        self.signal: signal.Signals | None = None
        self.insists = False
        self._noted_at = 0.0
        self._handlers = _handled_by(self._note)

    def __enter__(self) -> StopRequest:
        self._handlers.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._handlers.__exit__(*error)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if self.signal is None:
            self.signal = signal.Signals(number)
            self._noted_at = time.monotonic()
            # Ranks started by a controller or torchrun stay silent. os.write, because the handler
            # may have interrupted a write to sys.stderr. Its reader may be gone: ^C also ends the
            # tee of a pipeline.
            if "RANK" not in os.environ:
                with suppress(OSError):
                    os.write(2, b"\nstopping after the step in progress; ^C again ends at once\n")
        elif number == signal.SIGINT and time.monotonic() - self._noted_at > SAME_KEY_PRESS_SECONDS:
            self.insists = True
            if self.raises:
                raise KeyboardInterrupt


def stop_signals_interrupt() -> AbstractContextManager[None]:
    """Make SIGTERM, SIGHUP and SIGUSR2 raise KeyboardInterrupt inside the context, as SIGINT does."""
    return _handled_by(signal.default_int_handler)


def stop_signals_end() -> AbstractContextManager[None]:
    """Let the stop signals end the process inside the context: C++ that waits for peers sees no Python."""
    return _handled_by(signal.SIG_DFL)


def stop_signals_ignored() -> AbstractContextManager[None]:
    """Ignore the stop signals inside the context, so that a row being written is completed."""
    return _handled_by(signal.SIG_IGN)


def stop_signals_call(function: Callable[[], None]) -> AbstractContextManager[None]:
    """Call a function on a stop signal inside the context, also if signals are ignored outside of it."""
    return _handled_by(lambda *_: function(), ignored_too=True)


@contextmanager
def _handled_by(handler: object, *, ignored_too: bool = False) -> Iterator[None]:
    before = _set_handlers(handler, ignored_too=ignored_too)
    try:
        yield
    finally:
        for number, earlier in before.items():
            # Leave it if another handler was set meanwhile, such as ignoring it.
            if signal.getsignal(number) == handler:
                signal.signal(number, earlier)  # type: ignore[arg-type]


def ignore_stop_signals() -> None:
    """Ignore the stop signals until the process ends, so that it can write its result.

    A launcher that sees one rank end sends them to the others while they write.
    """
    _set_handlers(signal.SIG_IGN)


def _set_handlers(handler: object, *, ignored_too: bool = False) -> dict[int, object]:
    # Python lets only the main thread set handlers; in other threads no signal can request a stop.
    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [
        number
        for number in STOP_SIGNALS
        if ignored_too or signal.getsignal(number) != signal.SIG_IGN
    ]
    return {number: signal.signal(number, handler) for number in wanted}  # type: ignore[arg-type]
