"""Lets one process at a time build something in a folder, on all nodes that share it.

The builder holds a file lock, which the operating system releases when the process ends. Some file systems
have no locks, or locks that other nodes do not see. Therefore the builder also writes a heartbeat, and a
builder of another node is dead when its heartbeat has stopped.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from harness.config.cluster import node_name
from harness.util.files import LockedError, lock

LOCK, HEARTBEAT = ".lock", ".heartbeat"
BEAT_SECONDS, DEAD_SECONDS = 5.0, 60.0
_LONGEST_POLL_SECONDS = 1.0


class Building:
    """The only builder's work in a folder.

    Attributes:
        is_useless: set it to remove the folder at the end, because nobody will continue the work.
    """

    is_useless = False


@contextmanager
def only_builder(folder: Path, is_built: Callable[[], bool]) -> Iterator[Building | None]:
    """Wait until this process is the folder's only builder, or another process has built.

    Args:
        folder: where to build; made if missing.
        is_built: returns whether the result is there; polled.

    Yields:
        This process's work; None if the result is there.

    Raises:
        OSError: the folder cannot be made or written.
    """
    pause, watch = 0.01, _Watch(folder)
    while not is_built():
        try:
            held = _lock(folder)
        except LockedError:
            pass
        else:
            with held or contextlib.nullcontext():
                if watch.is_dead(has_lock=held is not None) and not is_built():
                    yield from _build(folder)
                    return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    yield None


def _build(folder: Path) -> Iterator[Building]:
    building = Building()
    try:
        with _beating(folder):
            yield building
    finally:
        if building.is_useless:
            shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: Path) -> IO[bytes] | None:
    """Lock the folder; return None if the file system has no locks.

    Raises:
        LockedError: another process has the lock, or the last builder has just removed the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder / LOCK, create=True)
    except FileNotFoundError:
        raise LockedError(str(folder)) from None
    if held is not None:
        try:
            is_current = os.fstat(held.fileno()).st_ino == (folder / LOCK).stat().st_ino
        except FileNotFoundError:
            is_current = False
        if not is_current:
            held.close()
            raise LockedError(str(folder))
    return held


class _Watch:
    """Watches the heartbeat of another builder, by this process's clock."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / HEARTBEAT
        self._seen, self._since = b"", time.monotonic()

    def is_dead(self, *, has_lock: bool) -> bool:
        """Whether there is no other builder; ``has_lock``: this process has the folder's lock."""
        try:
            beat = self._file.read_bytes()
        except OSError:
            return True
        if has_lock and beat.startswith(f"{node_name()} ".encode()):
            return True
        now = time.monotonic()
        if beat != self._seen:
            self._seen, self._since = beat, now
        return now - self._since > DEAD_SECONDS


@contextmanager
def _beating(folder: Path) -> Iterator[None]:
    """Write a heartbeat inside the ``with`` block."""
    stopped, owner, path = threading.Event(), f"{node_name()} {uuid.uuid4().hex}", folder / HEARTBEAT

    def beat() -> None:
        for number in itertools.count():
            with contextlib.suppress(OSError):  # a full disk; the build reports it
                path.write_text(f"{owner} {number}")
            if stopped.wait(BEAT_SECONDS):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()
        with contextlib.suppress(OSError):
            path.unlink()
