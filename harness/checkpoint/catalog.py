"""A folder of checkpoints: which are complete, which are damaged and how, and which may go. Imports no torch.

    step-500/ step-1000/ ...    each with .metadata, __<rank>_0.distcp (DCP), and manifest.json, written last
    superseded/<n>/step-<n>/    what load_step went back behind

A checkpoint counts when its manifest is there, whole, and every file it lists has the size it says. What the
files hold is checked against checksums when it is read (harness/checkpoint/storage.py).
"""

from __future__ import annotations

import errno
import re
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import fsspec

from harness.checkpoint.manifest import MANIFEST, METADATA, UnknownFormat, decode_manifest
from harness.errors import UserError
from harness.locks import Held, lock

SUPERSEDED = "superseded"
LOCK = ".lock"

_STEP = re.compile(r"step-(\d+)")


class DamagedCheckpoint(Exception):
    """A checkpoint is not complete, or not what was written; the message says in what."""


class UnfinishedCheckpoint(DamagedCheckpoint):
    """A checkpoint was never complete: there is no manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint.

    Attributes:
        path: its folder, a path or an fsspec URL.
        manifest: what it says of itself; empty for one that other software wrote.
    """

    path: str
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """The step it was written after."""
        return self.manifest["step"]

    @property
    def holds(self) -> str:
        """``full``, ``model`` (the weights alone), or ``hf`` (the weights as safetensors)."""
        return self.manifest.get("holds", "full")

    @property
    def state(self) -> dict[str, Any]:
        """Everything that is no tensor: counters, positions."""
        return self.manifest["state"]

    @property
    def job(self) -> dict[str, Any] | None:
        """The job that wrote it, if it says so."""
        return self.manifest.get("job")


class CheckpointFolder:
    """A folder that holds checkpoints as ``step-<n>``.

    Args:
        path: a path or an fsspec URL; need not exist.

    Raises:
        UserError: the URL names a protocol that is not known or whose package is not installed.
    """

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or path
        self._fs, self._root = _open_url(self.path)
        self._lock: IO[bytes] | None = None

    def path_of(self, step: int) -> str:
        """Where the checkpoint of a step lies."""
        return f"{self.path}/step-{step}"

    def steps(self) -> list[int]:
        """Steps that have an entry ``step-<n>``, ascending: complete or not, a folder, a file or a link."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = [_name(path) for path in self._fs.ls(self._root, detail=False)]
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def find(self, step: int) -> Checkpoint:
        """The checkpoint of a step.

        Raises:
            DamagedCheckpoint: it is not complete.
        """
        return open_checkpoint(self.path_of(step))

    def complete(self, most: int | None = None) -> tuple[list[Checkpoint], dict[str, DamagedCheckpoint]]:
        """Checkpoints that are complete as far as sizes tell, and what is wrong with the others.

        Args:
            most: how many complete ones to look for, from the newest on; None looks at all.

        Returns:
            The checkpoints, newest first, and reasons by path for those that were looked at in vain.
        """
        found: list[Checkpoint] = []
        wrong: dict[str, DamagedCheckpoint] = {}
        for step in reversed(self.steps()):
            if most is not None and len(found) == most:
                break
            try:
                found.append(self.find(step))
            except DamagedCheckpoint as error:
                wrong[self.path_of(step)] = error
        return found, wrong

    def remove(self, step: int) -> None:
        """Removes the checkpoint of a step, or what there is of it.

        Raises:
            OSError: it cannot be removed.
        """
        remove(self.path_of(step))

    def hold(self) -> None:
        """Keeps others from writing here until ``release``, or the end of the process; local folders only.

        Raises:
            Held: another process does.
            OSError: the folder cannot be written.
        """
        self._try_writing()
        file = _local(self.path, LOCK)
        if file is not None:
            self._lock = lock(file, create=True)

    def release(self) -> None:
        """Lets others write here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _try_writing(self) -> None:
        """Makes the folder, and writes and removes a file in it."""
        probe = f"{self._root}/.writable-{uuid.uuid4().hex}"
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(probe, b"x")
        self._fs.rm_file(probe)

    def supersede_after(self, step: int) -> None:
        """Clears the way of a run that goes on from a step: later checkpoints are moved aside.

        Those that were never finished are removed.

        Raises:
            OSError: they cannot be moved or removed.
        """
        later = [self.path_of(each) for each in self.steps() if each > step]
        for path in later:
            remove_unfinished(path)
        _set_aside([path for path in later if self._fs.exists(_open_url(path)[1])])

    def purge(self, keep: int) -> None:
        """Removes complete checkpoints but the newest ``keep`` (0 keeps all), and leftovers of older ones.

        The newest complete one stays whatever ``keep`` is, and so does one that somebody is reading.

        Raises:
            OSError: something cannot be removed.
        """
        complete = self.complete(None if keep else 1)[0]
        if not complete:
            return
        full = next((each for each in complete if each.holds == "full"), None)
        for each in complete[keep:] if keep else []:
            # Behind the weights alone, the newest that a run could go on from.
            if each is not full:
                _remove_unless_read(each.path)
        for step in self.steps():
            # Half-written, or half-removed, by a process that was killed.
            if step < complete[0].step:
                remove_unfinished(self.path_of(step))


def open_checkpoint(path: str) -> Checkpoint:
    """The checkpoint in a folder; one that other software wrote with DCP has an empty manifest.

    Raises:
        DamagedCheckpoint: there is none, or it is not complete.
    """
    fs, root = _open_url(path)
    fs.invalidate_cache()
    manifest = _read_manifest(fs, root)
    _check_sizes(fs, root, manifest["files"])
    return Checkpoint(path, manifest)


def check_files(path: str, files: dict[str, Any]) -> None:
    """Checks that this process sees the files of a checkpoint, with the sizes they were written with.

    Raises:
        DamagedCheckpoint: it does not.
    """
    fs, root = _open_url(path)
    fs.invalidate_cache()
    _check_sizes(fs, root, files)


def _check_sizes(fs: Any, root: str, files: dict[str, Any]) -> None:
    sizes = _sizes(fs, root)
    for name, facts in files.items():
        if name not in sizes:
            raise DamagedCheckpoint(f"{name} is missing")
        if sizes[name] != facts["size"]:
            raise DamagedCheckpoint(f"{name} has {sizes[name]} bytes instead of {facts['size']}")


def remove(path: str) -> None:
    """Removes a checkpoint; the manifest first, so that half of one is never taken for a whole.

    Raises:
        OSError: it cannot be removed.
    """
    fs, root = _open_url(path)
    link = _local(path, "")
    if link is not None and link.is_symlink():
        link.unlink()  # what it points to is not ours, and may not exist
        return
    if fs.exists(f"{root}/{MANIFEST}"):
        fs.rm_file(f"{root}/{MANIFEST}")
    if fs.exists(root):
        fs.rm(root, recursive=True)


def make_room(path: str) -> None:
    """Clears the place of a checkpoint that is to be written: what was finished is moved aside, not removed.

    Raises:
        OSError: it cannot be moved or removed.
    """
    fs, root = _open_url(path)
    if fs.exists(f"{root}/{MANIFEST}"):
        _set_aside([path])
    else:
        remove(path)


def remove_unfinished(path: str) -> None:
    """Removes a checkpoint that has no manifest.

    Raises:
        OSError: it cannot be removed.
    """
    fs, root = _open_url(path)
    if not fs.exists(f"{root}/{MANIFEST}"):
        remove(path)


def _set_aside(paths: list[str]) -> None:
    """Moves checkpoints of one folder to the next number under ``superseded/``."""
    if not paths:
        return
    fs, first = _open_url(paths[0])
    aside = f"{first.rsplit('/', 1)[0]}/{SUPERSEDED}"
    fs.makedirs(aside, exist_ok=True)
    numbers = [int(name) for name in map(_name, fs.ls(aside, detail=False)) if name.isdigit()]
    target = f"{aside}/{max(numbers, default=0) + 1}"
    fs.makedirs(target)
    for path in paths:
        root = _open_url(path)[1]
        fs.mv(root, f"{target}/{_name(root)}", recursive=True)


def is_foreign(path: str) -> bool:
    """Whether a folder holds a DCP checkpoint without a manifest: one that other software wrote."""
    fs, root = _open_url(path)
    return bool(fs.exists(f"{root}/{METADATA}")) and not fs.exists(f"{root}/{MANIFEST}")


def _read_manifest(fs: Any, root: str) -> dict[str, Any]:
    """Reads and checks the manifest by itself."""
    try:
        content = fs.cat_file(f"{root}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        raise UnfinishedCheckpoint(f"it was not finished: there is no {MANIFEST}") from None
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise DamagedCheckpoint(f"{MANIFEST} is no file") from None
        raise UserError(f"{root}/{MANIFEST}: cannot be read: {error}") from error
    try:
        return decode_manifest(content)
    except UnknownFormat as error:
        raise DamagedCheckpoint(str(error)) from None
    except ValueError as error:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {error}") from None


def _sizes(fs: Any, root: str) -> dict[str, int]:
    return {
        _name(entry["name"]): entry["size"] for entry in fs.ls(root, detail=True) if entry["type"] == "file"
    }


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Keeps a local checkpoint from being purged while it is entered.

    Raises:
        DamagedCheckpoint: it is being removed.
    """
    manifest = _local(path, MANIFEST)
    if manifest is None or not manifest.is_file():
        yield
        return
    try:
        held = lock(manifest, shared=True)
    except (Held, FileNotFoundError):
        raise DamagedCheckpoint("it is being removed") from None
    with held or nullcontext():
        yield


def _remove_unless_read(path: str) -> None:
    """Removes a checkpoint, unless a process has entered ``reading`` for it."""
    manifest = _local(path, MANIFEST)
    try:
        with (None if manifest is None else lock(manifest)) or nullcontext():
            remove(path)
    except Held:
        return


def is_url(path: str) -> bool:
    """Whether a path is for fsspec to open, and not for this machine's file systems."""
    return "://" in path and not path.startswith("file://")


def _local(path: str, name: str) -> Path | None:
    """A file of a folder on this machine's file systems."""
    return None if is_url(path) else Path(path.removeprefix("file://")) / name


def _open_url(path: str) -> tuple[Any, str]:
    try:
        fs, root = fsspec.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: cannot be opened: {' '.join(str(error).split())}") from None
    return fs, root.rstrip("/") or root
