"""What holds for a rank's whole process: what torch and NCCL read once, when they start, and malloc.

Imports no torch: some of it is read when torch is imported. What the user has set in the environment wins.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from harness.job import Job

FLIGHT_RECORDER = "flight_recorder"
# Names that torch also reads, older ones most of them: whoever has set one has had his say.
_ALSO_CALLED = {
    "PYTORCH_ALLOC_CONF": ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"),
    "TORCH_FR_BUFFER_SIZE": ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
    "TORCH_FR_DUMP_TEMP_FILE": ("TORCH_NCCL_DEBUG_INFO_TEMP_FILE",),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": ("NCCL_ASYNC_ERROR_HANDLING",),
}
# Parameters of mallopt(3), by malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
SHOWN = ("PYTORCH_ALLOC_CONF", "TORCH_NCCL_ASYNC_ERROR_HANDLING")


def settings(job: Job, run_dir: Path) -> dict[str, str]:
    """The variables a rank runs with, by the names of torch 2.11 to 2.13.

    TORCH_NCCL_AVOID_RECORD_STREAMS is not among them: it is what torch does by itself since 2.8, and setting
    it only makes torch say so.
    """
    remembered = job.debug.flight_recorder
    return {
        # Segments that grow leave no holes where shapes vary; the memory of long runs stays in one piece.
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
        # A collective that fails ends the process, whose end is what the launcher waits for.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # Stages of a pipeline share one communicator, made with the mesh. torch warns that it does one thing
        # after another; every schedule comes to its end that way (tests/parallelism/test_point_to_point.py).
        "TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING": "0",
        "TORCH_FR_BUFFER_SIZE": str(remembered),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(remembered > 0)),
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir / FLIGHT_RECORDER / "rank_"),
    }


def set_environment(job: Job, run_dir: Path) -> None:
    """Sets what the user has not set; to be called before torch is imported."""
    for name, value in settings(job, run_dir).items():
        if not any(each in os.environ for each in (name, *_ALSO_CALLED.get(name, ()))):
            os.environ[name] = value


def keep_freed_memory() -> bool:
    """Tells glibc's malloc to keep what is freed, for a process whose tensors lie in host memory.

    By itself it maps large blocks one by one and gives them back when they are freed, so the kernel fills the
    same pages with zeros at every step: 40,000 to 80,000 page faults in a step of 2.5 s (experiments/LOG.md,
    2026-11-22). Kept, there are none. The process stays as large as it once was.

    Returns:
        Whether it was done: not with another C library, nor where the user has set malloc up.
    """
    own_word = any(name.startswith("MALLOC_") for name in os.environ)
    if own_word or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # No block has a mapping of its own, and the heap's end is never given back. A call that worked returns 1.
    return mallopt is not None and bool(mallopt(_M_MMAP_MAX, 0) and mallopt(_M_TRIM_THRESHOLD, -1))


def describe(job: Job, device_type: str, *, keeps_memory: bool = False) -> str:
    """The settings that are in force, on one line."""
    told = [f"float32 products in {job.training.matmul_precision} precision"]
    if keeps_memory:
        told.append("freed memory is kept")
    if device_type == "cuda":
        for name in SHOWN:
            found = next(each for each in (name, *_ALSO_CALLED.get(name, ())) if each in os.environ)
            told.append(f"{found}={os.environ[found]}")
    return f"process: {', '.join(told)}"
