"""Folders that are complete or absent: one process at a time builds, and digests tell damage.

The builder holds a file lock, which the operating system releases when the process ends. Some file
systems have no locks, or locks that other nodes do not see. Therefore the builder also writes a
heartbeat, and a builder of another node is dead when its heartbeat has stopped.

Files are hashed in blocks, by several threads. When a folder is opened, sizes are always compared.
All blocks are compared if the file was modified since the last complete comparison, or has at most
``SAMPLE_BLOCKS``; otherwise a random sample of ``SAMPLE_BLOCKS``. So opening a checked folder reads
at most 512 MiB per file.
"""

import contextlib
import hashlib
import itertools
import json
import os
import random
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import xxhash

from harness.util.encoding import parse_object
from harness.util.files import LockedError, lock, write_atomically
from harness.util.hardware import node_name

LOCK = ".lock"
HEARTBEAT = ".heartbeat"
BEAT_SECONDS = 5.0
DEAD_SECONDS = 60.0
_LONGEST_POLL_SECONDS = 1.0
_ABANDONED_SECONDS = 86400.0  # longest time between two writes, on file systems without locks

CHECKED = "checked.json"
BLOCK_BYTES = 1 << 24
SAMPLE_BLOCKS = 32
_THREADS = 4
NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class Damaged(Exception):
    """A file of a folder is damaged; the message has the details."""


class Building:
    """The only builder's work in a folder."""

    is_useless = False
    """Set it to remove the folder at the end, because nobody will continue the work."""


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
    pause = 0.01
    watch = _Watch(folder)
    while not is_built():
        try:
            held = _lock(folder)
        except LockedError:
            pass
        else:
            with held or contextlib.nullcontext():
                if watch.is_dead(has_lock=held is not None) and not is_built():
                    building = Building()
                    try:
                        with _beating(folder):
                            yield building
                    finally:
                        if building.is_useless:
                            shutil.rmtree(folder, ignore_errors=True)
                    return
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_POLL_SECONDS)
    yield None


def _lock(folder: Path) -> IO[bytes] | None:
    """Lock the folder; return None if the file system has no locks.

    LockedError also means that the last builder has just removed the folder.
    """
    folder.mkdir(parents=True, exist_ok=True)
    try:
        held = lock(folder / LOCK, create=True)
        if held is None or os.fstat(held.fileno()).st_ino == (folder / LOCK).stat().st_ino:
            return held
        held.close()
    except FileNotFoundError:
        pass
    raise LockedError(str(folder))


class _Watch:
    """Watches the heartbeat of another builder, by this process's clock."""

    def __init__(self, folder: Path) -> None:
        self._file = folder / HEARTBEAT
        self._seen = b""
        self._since = time.monotonic()

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
            self._seen = beat
            self._since = now
        return now - self._since > DEAD_SECONDS


@contextmanager
def _beating(folder: Path) -> Iterator[None]:
    stopped = threading.Event()
    owner = f"{node_name()} {uuid.uuid4().hex}"
    path = folder / HEARTBEAT

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


def remove_folder(folder: Path) -> None:
    """Remove a folder that others may read; it is renamed first, so that none of them finds part of it."""
    removed = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another process was faster
        folder.rename(removed)
        shutil.rmtree(removed, ignore_errors=True)


def remove_abandoned(folder: Path, work: Path, after: float) -> None:
    """Remove a folder that was not written for ``after`` seconds, if its builder is dead.

    Args:
        work: the folder that its builder locks.
        after: at least a minute: a builder makes its folder and then locks it, and locking it in
            between would stop the builder.
    """
    try:
        age = time.time() - max(path.stat().st_mtime for path in (folder, work, *work.iterdir()))
    except OSError:
        return
    if age <= after:
        return
    try:
        held = lock(work / LOCK)
    except FileNotFoundError:
        held = None
    except (LockedError, OSError):  # OSError: another user's lock file cannot be opened
        return
    with held or contextlib.nullcontext():
        # Without locks, the folder's age decides.
        if held is not None or age > _ABANDONED_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Return sizes and digests of files, for ``check_files``; JSON-serializable."""
    found = {}
    for name in names:
        size = (folder / name).stat().st_size
        found[name] = {
            "size": size,
            "xxh3_64": _hash_blocks(folder / name, range(-(-size // BLOCK_BYTES))),
        }
    return found


def check_sizes(folder: Path, files: Mapping[str, Any]) -> None:
    """Compare sizes of files with those that ``describe_files`` returned; raise Damaged if they differ."""
    for name, facts in files.items():
        try:
            found = (folder / name).stat().st_size
            size = facts["size"]
            digests = facts["xxh3_64"]
            if len(digests) != -(-size // BLOCK_BYTES):
                raise Damaged(f"{name}: checksums are missing")
        except NO_FILE as error:
            raise Damaged(f"{name}: {error.strerror}") from None
        except (KeyError, TypeError) as error:
            raise Damaged(f"{name}: its description is damaged: {error!r}") from None
        if found != size:
            raise Damaged(f"{name} has {found} bytes instead of {size}")


def check_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Compare sizes and digests of files with those that ``describe_files`` returned.

    Raises:
        Damaged: a file is missing, has another size, or a block's digest differs.
    """
    check_sizes(folder, files)
    try:  # modification time of each file when it was last compared completely
        checked = parse_object((folder / CHECKED).read_bytes())
    except (OSError, ValueError):
        checked = {}
    times = {name: (folder / name).stat().st_mtime_ns for name in files}
    for name, time_ns in times.items():
        digests = files[name]["xxh3_64"]
        blocks = list(range(len(digests)))
        if checked.get(name) == time_ns and len(blocks) > SAMPLE_BLOCKS:
            blocks = random.SystemRandom().sample(blocks, SAMPLE_BLOCKS)
        for block, found in zip(blocks, _hash_blocks(folder / name, blocks), strict=True):
            if found != digests[block]:
                raise Damaged(
                    f"{name}: bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES} do not have the "
                    "checksum they were written with"
                )
    if any(checked.get(name) != time_ns for name, time_ns in times.items()):
        # The folder may be another user's; then the next reader compares all of it.
        with contextlib.suppress(OSError):
            write_atomically(folder / CHECKED, json.dumps({**checked, **times}).encode())


def file_digest(file: Path, algorithm: Callable[[], Any]) -> str:
    """Return the checksum of a file, which is read in blocks."""
    with file.open("rb") as content:
        return hashlib.file_digest(content, algorithm).hexdigest()


def _hash_blocks(file: Path, blocks: Iterable[int]) -> list[str]:
    def hash_block(block: int) -> str:
        with file.open("rb") as content:
            content.seek(block * BLOCK_BYTES)
            return xxhash.xxh3_64_hexdigest(content.read(BLOCK_BYTES))

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(hash_block, blocks))
