"""A copy of the code beside the runs it is for, so that what waits in a queue is not changed by editing."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import uuid
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent.parent


def snapshot_path(home: Path) -> Path:
    """Where the code as it is now lies, or would lie: ``home/code/<digest>``, to be put on PYTHONPATH.

    Args:
        home: the folder of the run or the sweep.
    """
    return home.absolute() / "code" / _digest()


def take_snapshot(home: Path) -> Path:
    """Copies the ``harness`` package there, unless that very code lies there already; returns the folder.

    Raises:
        OSError: it cannot be written.
    """
    target = snapshot_path(home)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    for path in _files():
        copy = temporary / _PACKAGE.name / path.relative_to(_PACKAGE)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
    try:
        os.rename(temporary, target)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not target.is_dir():  # or else another process was quicker
            raise
    return target


@functools.cache
def _digest() -> str:
    digest = hashlib.sha256()
    for path in _files():
        content = path.read_bytes()
        digest.update(f"{path.relative_to(_PACKAGE)}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:12]


def _files() -> list[Path]:
    return sorted(path for path in _PACKAGE.rglob("*") if path.is_file() and _is_code(path))


def _is_code(path: Path) -> bool:
    return "__pycache__" not in path.parts and not path.name.startswith(".")
