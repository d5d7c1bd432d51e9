"""Peak memory of this process, in GiB (2**30 bytes)."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

from harness.tables import GIB

_STATUS = Path("/proc/self/status")
_PEAK = re.compile(rb"^VmHWM:\s+(\d+) kB$", re.MULTILINE)


def peak_memory_gib(device_type: str) -> float:
    """Return the peak memory.

    Args:
        device_type: ``cuda``: memory reserved by the caching allocator on the current device, which decides
            whether a run fits. Anything else: resident memory of this process.
    """
    if device_type == "cuda":
        import torch

        return torch.cuda.max_memory_reserved() / GIB
    return _peak_resident_bytes() / GIB


def _peak_resident_bytes() -> int:
    """Return VmHWM if the system has it, else ru_maxrss.

    On Linux ru_maxrss survives exec (fs/exec.c, exec_mmap): a small rank started by a large parent would
    report the parent's memory. VmHWM belongs to the address space of this process alone.
    """
    if _STATUS.exists():
        found = _PEAK.search(_STATUS.read_bytes())
        if found:
            return int(found.group(1)) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # getrusage(2): kibibytes on Linux, bytes on macOS.
    return peak if sys.platform == "darwin" else peak * 1024
