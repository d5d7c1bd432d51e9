"""Check whether the process named in a status file still runs on this machine."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

_LARGEST_PID = 2**22  # on Linux


def is_running(status: dict[str, Any]) -> bool:
    """Whether the process that wrote a status still runs; False if it ran on another machine."""
    if status.get("state") not in ("starting", "running") or status.get("host") != socket.gethostname():
        return False
    pid = status.get("pid")
    if not isinstance(pid, int) or not 0 < pid <= _LARGEST_PID or pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    # Process ids are reused.
    return status.get("pid_started") in (None, start_of(pid))


def start_of(pid: int) -> int | None:
    """Return a process's start time in clock ticks since boot; None if it is unreadable or a zombie."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if fields[0] == "Z" else int(fields[19])
    except (OSError, IndexError, ValueError):
        return None
