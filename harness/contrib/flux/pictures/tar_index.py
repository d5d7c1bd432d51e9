"""Random access to the pictures of webdataset's tar files: a table of the places of their members.

Members of one picture follow each other and have the same name up to the first dot of its last part:
``00012.jpg 00012.txt 00012.json`` (github.com/webdataset/webdataset). The table is built once, in
``data.cache_dir``, and rebuilt if it is damaged (``harness/util/store.py``).
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from harness.data.documents import describe
from harness.data.sources import file_stats
from harness.util.encoding import parse_object
from harness.util.errors import DataError
from harness.util.files import write_atomically
from harness.util.store import NO_FILE, Damaged, check_files, describe_files, only_builder, remove_folder

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Extensions of pictures."""
META, TABLE = "meta.json", "members.npy"
_THREADS = 8
_FORMAT_VERSION = 1


class Member(NamedTuple):
    """The files of one picture."""

    picture: bytes
    text: bytes | None
    json: bytes | None
    where: str


class TarIndex:
    """The pictures of tar files, in the order of the files.

    Args:
        files: the tar files.
        table: int64, a row for each picture: number of its file; offset and size of the picture, of its .txt
            and of its .json, with a size of -1 for one that does not exist.
        key: hash of the files' paths, sizes and modification times.
    """

    def __init__(self, files: Sequence[Path], table: np.ndarray, key: str) -> None:
        self._files, self._table, self.key = files, table, key

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> Member:
        """Read the files of a picture.

        Raises:
            DataError: the tar file cannot be read, or has changed.
        """
        number, *places = self._table[index].tolist()
        path, found = self._files[number], []
        try:
            handle = os.open(path, os.O_RDONLY)
            try:
                for offset, size in zip(places[::2], places[1::2], strict=True):
                    found.append(None if size < 0 else os.pread(handle, size, offset))
                    if size > 0 and len(found[-1] or b"") < size:
                        raise DataError(f"{path}: ends before picture {index} of the data")
            finally:
                os.close(handle)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        return Member(found[0] or b"", found[1], found[2], f"{path}, byte {places[0]}")


def open_tar_index(
    files: Sequence[Path],
    cache_dir: str,
    wait_for_all: Callable[[], None] | None = None,
    *,
    is_builder: bool = True,
) -> TarIndex:
    """Open the table of tar files, after building it if it is missing or damaged.

    Raises:
        DataError: a file is no tar file, or the builder's table is not visible here.
        OSError: the cache cannot be written.
    """
    stats = [_FORMAT_VERSION, file_stats(files)]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:24]
    folder = Path(cache_dir).expanduser() / "pictures" / key
    if is_builder:
        if (folder / META).exists():
            try:
                _check(folder)
            except Damaged as error:
                sys.stderr.write(f"WARNING picture table {folder} is damaged and is rebuilt: {error}\n")
                remove_folder(folder)
        with only_builder(folder, (folder / META).exists) as building:
            if building is not None:
                _build(folder, files)
    if wait_for_all is not None:
        wait_for_all()
    try:
        if not is_builder:
            _check(folder)
        return TarIndex(files, np.load(folder / TABLE, mmap_mode="r"), key)
    except (Damaged, OSError) as error:
        rule = "data.cache_dir must be a folder that all ranks share"
        raise DataError(f"picture table {folder} cannot be read here: {error}; {rule}") from None


def _check(folder: Path) -> None:
    try:
        files = {TABLE: parse_object((folder / META).read_bytes())["files"][TABLE]}
    except (*NO_FILE, ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{META}: {error}") from None
    check_files(folder, files)


def _build(folder: Path, files: Sequence[Path]) -> None:
    with ThreadPoolExecutor(_THREADS) as threads:
        tables = list(threads.map(_members, files))
    rows = [np.insert(table, 0, number, axis=1) for number, table in enumerate(tables)]
    content = io.BytesIO()
    np.save(content, np.concatenate([np.zeros((0, 7), np.int64), *rows]))
    write_atomically(folder / TABLE, content.getvalue())
    write_atomically(folder / META, json.dumps({"files": describe_files(folder, (TABLE,))}).encode())


def _members(file: Path) -> np.ndarray:
    """Places of the pictures in one tar file, int64 of shape (pictures, 6)."""
    try:
        with tarfile.open(file, "r:") as opened:
            return np.array(list(_places(opened)), dtype=np.int64).reshape(-1, 6)
    # tarfile believes the numbers in headers.
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(f"{file}: not a readable tar file without compression ({describe(error)})") from error


def _places(opened: tarfile.TarFile) -> Iterator[list[int]]:
    current, found = "", dict[str, tuple[int, int]]()
    absent = (0, -1)

    def row() -> list[int]:
        return [*found["picture"], *found.get(".txt", absent), *found.get(".json", absent)]

    for member in opened:
        if member.issparse() or any(key.startswith("GNU.sparse") for key in member.pax_headers):
            raise tarfile.TarError(f"{member.name!r} is sparse; would work: tar without --sparse")
        if not member.isfile():
            continue
        folder, name = os.path.split(member.name)
        stem, _, rest = name.partition(".")
        suffix = f".{rest.lower()}"
        if os.path.join(folder, stem) != current:
            if "picture" in found:
                yield row()
            current, found = os.path.join(folder, stem), {}
        kind = "picture" if suffix in SUFFIXES else suffix
        found.setdefault(kind, (member.offset_data, member.size))
    if "picture" in found:
        yield row()
