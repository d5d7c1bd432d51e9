"""Files: atomic writes, and writes that survive a power failure."""

from __future__ import annotations

import os
import shutil
import uuid
from io import IOBase
from pathlib import Path
from typing import IO

from harness.errors import MachineError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a new file beside ``path`` and rename it into place: a crash leaves the old one or the new one.

    Raises:
        OSError: the folder is missing, full or not writable; ``path`` is unchanged.
    """
    # Not tempfile.mkstemp: only the owner could read the file, and run folders are often shared by a group.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            file.write(data)
            sync_file(file)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_file(file: IOBase | IO[bytes]) -> None:
    """Make the content of a file survive a power failure."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power failure."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def require_space(target: Path, nbytes: int) -> None:
    """Check that the disk of ``target`` has room for it; its folder exists.

    Raises:
        MachineError: there is less free space than ``nbytes``.
    """
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise MachineError(
            f"{target}: needs {nbytes / 1e9:.3f} GB, and the disk has {free / 1e9:.3f} GB left"
        )
