"""Compare the files of checkpoints with their recorded checksums.

Every file is read once, sequentially, and several files in parallel. Imports no torch.
"""

import os
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fsspec
import xxhash

from harness.checkpoint.catalog import (
    CHECKSUM,
    MANIFEST,
    Checkpoint,
    CheckpointFolder,
    DamagedCheckpoint,
    UnfinishedCheckpoint,
    is_foreign,
    is_url,
    open_checkpoint,
    reading,
)
from harness.run.folder import STATUS, RunFolder
from harness.util.errors import EXIT_MACHINE, EXIT_OK, UserError

_BLOCK = 1 << 24


@dataclass(frozen=True)
class ComparedCheckpoint:
    """Result of comparing one checkpoint: what was read, in how many seconds."""

    path: str
    state: str
    """``ok``, ``damaged``, or ``unfinished`` (its writing never completed)."""
    reason: str = ""
    files: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def describe(self) -> str:
        """One line for the user."""
        if self.state != "ok":
            return f"{self.path}: {self.state}: {self.reason}"
        rate = self.nbytes / 1e9 / max(self.seconds, 1e-9)
        return f"{self.path}: ok: {self.files} files, {self.nbytes / 1e9:.3f} GB ({rate:.2f} GB/s)"


def verify_all(folders: Sequence[str], *, newest: bool) -> tuple[list[ComparedCheckpoint], int]:
    """Compare the checkpoints of each folder, or its newest; print a line for each; with the exit code."""
    verdicts = []
    code = EXIT_OK
    for folder in folders:
        states = []
        paths = paths_in(folder)
        for path in paths[-1:] if newest else paths:
            verdict = verify(path)
            # A checkpoint of a run is in RUN/checkpoints.
            if (
                verdict.state == "unfinished"
                and path == paths[-1]
                and RunFolder(Path(path).parent.parent).state == "completed"
            ):
                reason = f"{verdict.reason}, and {STATUS} says that the run has completed"
                verdict = replace(verdict, state="damaged", reason=reason)
            states.append(verdict.state)
            verdicts.append(verdict)
            sys.stdout.write(f"{verdict.describe()}\n")
            sys.stdout.flush()
        if "damaged" in states or "ok" not in states:
            code = EXIT_MACHINE
    return verdicts, code


def paths_in(folder: str) -> list[str]:
    """Paths of the checkpoints in a folder: of a run, of checkpoints, or one checkpoint itself."""
    folders = [f"{folder.rstrip('/')}/checkpoints", folder]
    if not is_url(folder) and (Path(folder) / "job.json").is_file():
        from harness.checkpoint.resume import folder_of
        from harness.config.job import Job

        folders.insert(0, folder_of(Job.read(Path(folder) / "job.json"), Path(folder)))
    for each in folders:
        steps = CheckpointFolder(each).steps()
        if steps:
            return [CheckpointFolder(each).path_of(step) for step in steps]
    if is_foreign(folder):
        raise UserError(
            f"{folder}: it has no {MANIFEST}, so there are no checksums to compare with"
        )
    try:
        return [open_checkpoint(folder).path]
    except UnfinishedCheckpoint:
        works = "a checkpoint (step-<n>), a folder of them, or a run folder"
        raise UserError(f"{folder}: there is no checkpoint; would work: {works}") from None
    except DamagedCheckpoint:
        return [folder]


def verify(path: str) -> ComparedCheckpoint:
    """Compare one checkpoint, protected from removal meanwhile."""
    started = time.perf_counter()
    try:
        checkpoint = open_checkpoint(path)
        with reading(path):
            problems = _compare(checkpoint)
    except UnfinishedCheckpoint as error:
        fs, root = fsspec.url_to_fs(path)
        if not fs.isdir(root):  # a killed writer leaves a folder
            return ComparedCheckpoint(path, "damaged", "is no folder")
        return ComparedCheckpoint(path, "unfinished", str(error))
    except DamagedCheckpoint as error:
        return ComparedCheckpoint(path, "damaged", str(error))
    if problems:
        return ComparedCheckpoint(path, "damaged", "; ".join(problems))
    sizes = [facts["size"] for facts in checkpoint.manifest["files"].values()]
    return ComparedCheckpoint(path, "ok", "", len(sizes), sum(sizes), time.perf_counter() - started)


def _compare(checkpoint: Checkpoint) -> list[str]:
    fs, root = fsspec.url_to_fs(checkpoint.path)
    files = checkpoint.manifest["files"]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        found = list(threads.map(lambda name: _checksum(fs, f"{root}/{name}"), files))
    problems = []
    for name, checksum in zip(files, found, strict=True):
        if checksum.startswith("unreadable"):
            problems.append(f"{name}: {checksum}")
        elif checksum != files[name][CHECKSUM]:
            problems.append(f"{name} does not have the checksum it was written with")
    return problems


def _checksum(fs: Any, path: str) -> str:
    digest = xxhash.xxh3_128()
    try:
        with fs.open(path, "rb") as file:
            while block := file.read(_BLOCK):
                digest.update(block)
    except OSError as error:
        return f"unreadable: {error.strerror or error}"
    return digest.hexdigest()
