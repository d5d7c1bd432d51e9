"""Disk space that a run keeps for its result, in case the disk is full when it ends."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from harness.util.errors import DISK_FULL

RESERVE = ".reserve"
RESERVED_BYTES = 1 << 18


def make_reserve(run_dir: Path) -> None:
    """Reserve the space."""
    (run_dir / RESERVE).write_bytes(os.urandom(RESERVED_BYTES))


def free_reserve(run_dir: Path) -> None:
    """Free the space."""
    (run_dir / RESERVE).unlink(missing_ok=True)


def write_with_reserve(run_dir: Path, write: Callable[[], object]) -> None:
    """Call ``write``; if the disk is full, free the reserved space and try again."""
    try:
        write()
    except OSError as error:
        if error.errno not in DISK_FULL or not (run_dir / RESERVE).exists():
            raise
        free_reserve(run_dir)
        write()
