"""The token cache: documents tokenized once, stored on disk, read through a memory map.

A cache is a folder named by a hash of everything that determines its content, so it is never stale and never
modified. A damaged cache (``cache_check.py``) is rebuilt:

    <cache_dir>/tokens-<key>/meta.json             dtype, counts, checksums
    <cache_dir>/tokens-<key>/train.tokens          every document as [bos] text [eos], concatenated
    <cache_dir>/tokens-<key>/train.starts          int64, offset of each document
    <cache_dir>/tokens-<key>/validation.*          the held-out documents, if any
    <cache_dir>/.tokens-<key>-<id>/                a cache that is being built
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import sys
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np

from harness.data.cache_check import (
    META,
    DamagedCache,
    check_contents,
    check_sizes,
    describe_files,
    files_of,
    read_meta,
)
from harness.data.sources import Source
from harness.data.tokenizer import Tokenizer, with_bos_eos
from harness.data.tokens import map_file
from harness.errors import DataError, MachineError
from harness.locks import LockedError, lock

FORMAT_VERSION = 1
LOCK = ".lock"
# Longest time between making a folder and locking it; on file systems without locks, between two writes.
_LOCKING_SECONDS, _ABANDONED_SECONDS = 60.0, 86400.0
_CHARS_PER_BATCH = 4_000_000


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
        DataError: the source cannot be read or holds no text, or the builder's cache is not visible here.
    """
    root, stored_split = Path(cache_dir).expanduser(), split if held_out > 0 else "train"
    if is_builder:
        folder = root / _folder_name(source, tokenizer, held_out)
        remove_abandoned(root)
        damage = _find_damage(folder, stored_split) if folder.exists() else None
        if damage is not None:
            sys.stderr.write(f"WARNING token cache {folder} is damaged and is rebuilt: {damage}\n")
        if damage is not None or not folder.exists():
            _build(folder, source, tokenizer, held_out, replace=damage is not None)
    if wait_for_all is not None:
        wait_for_all()
    folder = root / _folder_name(source, tokenizer, held_out)
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
    """Remove unfinished caches of builders that were killed; running builders hold a lock."""
    for path in root.glob(".tokens-*"):
        # A builder makes its folder and then locks it; locking it in between would stop the builder.
        age = _seconds_since_change(path)
        if age <= _LOCKING_SECONDS:
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


def is_held_out(index: int, fraction: float) -> bool:
    """Whether the document at ``index`` is held out; depends only on the index and the fraction."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _folder_name(source: Source, tokenizer: Tokenizer, held_out: float) -> str:
    key = [FORMAT_VERSION, source.identity, tokenizer.fingerprint, held_out]
    return f"tokens-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:24]}"


def _build(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float, *, replace: bool) -> None:
    """Write the cache to a temporary folder and rename it: a reader sees all of it or nothing.

    With ``replace`` the damaged cache is removed when the new one is complete.
    """
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write to {folder.parent}: {error.strerror}") from error
    try:
        with lock(unfinished / LOCK, create=True) or contextlib.nullcontext():
            _write(unfinished, source, tokenizer, held_out)
            (unfinished / LOCK).unlink()
            if replace:
                _remove(folder)
            try:
                unfinished.rename(folder)
            except OSError:
                # Another builder was faster. Its cache has the same key, hence the same content.
                if not folder.exists():
                    raise
    except OSError as error:
        raise MachineError(f"data.cache_dir: {folder.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Remove a damaged cache; it is renamed first, so that no reader finds part of it."""
    damaged = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another builder was faster
        folder.rename(damaged)
        shutil.rmtree(damaged, ignore_errors=True)


def _write(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    train, validation = _Writer(folder, "train", dtype), _Writer(folder, "validation", dtype)
    with train, validation:
        for batch in _batches(enumerate(source.documents())):
            for index, pieces in _encoded(batch, tokenizer):
                writer = validation if held_out > 0 and is_held_out(index, held_out) else train
                writer.append(pieces)
    if train.num_tokens + validation.num_tokens == 0:
        raise DataError(f"{source.name} holds no text: every document is empty")
    splits = (train, validation)
    meta = {
        "dtype": dtype.name,
        "tokens": {writer.split: writer.num_tokens for writer in splits},
        "damaged": source.damaged,
        "files": describe_files(folder, [writer.split for writer in splits]),
    }
    (folder / META).write_text(json.dumps(meta))


def _encoded(
    batch: list[tuple[int, str]], tokenizer: Tokenizer
) -> Iterator[tuple[int, Iterable[Sequence[int]]]]:
    """Yield for each document of a batch its index and its ids with bos and eos, in pieces."""
    before, after = ([] if end is None else [[end]] for end in (tokenizer.bos_id, tokenizer.eos_id))
    index, text = batch[0]
    if len(text) > _CHARS_PER_BATCH:
        yield index, chain(before, tokenizer.encode_in_pieces(text), after)
        return
    for (index, _), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
        yield index, [with_bos_eos(ids, tokenizer)]


def _batches(documents: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Yield the non-empty documents in lists of about 4 MB, to bound the memory of tokenizing."""
    batch: list[tuple[int, str]] = []
    num_chars = 0
    for index, text in documents:
        if not text:
            continue
        if len(text) > _CHARS_PER_BATCH and batch:
            yield batch
            batch, num_chars = [], 0
        batch.append((index, text))
        num_chars += len(text)
        if num_chars >= _CHARS_PER_BATCH:
            yield batch
            batch, num_chars = [], 0
    if batch:
        yield batch


class _Writer:
    """Appends documents to the two files of a split."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype) -> None:
        self.split, self.num_tokens = split, 0
        self._dtype, self._typecode = dtype, "H" if dtype.itemsize == 2 else "I"
        self._tokens = (folder / f"{split}.tokens").open("wb")
        self._starts = (folder / f"{split}.starts").open("wb")

    def append(self, pieces: Iterable[Sequence[int]]) -> None:
        """Append a document, given as consecutive pieces of its ids."""
        self._starts.write(struct.pack("=q", self.num_tokens))
        for ids in pieces:
            self._tokens.write(self._packed(ids))
            self.num_tokens += len(ids)

    def _packed(self, ids: Sequence[int]) -> bytes:
        if isinstance(ids, bytes):
            return np.frombuffer(ids, dtype=np.uint8).astype(self._dtype).tobytes()
        return array(self._typecode, ids).tobytes()

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._tokens.close()
        self._starts.close()


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
