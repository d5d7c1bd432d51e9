"""The token cache: documents tokenized once, stored on disk, read through a memory map.

A cache is a folder named by a hash of everything that determines its content, so it is never stale and never
modified. A damaged cache (``cache_check.py``) is rebuilt:

    <cache_dir>/tokens-<key>/meta.json             dtype, counts, checksums
    <cache_dir>/tokens-<key>/train.tokens          every document as [bos] text [eos], concatenated
    <cache_dir>/tokens-<key>/train.starts          int64, offset of each document
    <cache_dir>/tokens-<key>/validation.*          the held-out documents, if any
    <cache_dir>/.tokens-<key>-<id>/                a cache that is being written
    <cache_dir>/.unfinished-tokens-<key>/          tokenized units of a cache that is being built
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from harness.data.build_lock import LOCK, only_builder
from harness.data.cache_check import DamagedCache, check_contents, check_sizes, files_of, read_meta
from harness.data.documents import Source
from harness.data.size_limit import require_small
from harness.data.tokenizer import Tokenizer
from harness.data.tokenizing import TokenizedUnits, concatenate, tokenize
from harness.data.tokens import map_file
from harness.data.units import UNIT_BYTES, token_dtype, units_of
from harness.util.errors import DataError, MachineError
from harness.util.files import LockedError, lock

FORMAT_VERSION = 1
# Longest time between making a folder and locking it; on file systems without locks, between two writes.
_LOCKING_SECONDS, _ABANDONED_SECONDS = 60.0, 86400.0
# How long the finished units of a cache that nobody continues are kept.
_KEPT_SECONDS = 7 * 86400.0


@dataclass(frozen=True)
class TokenizedSplit:
    """The tokens of one split, on disk (``tokens.Tokens``).

    Attributes:
        tokens: all documents, concatenated (integers, 1-d memory map).
        starts: offset of each document in ``tokens`` (ascending).
        name: the source and the split, for error messages.
        damaged: number of documents of the source that were not UTF-8, and were repaired or left out.
    """

    tokens: np.ndarray
    starts: np.ndarray
    name: str
    damaged: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        return len(self.starts)

    def read(self, begin: int, end: int) -> np.ndarray:
        return self.tokens[begin:end].astype(np.int64)

    def starts_between(self, begin: int, end: int) -> np.ndarray:
        # Keys of the array's type: for keys of another type numpy converts all of the array.
        first, last = np.searchsorted(self.starts, np.array([begin, end], dtype=self.starts.dtype))
        return self.starts[first:last].astype(np.int64)


def open_cache(
    source: Source,
    tokenizer: Tokenizer,
    *,
    split: str,
    held_out: float,
    cache_dir: str,
    wait_for_all: Callable[[], None] | None,
    is_builder: bool,
) -> TokenizedSplit:
    """Open the tokens of ``source``; the builder tokenizes it first if there is no cache.

    Args:
        split: "train": the documents that are not held out; "validation": those that are. With
            ``held_out == 0`` either split has all documents.
        held_out: fraction of documents held out.
        wait_for_all: a barrier over all ranks; called once, between building and opening.
        is_builder: whether this rank builds the cache.

    Raises:
        ConfigError: the source is larger than data.tokenize_limit_gib, and there is no cache.
        DataError: the source cannot be read or holds no text, or the builder's cache is not visible here.
    """
    root, stored_split = Path(cache_dir).expanduser(), split if held_out > 0 else "train"
    if is_builder:
        folder = cache_folder(source, tokenizer, held_out, cache_dir)
        remove_abandoned(root)
        damage = _find_damage(folder, stored_split) if folder.exists() else None
        if damage is not None:
            sys.stderr.write(f"WARNING token cache {folder} is damaged and is rebuilt: {damage}\n")
            remove_damaged(folder)
        if not folder.exists():
            require_small(source, tokenizer)
            _build(folder, source, tokenizer, held_out)
    if wait_for_all is not None:
        wait_for_all()
    folder = cache_folder(source, tokenizer, held_out, cache_dir)
    if not folder.exists():
        raise DataError(
            f"token cache {folder} is not visible to this rank; "
            "data.cache_dir must be a folder that all ranks share"
        )
    try:
        return open_split(folder, stored_split, f"{source.name}, {split} documents")
    except DamagedCache as error:
        raise DataError(f"token cache {folder} is damaged: {error}; remove the folder") from None


def _find_damage(folder: Path, split: str) -> str | None:
    """Describe the damage to the files of a split; None if they are intact.

    Raises:
        DataError: the files cannot be read.
    """
    try:
        check_contents(folder, read_meta(folder), split)
    except DamagedCache as error:
        return str(error)
    except OSError as error:
        raise DataError(f"token cache {folder} cannot be read: {error.strerror}") from error
    return None


def remove_abandoned(root: Path) -> None:
    """Remove unfinished caches of builders that were killed; running builders hold a lock.

    Finished units are kept for some days, because the next job of the source continues with them.
    """
    for path in (*root.glob(".tokens-*"), *root.glob(".unfinished-*")):
        can_continue = path.name.startswith(".unfinished-")
        # A builder makes its folder and then locks it; locking it in between would stop the builder.
        age = _seconds_since_change(path)
        if age <= (_KEPT_SECONDS if can_continue else _LOCKING_SECONDS):
            continue
        try:
            held = lock(path / LOCK)
        except FileNotFoundError:
            held = None
        except (LockedError, OSError):  # OSError: another user's lock file cannot be opened
            continue
        with held or contextlib.nullcontext():
            # Without locks, the folder's age decides.
            if held is not None or age > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def _seconds_since_change(folder: Path) -> float:
    """Seconds since the last write in a folder; 0 if the folder is gone."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return 0.0


def cache_folder(source: Source, tokenizer: Tokenizer, held_out: float, cache_dir: str) -> Path:
    """Folder of a source's token cache, whether it exists or not.

    Raises:
        DataError: the source cannot be read.
    """
    key = [FORMAT_VERSION, source.identity, tokenizer.fingerprint, held_out]
    name = f"tokens-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}"
    return Path(cache_dir).expanduser() / name


def _build(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
    """Write the cache to a temporary folder and rename it: a reader sees all of it or nothing.

    If another process builds the same cache, wait for it. Finished units survive this process, unless the
    source or the disk must change.
    """
    work = folder.with_name(f".unfinished-{folder.name}")
    try:
        work.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write to {folder.parent}: {error.strerror}") from error
    try:
        with only_builder(work, folder.exists) as building:
            if building is None:
                return
            try:
                _write(folder, work, source, tokenizer, held_out)
            except (DataError, OSError):
                building.is_useless = True
                raise
            building.is_useless = True
    except OSError as error:
        raise MachineError(f"data.cache_dir: {folder.parent}: {error.strerror or error}") from error


def _write(folder: Path, work: Path, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
    units = units_of(source, tokenizer, UNIT_BYTES)
    tokenize(work, units, source, tokenizer, workers=source.config.tokenize_workers)
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    unfinished.mkdir()
    try:
        with lock(unfinished / LOCK, create=True) or contextlib.nullcontext():
            concatenate(unfinished, TokenizedUnits(work, units), token_dtype(tokenizer), held_out)
            if not any(read_meta(unfinished)["tokens"].values()):
                raise DataError(f"{source.name} {source.without_tokens}")
            (unfinished / LOCK).unlink()
            try:
                unfinished.rename(folder)
            except OSError:
                # On a file system without locks another builder may have been faster, with the same content.
                if not folder.exists():
                    raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def remove_damaged(folder: Path) -> None:
    """Remove a damaged cache; it is renamed first, so that no reader finds part of it."""
    damaged = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another builder was faster
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def open_split(folder: Path, split: str, name: str) -> TokenizedSplit:
    """Map the files of a split of a token cache.

    Raises:
        DamagedCache: a file is missing or has another size.
    """
    meta = read_meta(folder)
    check_sizes(folder, meta, split)
    tokens, starts = (folder / file for file in files_of(split))
    mapped = _map(tokens, meta["dtype"]), _map(starts, "int64")
    return TokenizedSplit(*mapped, name, meta.get("damaged", 0))


def _map(file: Path, dtype: str) -> np.ndarray:
    return map_file(str(file), dtype, 0, os.path.getsize(file) // np.dtype(dtype).itemsize)
