"""What holds for a rank's whole process: the settings that torch and NCCL read once, when they start.

Imports no torch: some of it is read when torch is imported. What the user has set in the environment wins.
"""

from __future__ import annotations

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
        "TORCH_FR_BUFFER_SIZE": str(remembered),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": str(int(remembered > 0)),
        "TORCH_FR_DUMP_TEMP_FILE": str(run_dir / FLIGHT_RECORDER / "rank_"),
    }


def set_environment(job: Job, run_dir: Path) -> None:
    """Sets what the user has not set; to be called before torch is imported."""
    for name, value in settings(job, run_dir).items():
        if not any(each in os.environ for each in (name, *_ALSO_CALLED.get(name, ()))):
            os.environ[name] = value


def describe(job: Job, device_type: str) -> str:
    """The settings that are in force, on one line."""
    told = [f"float32 products in {job.training.matmul_precision} precision"]
    if device_type == "cuda":
        for name in SHOWN:
            found = next(each for each in (name, *_ALSO_CALLED.get(name, ())) if each in os.environ)
            told.append(f"{found}={os.environ[found]}")
    return f"process: {', '.join(told)}"
