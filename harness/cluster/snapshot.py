"""A copy of the code beside the runs it is for, so that what waits in a queue is not changed by editing."""

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

from harness.errors import DISK_FULL, MachineError, UserError

_PACKAGE = Path(__file__).resolve().parent.parent
# Modules, the configurations of an installed package, and tokenizers. Other files are no code.
_SUFFIXES = (".py", ".yaml", ".model")
LARGEST_BYTES = 10_000_000
_WORKS = "would work: elsewhere than in the package, or cluster.snapshot=false"


@dataclass(frozen=True)
class _File:
    """A file of the package: path in it, permissions, and content, which is read once."""

    path: str
    mode: int
    content: bytes


def snapshot_path(home: Path) -> Path:
    """Where the code as it is now lies, or would lie: ``home/code/<digest>``, to be put on PYTHONPATH.

    Args:
        home: the folder of the run or the sweep.

    Raises:
        UserError: the package holds a file that is not copied.
    """
    return home.absolute() / "code" / _digest(_PACKAGE)


def take_snapshot(home: Path) -> Path:
    """Copies the ``harness`` package there, unless that very code lies there already; returns the folder.

    Raises:
        UserError: the package holds a file that is not copied, or the copy cannot be written.
        MachineError: the disk is full. Nothing of the copy is left.
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
            raise MachineError(
                f"{target}: the code cannot be copied: the disk is full, or a quota is"
            ) from None
        raise UserError(f"{target}: the code cannot be copied: {error}") from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target


def _write(package: Path, copy: Path) -> None:
    for file in _read(package):
        path = copy / file.path
        _copy_folder(package, copy, Path(file.path).parent)
        # Never readable by more people than the original, not even while it is written.
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as stream:
            stream.write(file.content)
            os.fchmod(stream.fileno(), file.mode)


def _copy_folder(package: Path, copy: Path, folder: Path) -> None:
    """Make a folder of the copy with the permissions of the package's, and writable by its owner."""
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
    """Yield the files of code. Links, which may lead to anything, and large files are refused by name."""

    def fail(error: OSError) -> None:
        raise error

    for folder, folders, files in os.walk(package, onerror=fail):
        folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
        known = [name for name in files if name.endswith(_SUFFIXES) and not name.startswith(".")]
        for path in (Path(folder) / name for name in (*folders, *known)):
            if path.is_symlink():
                raise UserError(f"{path}: is a link, which a snapshot of the code does not follow; {_WORKS}")
            if path.is_file():
                if path.stat().st_size > LARGEST_BYTES:
                    size, most = path.stat().st_size / 1e6, LARGEST_BYTES / 1e6
                    raise UserError(
                        f"{path}: has {size:.0f} MB, and a snapshot of the code copies files of at most "
                        f"{most:.0f} MB; {_WORKS}"
                    )
                yield path
