"""File locks, which the operating system releases when the process ends."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # POSIX only
    fcntl = None  # type: ignore[assignment]

# Errors of file systems without locks (some Lustre mounts).
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class LockedError(Exception):
    """Another process has the lock."""


def lock(path: Path, *, shared: bool = False, create: bool = False) -> IO[bytes] | None:
    """Lock a file without waiting.

    Args:
        path: the file.
        shared: take a shared lock instead of an exclusive one.
        create: create the file if it is missing.

    Returns:
        The open file, which holds the lock until it is closed; None if the file system has no locks.

    Raises:
        LockedError: another process holds a conflicting lock.
        OSError: the file cannot be opened.
    """
    file = path.open("ab" if create else "rb" if shared else "rb+")
    if fcntl is None:
        return file
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
