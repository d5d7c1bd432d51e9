"""Files: atomic writes, writes that survive a power failure, checks of strangers' files, globs, locks."""

import contextlib
import errno
import fcntl
import glob
import os
import shutil
import stat
import uuid
from collections.abc import Iterator
from io import IOBase
from pathlib import Path
from typing import IO

from harness.util.errors import MachineError


def write_atomically(path: Path, data: bytes) -> None:
    """Write a new file beside ``path`` and rename it into place: a crash leaves the old or the new one."""
    # Not tempfile.mkstemp: only the owner could read the file, and run folders are often shared by
    # a group.
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
    """Raise MachineError if the disk of ``target``, whose folder exists, has less room than ``nbytes``."""
    free = shutil.disk_usage(target.parent).free
    if free < nbytes:
        raise MachineError(
            f"{target}: needs {nbytes / 1e9:.3f} GB, and the disk has {free / 1e9:.3f} GB left"
        )


def require_regular(path: Path) -> int:
    """Return the size of a regular file; raise OSError for others.

    A pipe or a device may have no end.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return found.st_size


def is_file_name(name: object) -> bool:
    """Whether a value in a stranger's file names a file or folder beside it."""
    return (
        isinstance(name, str)
        and name.isprintable()
        and name not in ("", "..")
        and Path(name).name == name
    )


def matching(pattern: str) -> Iterator[str]:
    """Yield the paths that match a glob, some of them twice.

    ``**`` does not follow a link to a folder that it is in, so it comes to an end.
    """
    if os.path.lexists(pattern):  # a name with brackets means itself
        yield pattern
        return
    parts = pattern.split("/")
    if "**" not in parts:
        yield from glob.iglob(pattern)
        return
    index = parts.index("**")
    below = "/".join(parts[index + 1 :] or ["*"])
    for root in glob.iglob("/".join([*parts[:index], ""]) or "./"):
        for folder in _folders(root, frozenset()):
            yield from matching(f"{glob.escape(folder.rstrip('/'))}/{below}")


def _folders(folder: str, parents: frozenset[tuple[int, int]]) -> Iterator[str]:
    """Yield a folder and those below it, without hidden ones and without any of its ``parents``."""
    inner: list[str] = []
    with contextlib.suppress(OSError):
        found = os.stat(folder)
        if (found.st_dev, found.st_ino) in parents:
            return
        parents |= {(found.st_dev, found.st_ino)}
        with os.scandir(folder) as entries:
            inner = [
                entry.path for entry in entries if entry.is_dir() and not entry.name.startswith(".")
            ]
    yield folder
    for path in inner:
        yield from _folders(path, parents)


# Errors of file systems without locks (some Lustre mounts).
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class LockedError(Exception):
    """Another process has the lock."""


def lock(path: Path, *, shared: bool = False, create: bool = False) -> IO[bytes] | None:
    """Lock a file without waiting, and return it open. Closing it releases the lock.

    Return None if the file system has no locks.

    Raises:
        LockedError: another process holds a conflicting lock.
        OSError: the file cannot be opened.
    """
    mode = "rb" if shared else "rb+"
    if create:
        mode = "ab"
    file = path.open(mode)
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise LockedError(str(path)) from None
    except OSError as error:
        file.close()
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return file
