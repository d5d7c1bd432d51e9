"""Checksums of a cache: written when it is built, compared when it is opened.

Files are hashed in blocks, by several threads. When a cache is opened, sizes are always compared. All blocks
are compared if the file was modified since the last complete comparison, or has at most ``SAMPLE_BLOCKS``;
otherwise a random sample of ``SAMPLE_BLOCKS``. So opening a checked cache reads at most 512 MiB per file.
"""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from harness.util.encoding import parse_object
from harness.util.files import write_atomically

META = "meta.json"
CHECKED = "checked.json"
SPLITS = ("train", "validation")
BLOCK_BYTES = 1 << 24
SAMPLE_BLOCKS = 32
_THREADS = 4
_NO_FILE = (FileNotFoundError, NotADirectoryError, IsADirectoryError)


class DamagedCache(Exception):
    """A cache is damaged; the message has the details."""


def files_of(split: str) -> tuple[str, str]:
    """Names of the two files of a split: its tokens, and the offsets of its documents."""
    return f"{split}.tokens", f"{split}.starts"


FILES = tuple(name for split in SPLITS for name in files_of(split))
"""Files of a token cache."""


def describe_files(folder: Path, names: Iterable[str]) -> dict[str, Any]:
    """Sizes and checksums of files, for the cache's ``meta.json``."""
    found = {}
    for name in names:
        size = (folder / name).stat().st_size
        found[name] = {"size": size, "xxh3_64": _hash_blocks(folder / name, range(_num_blocks(size)))}
    return found


def read_meta(folder: Path, names: Collection[str] = FILES) -> dict[str, Any]:
    """Read and check ``meta.json``.

    Args:
        folder: of the cache.
        names: its files.

    Raises:
        DamagedCache: ``meta.json`` is missing or damaged.
    """
    has_tokens = names is FILES
    try:
        meta = parse_object((folder / META).read_bytes())
        if has_tokens and (
            meta["dtype"] not in ("uint16", "uint32")
            or not all(isinstance(meta["tokens"][split], int) for split in SPLITS)
        ):
            raise ValueError("number or format of the tokens is missing")
        # Token caches of an earlier version have no checksums.
        for name in names if "files" in meta or not has_tokens else ():
            facts = meta["files"][name]
            if len(facts["xxh3_64"]) != _num_blocks(facts["size"]):
                raise ValueError("checksums are missing")
    except (*_NO_FILE, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedCache(f"{META}: {error}") from None
    return meta


def check_sizes(folder: Path, meta: dict[str, Any], split: str) -> None:
    """Compare the sizes of a split's files; called on every rank.

    Raises:
        DamagedCache: a file is missing or has another size.
    """
    tokens, starts = files_of(split)
    known = {name: facts["size"] for name, facts in meta.get("files", {}).items()}
    expected = {tokens: meta["tokens"][split] * np.dtype(meta["dtype"]).itemsize, starts: known.get(starts)}
    for name, size in expected.items():
        _check_size(folder / name, size)


def _check_size(file: Path, size: int | None) -> None:
    try:
        found = file.stat().st_size
    except _NO_FILE as error:
        raise DamagedCache(f"{file.name}: {error.strerror}") from None
    if size is not None and found != size:
        raise DamagedCache(f"{file.name} has {found} bytes instead of {size}")


def check_contents(folder: Path, meta: dict[str, Any], split: str) -> None:
    """Compare checksums of a split's files; called on the building rank, before others open the cache.

    A cache of an earlier version has no checksums. Its document offsets are checked, and checksums are added.

    Raises:
        DamagedCache: a block's checksum differs.
    """
    check_sizes(folder, meta, split)
    if "files" not in meta:
        for each in SPLITS:
            _check_starts(folder, meta, each)
        _add_checksums(folder, meta)
        return
    check_files(folder, {name: meta["files"][name] for name in files_of(split)})


def check_files(folder: Path, files: Mapping[str, Any]) -> None:
    """Compare sizes and checksums of files with those that ``describe_files`` returned.

    Raises:
        DamagedCache: a file is missing, has another size, or a block's checksum differs.
    """
    for name, facts in files.items():
        _check_size(folder / name, facts["size"])
    checked = _read_checked(folder)
    times = {name: (folder / name).stat().st_mtime_ns for name in files}
    for name, time in times.items():
        sums = files[name]["xxh3_64"]
        blocks = list(range(len(sums)))
        if checked.get(name) == time and len(blocks) > SAMPLE_BLOCKS:
            blocks = random.SystemRandom().sample(blocks, SAMPLE_BLOCKS)
        for block, found in zip(blocks, _hash_blocks(folder / name, blocks), strict=True):
            if found != sums[block]:
                raise DamagedCache(
                    f"{name}: bytes {block * BLOCK_BYTES} to {(block + 1) * BLOCK_BYTES} do not have the "
                    "checksum they were written with"
                )
    if any(checked.get(name) != time for name, time in times.items()):
        _write_if_possible(folder / CHECKED, {**checked, **times})


def _num_blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _hash_blocks(file: Path, blocks: Iterable[int]) -> list[str]:
    def hash_block(block: int) -> str:
        with file.open("rb") as content:
            content.seek(block * BLOCK_BYTES)
            return xxhash.xxh3_64_hexdigest(content.read(BLOCK_BYTES))

    with ThreadPoolExecutor(_THREADS) as threads:
        return list(threads.map(hash_block, blocks))


def _check_starts(folder: Path, meta: dict[str, Any], split: str) -> None:
    """Check that document offsets are ascending and within the tokens, the first 0."""
    check_sizes(folder, meta, split)
    name, num_tokens = files_of(split)[1], meta["tokens"][split]
    starts = np.fromfile(folder / name, dtype=np.int64)
    if bool(num_tokens) != bool(len(starts)):
        raise DamagedCache(f"{name} has {len(starts)} entries for {num_tokens} tokens")
    if len(starts) and (starts[0] != 0 or starts[-1] >= num_tokens or np.any(np.diff(starts) <= 0)):
        raise DamagedCache(f"{name} does not hold ascending offsets within {num_tokens} tokens")


def _add_checksums(folder: Path, meta: dict[str, Any]) -> None:
    files = describe_files(folder, FILES)
    _write_if_possible(folder / META, {**meta, "files": files})


def _read_checked(folder: Path) -> dict[str, Any]:
    """Modification time of each file when it was last compared completely; empty if unknown."""
    try:
        return parse_object((folder / CHECKED).read_bytes())
    except (OSError, ValueError):
        return {}


def _write_if_possible(path: Path, content: dict[str, Any]) -> None:
    """Write a file into a cache, if permitted (it may be another user's); else the next run checks it all."""
    with contextlib.suppress(OSError):
        write_atomically(path, json.dumps(content).encode())
