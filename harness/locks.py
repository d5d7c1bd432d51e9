"""Locks on files, held by processes: they end with the process, however it ends."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import IO

try:
    import fcntl
except ImportError:  # no such thing outside of POSIX
    fcntl = None  # type: ignore[assignment]

# What file systems without locks say (some Lustre mounts).
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)


class Held(Exception):
    """Another process has the lock."""


def lock(path: Path, *, shared: bool = False, create: bool = False) -> IO[bytes] | None:
    """Locks a file.

    Args:
        path: the file.
        shared: whether others may have a shared lock on it too.
        create: whether to make the file if it is missing.

    Returns:
        the open file, which holds the lock until it is closed; None where there are no locks.

    Raises:
        Held: another process has a lock that excludes this one.
        OSError: the file cannot be opened.
    """
    file = path.open("ab" if create else "rb" if shared else "rb+")
    if fcntl is None:
        return file
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise Held(str(path)) from None
    except OSError as error:
        file.close()
        if error.errno not in _NO_LOCKS:
            raise
        return None
    return file
