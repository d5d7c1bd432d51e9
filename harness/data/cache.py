"""The token cache: documents tokenized once, kept on disk, read through a memory map.

A cache is a folder named by the hash of everything that decides its content, so it is never stale and never
changed:

    <cache_dir>/tokens-<key>/meta.json             dtype, counts
    <cache_dir>/tokens-<key>/train.tokens          every document as [bos] text [eos], one after the other
    <cache_dir>/tokens-<key>/train.starts          int64, where each document begins
    <cache_dir>/tokens-<key>/validation.*          the held-out documents, where some are
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.data.sources import Source
from harness.data.tokenizer import Tokenizer, with_ends
from harness.errors import DataError

FORMAT_VERSION = 1
_CHARS_PER_BATCH = 4_000_000


@dataclass(frozen=True)
class TokenizedSplit:
    """The tokens of one split, on disk.

    Attributes:
        tokens: all documents one after the other (uint16 or uint32, 1-d memory map).
        starts: where each document begins in ``tokens`` (int64, ascending).
        name: the source and the split, for error messages.
    """

    tokens: np.ndarray
    starts: np.ndarray
    name: str


def open_cache(
    source: Source,
    tokenizer: Tokenizer,
    *,
    split: str,
    held_out: float,
    cache_dir: str,
    barrier: Callable[[], None] | None,
    is_builder: bool,
) -> TokenizedSplit:
    """The tokens of ``source``, tokenized now by the builder unless that was done before.

    Args:
        split: "train" or "validation": the documents that are not held out, or those that are. A source of
            which nothing is held out (``held_out == 0``) is read whole for either.
        barrier: waits for all ranks; called once, between building and opening.

    Raises:
        DataError: the source cannot be read or holds no text, or the builder's cache is not visible here.
    """
    root = Path(cache_dir).expanduser()
    if is_builder:
        folder = root / _folder_name(source, tokenizer, held_out)
        if not folder.exists():
            _build(folder, source, tokenizer, held_out)
    if barrier is not None:
        barrier()
    folder = root / _folder_name(source, tokenizer, held_out)
    if not folder.exists():
        raise DataError(
            f"token cache {folder} is not visible to this rank; "
            "data.cache_dir must be a folder that all ranks share"
        )
    return _open(folder, split if held_out > 0 else "train", f"{source.name}, {split} documents")


def is_held_out(index: int, fraction: float) -> bool:
    """Whether the document at ``index`` is for validation; a function of the index and the fraction alone."""
    digest = hashlib.blake2b(index.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def _folder_name(source: Source, tokenizer: Tokenizer, held_out: float) -> str:
    decides = [FORMAT_VERSION, source.identity, tokenizer.fingerprint, held_out]
    return f"tokens-{hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:24]}"


def _build(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
    """Writes the cache beside its place and renames it there: a reader sees all of it or nothing."""
    unfinished = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    try:
        unfinished.mkdir(parents=True)
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write to {folder.parent}: {error.strerror}") from error
    try:
        _write(unfinished, source, tokenizer, held_out)
        try:
            unfinished.rename(folder)
        except OSError:
            # Another builder was quicker. Its cache has the same key, hence the same content.
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _write(folder: Path, source: Source, tokenizer: Tokenizer, held_out: float) -> None:
    dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
    train, validation = _Writer(folder, "train", dtype), _Writer(folder, "validation", dtype)
    with train, validation:
        for batch in _batches(enumerate(source.documents())):
            for (index, _), ids in zip(
                batch, tokenizer.encode_batch([text for _, text in batch]), strict=True
            ):
                writer = validation if is_held_out(index, held_out) else train
                writer.append(with_ends(ids, tokenizer))
    if train.num_tokens + validation.num_tokens == 0:
        raise DataError(f"{source.name} holds no text: every document is empty")
    meta = {"dtype": dtype.name, "tokens": {w.split: w.num_tokens for w in (train, validation)}}
    (folder / "meta.json").write_text(json.dumps(meta))


def _batches(documents: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """The documents that are not empty, in lists of about 4 MB, to bound the memory that tokenizing takes."""
    batch: list[tuple[int, str]] = []
    num_chars = 0
    for index, text in documents:
        if not text:
            continue
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
        self._dtype = dtype
        self._tokens = (folder / f"{split}.tokens").open("wb")
        self._starts = (folder / f"{split}.starts").open("wb")

    def append(self, ids: Sequence[int]) -> None:
        self._starts.write(np.int64(self.num_tokens).tobytes())
        self._tokens.write(np.asarray(ids, dtype=self._dtype).tobytes())
        self.num_tokens += len(ids)

    def __enter__(self) -> _Writer:
        return self

    def __exit__(self, *error: object) -> None:
        self._tokens.close()
        self._starts.close()


def _open(folder: Path, split: str, name: str) -> TokenizedSplit:
    meta: dict[str, Any] = json.loads((folder / "meta.json").read_text())
    tokens = _map(folder / f"{split}.tokens", np.dtype(meta["dtype"]))
    if len(tokens) != meta["tokens"][split]:
        raise DataError(f"token cache {folder} is damaged: {split}.tokens is cut short; remove the folder")
    return TokenizedSplit(tokens, _map(folder / f"{split}.starts", np.dtype(np.int64)), name)


def _map(file: Path, dtype: np.dtype) -> np.ndarray:
    if os.path.getsize(file) == 0:  # an empty file cannot be mapped
        return np.empty(0, dtype)
    return np.memmap(file, dtype, mode="r")
