"""Copy the code next to the runs that use it, so that edits do not change jobs that wait in a queue."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import tempfile
from pathlib import Path

from harness.util import PACKAGE
from harness.util.errors import DISK_FULL, MachineError, UserError

# Modules, configurations of an installed package, and tokenizers. Other files are not copied.
_SUFFIXES = (".py", ".yaml", ".model")
LARGEST_BYTES = 10_000_000
_WORKS = "would work: a place outside of the package, or cluster.snapshot=false"


def snapshot_path(home: Path) -> Path:
    """Return the folder for a copy of the current code, ``home/code/<digest>``, to be put on PYTHONPATH."""
    digest = hashlib.sha256()
    for path, content in _code(PACKAGE).items():
        digest.update(f"{path}\0{len(content)}\0".encode() + content)
    return home.absolute() / "code" / digest.hexdigest()[:12]


def take_snapshot(home: Path) -> Path:
    """Copy the ``harness`` package to ``snapshot_path(home)`` unless it exists; return the folder."""
    target = snapshot_path(home)
    try:
        if not target.is_dir():
            target.parent.mkdir(parents=True, exist_ok=True)
            # Nobody else can enter the temporary folder while files have not yet their permissions.
            with tempfile.TemporaryDirectory(dir=target.parent, prefix=".") as temporary:
                _write(Path(temporary) / "copy" / PACKAGE.name)
                os.rename(Path(temporary) / "copy", target)
    except OSError as error:
        if target.is_dir():
            return target  # another process was quicker
        if error.errno in DISK_FULL:
            raise MachineError(f"{target}: the code cannot be copied: disk full or quota exceeded") from None
        raise UserError(f"{target}: the code cannot be copied: {error}") from None
    return target


def _write(copy: Path) -> None:
    folders: set[Path] = set()
    for path, content in _code(PACKAGE).items():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        (copy / path).write_bytes(content)
        shutil.copymode(PACKAGE / path, copy / path)
        folders |= set(path.parents)
    for folder in folders:
        (copy / folder).chmod(stat.S_IMODE((PACKAGE / folder).stat().st_mode) | stat.S_IRWXU)


def _fail(error: OSError) -> None:
    raise error


@functools.cache
def _code(package: Path) -> dict[Path, bytes]:
    """Read the code once, so that a copy matches its digest, by paths in the package.

    Refuse symbolic links, which may point anywhere, and large files, by name.
    """
    found = {}
    try:
        for folder, folders, files in os.walk(package, onerror=_fail):
            folders[:] = sorted(name for name in folders if name != "__pycache__" and name[0] != ".")
            known = sorted(name for name in files if name.endswith(_SUFFIXES) and name[0] != ".")
            for path in (Path(folder) / name for name in (*folders, *known)):
                if path.is_symlink():
                    raise UserError(f"{path}: snapshots of the code do not follow symbolic links; {_WORKS}")
                size = path.stat().st_size
                if path.is_file() and size > LARGEST_BYTES:
                    raise UserError(
                        f"{path}: has {size / 1e6:.0f} MB; snapshots of the code copy files of at most "
                        f"{LARGEST_BYTES / 1e6:.0f} MB; {_WORKS}"
                    )
                if path.is_file():
                    found[path.relative_to(package)] = path.read_bytes()
    except OSError as error:
        raise UserError(f"{package}: the code cannot be read for a snapshot: {error}; {_WORKS}") from None
    return found
