"""The token cache: documents tokenized once, kept on disk, read through a memory map.

A cache is a folder named by the hash of everything that decides its content, so it is never stale and never
changed; one that is damaged (``cache_check.py``) is built again:

    <cache_dir>/tokens-<key>/meta.json             dtype, counts, checksums
    <cache_dir>/tokens-<key>/train.tokens          every document as [bos] text [eos], one after the other
    <cache_dir>/tokens-<key>/train.starts          int64, where each document begins
    <cache_dir>/tokens-<key>/validation.*          the held-out documents, where some are
    <cache_dir>/.tokens-<key>-<id>/                one that is being built
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
from harness.data.tokenizer import Tokenizer, with_ends
from harness.errors import DataError, MachineError
from harness.locks import Held, lock

FORMAT_VERSION = 1
LOCK = ".lock"
# Between making a folder and locking it; and, where there are no locks, between writing two batches.
_LOCKING_SECONDS, _ABANDONED_SECONDS = 60.0, 86400.0
_CHARS_PER_BATCH = 4_000_000


@dataclass(frozen=True)
class TokenizedSplit:
    """The tokens of one split, on disk.

    Attributes:
        tokens: all documents one after the other (uint16 or uint32, 1-d memory map).
        starts: where each document begins in ``tokens`` (int64, ascending).
        name: the source and the split, for error messages.
        damaged: documents of the source that were not UTF-8, and were repaired or left out.
    """

    tokens: np.ndarray
    starts: np.ndarray
    name: str
    damaged: int = 0


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
    """The tokens of ``source``, tokenized now by the builder unless that was done before.

    Args:
        split: "train" or "validation": the documents that are not held out, or those that are. A source of
            which nothing is held out (``held_out == 0``) is read whole for either.
        wait_for_all: returns when all ranks have called it; called once, between building and opening.

    Raises:
        DataError: the source cannot be read or holds no text, or the builder's cache is not visible here.
    """
    root, stored_split = Path(cache_dir).expanduser(), split if held_out > 0 else "train"
    if is_builder:
        folder = root / _folder_name(source, tokenizer, held_out)
        remove_abandoned(root)
        damage = _damage_of(folder, stored_split) if folder.exists() else None
        if damage is not None:
            sys.stderr.write(f"WARNING token cache {folder} is damaged and is built again: {damage}\n")
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
    return _open(folder, stored_split, f"{source.name}, {split} documents")


def _damage_of(folder: Path, split: str) -> str | None:
    """What is wrong with the files of a split; None if nothing is.

    Raises:
        DataError: that cannot be found out.
    """
    try:
        check_contents(folder, read_meta(folder), split)
    except DamagedCache as error:
        return str(error)
    except OSError as error:
        raise DataError(f"token cache {folder} cannot be read: {error.strerror}") from error
    return None


def remove_abandoned(root: Path) -> None:
    """Removes what builders that were killed have left; what a living one writes is locked."""
    for path in root.glob(".tokens-*"):
        try:
            held = lock(path / LOCK)
        except FileNotFoundError:
            held = None
        except (Held, OSError):  # another user's cannot be opened
            continue
        # A builder locks its folder right after it has made it. Where there are no locks, age has to do.
        with held or contextlib.nullcontext():
            if _seconds_since_change(path) > (_ABANDONED_SECONDS if held is None else _LOCKING_SECONDS):
                shutil.rmtree(path, ignore_errors=True)


def _seconds_since_change(folder: Path) -> float:
    """Since anything in a folder was written; 0 when the folder is gone."""
    try:
        return time.time() - max(path.stat().st_mtime for path in (folder, *folder.iterdir()))
    except OSError:
        return 0.0


def is_held_out(index: int, fraction: float) -> bool:
    """Whether the document at ``index`` is for validation; a function of the index and the fraction alone."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _folder_name(source: Source, tokenizer: Tokenizer, held_out: float) -> str:
    decides = [FORMAT_VERSION, source.identity, tokenizer.fingerprint, held_out]
    return f"tokens-{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:24]}"


def _build(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float, *, replace: bool) -> None:
    """Writes the cache beside its place and renames it there: a reader sees all of it or nothing.

    With ``replace`` a damaged one is removed when the new one is complete.
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
                # Another builder was quicker. Its cache has the same key, hence the same content.
                if not folder.exists():
                    raise
    except OSError as error:
        raise MachineError(f"data.cache_dir: {folder.parent}: {error.strerror or error}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _remove(folder: Path) -> None:
    """Removes a damaged cache, under another name first: no reader finds a part of it."""
    damaged = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    with contextlib.suppress(FileNotFoundError):  # another builder was quicker
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
    """Yield the number and the ids, in pieces, of each document of a batch, with its ends."""
    before, after = ([] if end is None else [[end]] for end in (tokenizer.bos_id, tokenizer.eos_id))
    index, text = batch[0]
    if len(text) > _CHARS_PER_BATCH:
        yield index, chain(before, tokenizer.encode_in_pieces(text), after)
        return
    for (index, _), ids in zip(batch, tokenizer.encode_batch([text for _, text in batch]), strict=True):
        yield index, [with_ends(ids, tokenizer)]


def _batches(documents: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The documents that are not empty, in lists of about 4 MB, to bound the memory that tokenizing takes."""
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


def _open(folder: Path, split: str, name: str) -> TokenizedSplit:
    try:
        meta = read_meta(folder)
        check_sizes(folder, meta, split)
    except DamagedCache as error:
        raise DataError(f"token cache {folder} is damaged: {error}; remove the folder") from None
    tokens, starts = (folder / file for file in files_of(split))
    mapped = _map(tokens, np.dtype(meta["dtype"])), _map(starts, np.dtype(np.int64))
    return TokenizedSplit(*mapped, name, meta.get("damaged", 0))


def _map(file: Path, dtype: np.dtype) -> np.ndarray:
    if os.path.getsize(file) == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")
