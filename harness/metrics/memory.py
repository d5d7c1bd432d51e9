"""Peak memory of this process, in GiB (2**30 bytes)."""

import re
import resource
import sys
from pathlib import Path

from harness.metrics.columns import Metric
from harness.util.words import GIB

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_memory_gib(device_type: str) -> float:
    """Return the peak memory.

    Args:
        device_type: ``cuda``: memory reserved by the caching allocator on the current device, which
            decides whether a run fits. Anything else: resident memory of this process.
    """
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() / GIB
    return _peak_resident_bytes() / GIB


MEMORY = (
    Metric(
        "memory_gib",
        "GiB",
        "Peak memory since the process started.",
        line="mem {:.2f} GiB",
        in_summary=True,
    ),
    Metric("memory.active_gib", "GiB", "Peak memory in use by tensors.", "GPUs"),
    Metric("memory.reserved_gib", "GiB", "Peak memory reserved by the allocator.", "GPUs"),
    Metric("memory.retries", "count", "Allocations that first had to free cached memory.", "GPUs"),
    Metric("memory.out_of_memory", "count", "Allocations that failed.", "GPUs"),
)
"""Columns of memory: of a rank; in metrics.jsonl and result.json those of the rank with the
most."""
ALLOCATOR = {
    "memory.active_gib": "active_bytes.all.peak",
    "memory.reserved_gib": "reserved_bytes.all.peak",
    "memory.retries": "num_alloc_retries",
    "memory.out_of_memory": "num_ooms",
}
"""Columns about the caching allocator, and their keys in ``torch.cuda.memory_stats``."""


def allocator(device_type: str) -> dict[str, float]:
    """Return the values of ``ALLOCATOR`` on the current GPU since the process started; empty on a CPU."""
    if device_type != "cuda":
        return {}
    import torch

    found = torch.cuda.memory_stats()
    return {
        name: found.get(key, 0) / (GIB if name.endswith("_gib") else 1)
        for name, key in ALLOCATOR.items()
    }


def _peak_resident_bytes() -> int:
    """Return VmHWM if the system has it, else ru_maxrss.

    On Linux ru_maxrss survives exec (fs/exec.c, exec_mmap): a small rank started by a large parent
    would report the parent's memory. VmHWM belongs to the address space of this process alone.
    """
    if _STATUS.exists():
        found = _PEAK.search(_STATUS.read_bytes())
        if found:
            return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2): kibibytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
