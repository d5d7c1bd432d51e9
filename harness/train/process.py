"""Settings of a rank's process: environment variables that torch and NCCL read once, malloc, and garbage
collection.

Imports no torch, because torch reads some of them at import. Variables that the user has set win.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.config.job import Job

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
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
SHOWN = ("PYTORCH_ALLOC_CONF", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def settings(job: Job, run_dir: Path) -> dict[str, str]:
    """Environment variables of a rank, under the names of torch 2.11 to 2.13.

    TORCH_NCCL_AVOID_RECORD_STREAMS is not set: it is the default since torch 2.8, and setting it only logs a
    warning.
    """
    recorded = job.debug.flight_recorder
    return {
        # Segments that grow avoid fragmentation where shapes vary.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # A collective that fails ends the process, and the launcher notices that.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # Pipeline stages share one communicator, made with the mesh. torch warns that it serializes its
        # operations; every schedule still completes (tests/parallelism/test_point_to_point.py), and a file
        # whose order would not is refused when the job is composed (read_csv_schedule).
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
    finally:
        gc.enable()


def keep_freed_memory() -> bool:
    """Make glibc's malloc keep freed memory, for a process whose tensors are in host memory.

    By default malloc maps large blocks one by one and unmaps them when they are freed, so the kernel zeroes
    the same pages at every step: 40,000 to 80,000 page faults in a step of 2.5 s (experiments/LOG.md,
    2026-11-22). With this there are none, and the process keeps its peak size.

    Returns:
        Whether it was done: False with another C library, or if the user has configured malloc.
    """
    set_by_user = any(name.startswith("MALLOC_") for name in os.environ)
    if set_by_user or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # No block gets its own mapping, and the top of the heap is never trimmed. mallopt returns 1 on success.
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


@contextmanager
def garbage_collection(interval: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage every ``interval`` steps (0: when Python decides); call what it yields at each step.

    All ranks collect at the same steps, because every step waits for the slowest rank.
    """
    if interval == 0:
        yield lambda step: None
        return

    def collect(step: int) -> None:
        if step % interval == 0:
            gc.collect(1)

    gc.disable()
    gc.collect()
    try:
        yield collect
    finally:
        gc.enable()


def describe(job: Job, device_type: str, *, keeps_memory: bool = False) -> str:
    """Describe the settings in force, on one line."""
    parts = [f"float32 products in {job.training.matmul_precision} precision"]
    if device_type == "cuda" and job.precision.param_dtype == "float32":
        parts[0] += " (all products are; several times as fast on most GPUs: precision=bf16)"
    if keeps_memory:
        parts.append("freed memory is kept")
    if device_type == "cuda":
        for name in SHOWN:
            found = next(each for each in (name, *_ALIASES.get(name, ())) if each in os.environ)
            parts.append(f"{found}={os.environ[found]}")
    return f"process: {', '.join(parts)}"
