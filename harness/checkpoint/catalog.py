"""A folder of checkpoints: find complete ones, explain damaged ones, remove old ones. Imports no torch.

    step-500/ step-1000/ ...    each with .metadata, __<rank>_0.distcp (DCP), and manifest.json, written last
    superseded/<n>/step-<n>/    checkpoints moved aside, e.g. later ones when load_step goes back

A checkpoint is complete when its manifest is valid and every file listed there has the listed size.
File contents are compared with checksums when they are read (harness/checkpoint/storage.py).
"""

import errno
import json
import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from harness.util.encoding import dumps, parse_object
from harness.util.errors import UserError
from harness.util.files import LockedError, lock

MANIFEST = "manifest.json"
METADATA = ".metadata"
FORMAT = 1
# Key of a file's checksum in the manifest, and attribute of an entry's storage info in DCP's
# metadata, where other readers ignore it.
CHECKSUM = "xxh3_128"


def encode_manifest(manifest: dict[str, Any]) -> bytes:
    """Encode a manifest as JSON and add its checksum."""
    # Round-trip through JSON first: the reader computes the checksum from the decoded values.
    body = json.loads(dumps({"format": FORMAT, **manifest}))
    return json.dumps({**body, "checksum": _checksum(body)}, indent=1).encode() + b"\n"


def _checksum(body: dict[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())


SUPERSEDED = "superseded"
LOCK = ".lock"

_STEP = re.compile(r"step-(\d+)")


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete, or its files have changed since they were written."""


class UnfinishedCheckpoint(DamagedCheckpoint):
    """A checkpoint was never finished: it has no manifest."""


@dataclass(frozen=True)
class Checkpoint:
    """One complete checkpoint, in a folder or at an fsspec URL; other software's has an empty manifest."""

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
        """Everything except tensors: counters, data positions."""
        return self.manifest["state"]

    @property
    def job(self) -> dict[str, Any] | None:
        """The job that wrote it, if recorded."""
        return self.manifest.get("job")


class CheckpointFolder:
    """A folder that holds checkpoints as ``step-<n>``: a path or an fsspec URL; need not exist."""

    def __init__(self, path: str) -> None:
        self.path = path.rstrip("/") or path
        self._fs, self._root = _open_url(self.path)
        self._lock: IO[bytes] | None = None

    def path_of(self, step: int) -> str:
        """Path of the checkpoint of a step."""
        return f"{self.path}/step-{step}"

    def steps(self) -> list[int]:
        """Steps that have an entry ``step-<n>``, ascending: complete or not, a folder, a file or a link."""
        self._fs.invalidate_cache()
        if not self._fs.isdir(self._root):
            return []
        names = [_name(path) for path in self._fs.ls(self._root, detail=False)]
        return sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)

    def find(self, step: int) -> Checkpoint:
        """The checkpoint of a step; raises DamagedCheckpoint if it is not complete."""
        return open_checkpoint(self.path_of(step))

    def complete(
        self, most: int | None = None
    ) -> tuple[list[Checkpoint], dict[str, DamagedCheckpoint]]:
        """The newest ``most`` complete checkpoints (None: all), and errors by path for others examined.

        The newest is first. File sizes are checked, contents are not.
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

    def hold(self) -> None:
        """Lock a local folder until ``release`` or the end of the process; LockedError if another has it."""
        # Create the folder; write and remove a file in it.
        probe = f"{self._root}/.writable-{uuid.uuid4().hex}"
        self._fs.makedirs(self._root, exist_ok=True)
        self._fs.pipe_file(probe, b"x")
        self._fs.rm_file(probe)
        file = _local(self.path, LOCK)
        if file is not None:
            self._lock = lock(file, create=True)

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def supersede_after(self, step: int) -> None:
        """Move checkpoints later than ``step`` to ``superseded/``; remove unfinished ones."""
        set_aside([self.path_of(each) for each in self.steps() if each > step])

    def purge(self, keep: int, keeps: Callable[[int], bool] = lambda _: False) -> None:
        """Remove complete checkpoints except the newest ``keep`` (0 keeps all), and unfinished older ones.

        Always kept: the newest complete one, the newest that a run can resume from, any being
        read, and those of steps for which ``keeps`` says so.
        """
        complete = self.complete(None if keep else 1)[0]
        if not complete:
            return
        full = next((each for each in complete if each.holds == "full"), None)
        for each in complete[keep:] if keep else []:
            # If the newest one holds the weights alone, a run can still resume from this one.
            if each is not full and not keeps(each.step):
                manifest = _local(each.path, MANIFEST)
                # One that is being read is locked.
                with suppress(LockedError), (lock(manifest) if manifest else None) or nullcontext():
                    remove(each.path)
        for step in self.steps():
            # Partly written, or partly removed, by a process that was killed.
            if step < complete[0].step:
                remove_unfinished(self.path_of(step))


def open_checkpoint(path: str) -> Checkpoint:
    """Open the checkpoint in a folder and check its file sizes; DamagedCheckpoint if that fails."""
    fs, root = _open_url(path)
    fs.invalidate_cache()
    try:
        content = fs.cat_file(f"{root}/{MANIFEST}")
    except (FileNotFoundError, NotADirectoryError):
        raise UnfinishedCheckpoint(f"it was not finished: there is no {MANIFEST}") from None
    except OSError as error:
        if error.errno in (errno.EISDIR, errno.ELOOP):
            raise DamagedCheckpoint(f"{MANIFEST} is not a file") from None
        raise UserError(f"{root}/{MANIFEST}: cannot be read: {error}") from error
    try:
        manifest = parse_object(content)
        if manifest.pop("checksum", None) != _checksum(manifest):
            raise ValueError("it does not have the checksum it was written with")
    except ValueError as error:
        raise DamagedCheckpoint(f"{MANIFEST} is damaged: {error}") from None
    version = manifest.get("format")
    if version != FORMAT:
        raise DamagedCheckpoint(f"{MANIFEST} has format {version}, and this version reads {FORMAT}")
    for key in ("step", "files", "state", "options"):
        if key not in manifest:
            raise DamagedCheckpoint(f"{MANIFEST} is damaged: it has no {key}")
    named = _STEP.fullmatch(_name(root))
    if named and "train_state" in manifest["state"] and manifest["step"] != int(named[1]):
        raise DamagedCheckpoint(f"{MANIFEST} is of step {manifest['step']}")
    check_files(path, manifest["files"])
    return Checkpoint(path, manifest)


def check_files(path: str, files: dict[str, Any]) -> None:
    """Raise DamagedCheckpoint unless this process sees a checkpoint's files with their recorded sizes."""
    fs, root = _open_url(path)
    fs.invalidate_cache()
    try:
        entries = fs.ls(root, detail=True)
    except FileNotFoundError:
        raise DamagedCheckpoint("it has been removed") from None
    sizes = {_name(entry["name"]): entry["size"] for entry in entries if entry["type"] == "file"}
    for name, facts in files.items():
        if name not in sizes:
            raise DamagedCheckpoint(f"{name} is missing")
        if sizes[name] != facts["size"]:
            raise DamagedCheckpoint(f"{name} has {sizes[name]} bytes instead of {facts['size']}")


def remove(path: str) -> None:
    """Remove a checkpoint, its manifest first: a partly removed one never counts as complete."""
    fs, root = _open_url(path)
    link = _local(path, "")
    if link is not None and link.is_symlink():
        link.unlink()  # its target is not ours, and may not exist
        return
    if fs.exists(f"{root}/{MANIFEST}"):
        fs.rm_file(f"{root}/{MANIFEST}")
    if fs.exists(root):
        fs.rm(root, recursive=True)


def remove_unfinished(path: str) -> None:
    """Remove a checkpoint if it has no manifest."""
    fs, root = _open_url(path)
    if not fs.exists(f"{root}/{MANIFEST}"):
        remove(path)


def set_aside(paths: Sequence[str]) -> None:
    """Free paths of one folder: move finished checkpoints to ``superseded/<next number>``, remove others."""
    finished = []
    for path in paths:
        remove_unfinished(path)
        fs, root = _open_url(path)
        if fs.exists(root):
            finished.append(root)
    if not finished:
        return
    aside = f"{finished[0].rsplit('/', 1)[0]}/{SUPERSEDED}"
    fs.makedirs(aside, exist_ok=True)
    numbers = [int(name) for name in map(_name, fs.ls(aside, detail=False)) if name.isdigit()]
    target = f"{aside}/{max(numbers, default=0) + 1}"
    fs.makedirs(target)
    for root in finished:
        fs.mv(root, f"{target}/{_name(root)}", recursive=True)


def is_foreign(path: str) -> bool:
    """Whether a folder holds a DCP checkpoint without a manifest, i.e. one of other software."""
    fs, root = _open_url(path)
    return bool(fs.exists(f"{root}/{METADATA}")) and not fs.exists(f"{root}/{MANIFEST}")


def _name(path: str) -> str:
    return path.rstrip("/").rsplit("/", 1)[-1]


@contextmanager
def reading(path: str) -> Iterator[None]:
    """Context in which ``purge`` removes no local checkpoint; DamagedCheckpoint if it is being removed."""
    manifest = _local(path, MANIFEST)
    if manifest is None or not manifest.is_file():
        yield
        return
    try:
        held = lock(manifest, shared=True)
    except (LockedError, FileNotFoundError):
        raise DamagedCheckpoint("it is being removed") from None
    with held or nullcontext():
        yield


def is_url(path: str) -> bool:
    """Whether fsspec opens a path, rather than the local file system."""
    return "://" in path and not path.startswith("file://")


def _local(path: str, name: str) -> Path | None:
    """Local path of a file in a folder; None if the folder is a remote URL."""
    return None if is_url(path) else Path(path.removeprefix("file://")) / name


def _open_url(path: str) -> tuple[Any, str]:
    # Its import takes longer than a plan of a small model, and most paths are local.
    import fsspec

    try:
        fs, root = fsspec.url_to_fs(path)
    except (ValueError, ImportError) as error:
        raise UserError(f"{path}: cannot be opened: {' '.join(str(error).split())}") from None
    return fs, root.rstrip("/") or root
