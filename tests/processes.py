"""Commands in processes of their own."""

import os
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]


def python(*arguments, cwd=ROOT, **environment):
    """Run Python with this checkout, without GPUs and a launcher's variables."""
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**kept, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", **environment},
        capture_output=True,
        text=True,
    )


PATIENCE = 180.0
"""Seconds after which a test takes what it waits for as hung: a busy machine is many times slower."""


def until(condition, seconds=PATIENCE, what="a condition"):
    """Wait until a function returns a true value; return the value."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}"
        time.sleep(0.05)
    return found


def is_alive(process):
    """Whether a process runs, and does not only wait for its parent."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def workers_of_this_process():
    """Process ids of its ``Worker``s, which tokenize or read ahead."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            if (
                parent == os.getpid()
                and "harness.util.processes" in (entry / "cmdline").read_text()
            ):
                found.append(int(entry.name))
        except OSError:
            continue
    return found
