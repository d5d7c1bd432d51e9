"""Copy the code next to the runs that use it, so that edits do not change jobs that wait in a queue."""

from __future__ import annotations

import functools
import hashlib
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.util.errors import DISK_FULL, MachineError, UserError

_PACKAGE = Path(__file__).resolve().parent.parent
# Modules, configurations of an installed package, and tokenizers. Other files are not copied.
_SUFFIXES = (".py", ".yaml", ".model")
LARGEST_BYTES = 10_000_000
_WORKS = "would work: a place outside of the package, or cluster.snapshot=false"


@dataclass(frozen=True)
class _File:
    """A file of the package: its path in the package, permissions, and content, which is read once."""

    path: str
    mode: int
    content: bytes


def snapshot_path(home: Path) -> Path:
    """Return the folder for a copy of the current code, ``home/code/<digest>``, to be put on PYTHONPATH.

    Args:
        home: the folder of the run or the sweep.

    Raises:
        UserError: the package holds a file that is not copied.
    """
    return home.absolute() / "code" / _digest(_PACKAGE)


def take_snapshot(home: Path) -> Path:
    """Copy the ``harness`` package to ``snapshot_path(home)`` unless it exists; return the folder.

    Raises:
        UserError: the package holds a file that is not copied, or the copy cannot be written.
        MachineError: the disk is full. The partial copy is removed.
    """
    target = snapshot_path(home)
    if target.is_dir():
        return target
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex}")
    try:
        _write(_PACKAGE, temporary / _PACKAGE.name)
        os.rename(temporary, target)
    except OSError as error:
        if target.is_dir():
            return target  # another process was quicker
        if error.errno in DISK_FULL:
            raise MachineError(f"{target}: the code cannot be copied: disk full or quota exceeded") from None
        raise UserError(f"{target}: the code cannot be copied: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(package: Path, copy: Path) -> None:
    for file in _read(package):
        path = copy / file.path
        _copy_folder(package, copy, Path(file.path).parent)
        # Never more readable than the original, not even while it is written.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(file.content)
            os.fchmod(stream.fileno(), file.mode)


def _copy_folder(package: Path, copy: Path, folder: Path) -> None:
    """Create a folder of the copy with the permissions of the original, and writable by its owner."""
    if not (copy / folder).is_dir():
        if folder != Path():
            _copy_folder(package, copy, folder.parent)
        (copy / folder).mkdir(parents=True)
        (copy / folder).chmod(stat.S_IMODE((package / folder).stat().st_mode) | stat.S_IRWXU)


@functools.cache
def _digest(package: Path) -> str:
    digest = hashlib.sha256()
    for file in _read(package):
        digest.update(f"{file.path}\0{len(file.content)}\0".encode() + file.content)
    return digest.hexdigest()[:12]


@functools.cache
def _read(package: Path) -> tuple[_File, ...]:
    try:
        return tuple(
            _File(str(path.relative_to(package)), stat.S_IMODE(path.stat().st_mode), path.read_bytes())
            for path in sorted(_code_files(package))
        )
    except OSError as error:
        raise UserError(f"{package}: the code cannot be read for a snapshot: {error}; {_WORKS}") from None


def _code_files(package: Path) -> Iterator[Path]:
    """Yield the code files. Refuse symbolic links, which may point anywhere, and large files, by name."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(package, onerror=fail):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        known = [name for name in files if name.endswith(_SUFFIXES) and not name.startswith(".")]
        for path in (Path(folder) / name for name in (*folders, *known)):
            if path.is_symlink():
                raise UserError(f"{path}: snapshots of the code do not follow symbolic links; {_WORKS}")
            if path.is_file():
                if path.stat().st_size > LARGEST_BYTES:
                    size, most = path.stat().st_size / 1e6, LARGEST_BYTES / 1e6
                    raise UserError(
                        f"{path}: has {size:.0f} MB; snapshots of the code copy files of at most "
                        f"{most:.0f} MB; {_WORKS}"
                    )
                yield path
