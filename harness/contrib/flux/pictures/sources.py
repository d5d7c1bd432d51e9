"""Pictures with captions, by number: files, webdataset's tar files, or a dataset of `datasets`.

Sample number g is a function of (data, seed, g), as for tokens (``harness/data/samples.py``).
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
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from harness.config.data import DataConfig
from harness.contrib.flux.pictures.config import ImagesConfig, pictures_of
from harness.contrib.flux.pictures.shapes import DrawnShapes
from harness.data.documents import (
    describe,
    file_stats,
    find_files,
    folder_hint,
    list_names,
    open_dataset,
)
from harness.data.samples import EpochOrder, random_stream
from harness.data.tokenizing import is_held_out
from harness.util.encoding import parse_object
from harness.util.errors import DataError
from harness.util.files import write_atomically
from harness.util.store import (
    NO_FILE,
    Damaged,
    check_files,
    describe_files,
    only_builder,
    remove_folder,
)

# Random access to the pictures of webdataset's tar files: a table of the places of their members.
#
# Members of one picture follow each other and have the same name up to the first dot of its last
# part: `00012.jpg 00012.txt 00012.json` (github.com/webdataset/webdataset). The table is built
# once, in `data.cache_dir`, and rebuilt if it is damaged (`harness/util/store.py`).

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Extensions of pictures."""
META = "meta.json"
TABLE = "members.npy"
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
        table: int64, a row for each picture: number of its file; offset and size of the picture, of
            its .txt and of its .json, with a size of -1 for one that does not exist.
        key: hash of the files' paths, sizes and modification times.
    """

    def __init__(self, files: Sequence[Path], table: np.ndarray, key: str) -> None:
        self._files = files
        self._table = table
        self.key = key

    def __len__(self) -> int:
        return len(self._table)

    def read(self, index: int) -> Member:
        """Read the files of a picture."""
        number, *places = self._table[index].tolist()
        path = self._files[number]
        found = []
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
    """Open the table of tar files, after building it if it is missing or damaged."""
    stats = [_FORMAT_VERSION, file_stats(files)]
    key = hashlib.sha256(json.dumps(stats).encode()).hexdigest()[:24]
    folder = Path(cache_dir).expanduser() / "pictures" / key
    if is_builder:
        if (folder / META).exists():
            try:
                _check(folder)
            except Damaged as error:
                sys.stderr.write(
                    f"WARNING picture table {folder} is damaged and is rebuilt: {error}\n"
                )
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
    write_atomically(
        folder / META, json.dumps({"files": describe_files(folder, (TABLE,))}).encode()
    )


def _members(file: Path) -> np.ndarray:
    """Places of the pictures in one tar file, int64 of shape (pictures, 6)."""
    try:
        with tarfile.open(file, "r:") as opened:
            return np.array(list(_places(opened)), dtype=np.int64).reshape(-1, 6)
    # tarfile believes the numbers in headers.
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{file}: not a readable tar file without compression ({describe(error)})"
        ) from error


def _places(opened: tarfile.TarFile) -> Iterator[list[int]]:
    current = ""
    found = dict[str, tuple[int, int]]()
    absent = (0, -1)

    def row() -> list[int]:
        return [*found["picture"], *found.get(".txt", absent), *found.get(".json", absent)]

    for member in opened:
        if not member.isfile():
            continue
        folder, name = os.path.split(member.name)
        stem, _, rest = name.partition(".")
        suffix = f".{rest.lower()}"
        if os.path.join(folder, stem) != current:
            if "picture" in found:
                yield row()
            current = os.path.join(folder, stem)
            found = {}
        kind = "picture" if suffix in SUFFIXES else suffix
        found.setdefault(kind, (member.offset_data, member.size))
    if "picture" in found:
        yield row()


MOST_SKIPPED = 100
"""Pictures in a row that cannot be decoded, after which data.options.on_error=skip gives up."""

MOST_ASPECT = 32
"""Times the shorter side: what exceeds it of the longer side is cropped before the picture is
resized."""


class UnreadablePicture(DataError):
    """A picture cannot be decoded."""


class RawSamples:
    """An endless sequence of pictures with captions; in another order in every epoch."""

    def __init__(self, source: PictureSource, *, seed: int, shuffle: bool, skips: bool) -> None:
        self._source = source
        self._skips = skips
        self._order = None if source.num is None else EpochOrder(source.num, seed, shuffle=shuffle)
        self.num_per_epoch = source.num

    def index(self, number: int) -> int:
        """Index of a sample's picture in the source."""
        return number if self._order is None else self._order.at(number)

    def sample(self, number: int) -> tuple[np.ndarray, str]:
        """Return the picture, uint8 of shape (size, size, 3), and the caption of a sample."""
        first = self.index(number)
        for offset in range(MOST_SKIPPED if self._skips else 1):
            index = (
                first + offset if self._source.num is None else (first + offset) % self._source.num
            )
            try:
                return self._source.read(index, number)
            except UnreadablePicture as error:
                unreadable = error
        works = "" if self._skips else "; would work: data.options.on_error=skip"
        raise DataError(f"{unreadable}{works}")

    def caption(self, number: int) -> str:
        """Return the caption of a sample."""
        return self.sample(number)[1]


def open_pictures(
    data: DataConfig,
    split: str,
    *,
    seed: int,
    wait_for_all: Callable[[], None] | None = None,
    is_builder: bool = True,
) -> PictureSource:
    """Open the pictures of a split; the arguments are those of ``build_loader``."""
    if split == "validation":
        data.require_validation()
    if data.kind == "drawn_shapes":
        return DrawnShapes(split, pictures_of(data).size, seed)
    stored: _FilePictures | _HubPictures
    if data.kind == "hub_pictures":
        stored = _HubPictures(data, data.split_of(split))
    else:
        field, _ = data.files_of(split)
        stored = _FilePictures(data, field, wait_for_all, is_builder=is_builder)
    return Part(stored, pictures_of(data), split, data.validation_fraction, seed)


class Part:
    """The pictures of a split, decoded and cropped, in a fixed order.

    Attributes:
        name: the field and its value, for error messages.
        num: number of pictures; None: endless.
    """

    def __init__(
        self,
        stored: _FilePictures | _HubPictures,
        images: ImagesConfig,
        split: str,
        held_out: float,
        seed: int,
    ) -> None:
        self._stored = stored
        self._images = images
        self._seed = seed
        self._crops = images.crop == "random" and split == "train"
        self.name = stored.name
        count = len(stored)
        self._kept: np.ndarray | None = None
        if held_out:
            wanted = split == "validation"
            self._kept = np.array(
                [i for i in range(count) if is_held_out(i, held_out) == wanted], np.int64
            )
            count = len(self._kept)
        self.num: int | None = count
        if not count:
            raise DataError(f"{self.name}: has no pictures of the split {split}")

    def read(self, index: int, number: int) -> tuple[np.ndarray, str]:
        """Return a picture, uint8 of shape (size, size, 3), and its caption.

        Args:
            index: of the picture in the source.
            number: of the sample, on which a random crop depends.

        Raises:
            UnreadablePicture: it cannot be decoded.
            DataError: it has no caption, or the file cannot be read.
        """
        stored = index if self._kept is None else int(self._kept[index])
        content, caption, where = self._stored.content(stored)
        place = random_stream("crop", self._seed, number).uniform() if self._crops else 0.5
        return decode(content, self._images.size, place, where), caption

    def identity(self) -> Any:
        """JSON-serializable; changes whenever the pictures may have changed."""
        return [self._stored.identity(), self._images.size, self._images.crop]


PictureSource = Part | DrawnShapes


def decode(content: bytes, size: int, place: float, where: str) -> np.ndarray:
    """Decode a picture, resize its shorter side, and crop its longer side: uint8 of shape (size, size, 3).

    Args:
        content: a file in a format that Pillow reads.
        place: of the crop: 0 is the left or the top, 1 the right or the bottom.
        where: place of the picture, for error messages.

    Raises:
        UnreadablePicture: the content is damaged, of an unknown format, or suspiciously large.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
        # A side that is much longer would be as long as the file says, times the scale.
        short = min(picture.size)
        if max(picture.size) > MOST_ASPECT * short:
            wide, high = (min(side, MOST_ASPECT * short) for side in picture.size)
            picture = _cropped(picture, wide, high, place)
        wide, high = (max(size, round(side * (size / short))) for side in picture.size)
        resized = picture.resize((wide, high), Image.Resampling.BICUBIC)
        return np.asarray(_cropped(resized, size, size, place))
    # Readers of damaged files raise many types.
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        MemoryError,
        Image.DecompressionBombError,
    ) as error:
        raise UnreadablePicture(
            f"{where}: is no picture that can be decoded ({describe(error)})"
        ) from error


def _cropped(picture: Any, width: int, height: int, place: float) -> Any:
    left = round((picture.width - width) * place)
    top = round((picture.height - height) * place)
    return picture.crop((left, top, left + width, top + height))


def caption_of(fields: dict[str, Any], name: str, where: str) -> str:
    """Return the caption of a row or a .json file; null is the empty caption."""
    if name not in fields:
        raise DataError(
            f"{where}: no field {name!r} among {list_names(fields)}; set data.options.caption_field"
        )
    caption = fields[name]
    if isinstance(caption, list) and caption and isinstance(caption[0], str):
        caption = caption[0]  # several captions of one picture
    if caption is not None and not isinstance(caption, str):
        raise DataError(f"{where}: field {name!r} holds {type(caption).__name__}, not text")
    return caption or ""


class _FilePictures:
    """Pictures in folders and in tar files, in the order of the sorted paths."""

    def __init__(
        self,
        data: DataConfig,
        field: str,
        wait_for_all: Callable[[], None] | None,
        *,
        is_builder: bool,
    ) -> None:
        patterns: list[str] = getattr(data, field)
        options = pictures_of(data)
        self.name = f"data.{field}=[{', '.join(patterns)}]"
        self._field = options.caption_field
        found = find_files(patterns, data.exclude)
        tars = [file for file in found if file.suffix == ".tar"]
        if options.format == "webdataset" or (options.format == "auto" and tars):
            if len(tars) < len(found):
                other = next(file for file in found if file.suffix != ".tar")
                raise DataError(
                    f"{self.name}: {other} is no .tar file; would work: other data.paths"
                )
            self._tars: TarIndex | None = open_tar_index(
                tars, data.cache_dir, wait_for_all, is_builder=is_builder
            )
            self._files: list[Path] = []
        else:
            self._tars = None
            self._files = [file for file in found if file.suffix.lower() in SUFFIXES]
        if not found or not len(self):
            seen = f"seen from {Path.cwd()}{folder_hint(patterns)}"
            raise DataError(f"{self.name}: no pictures match, {seen}")

    def __len__(self) -> int:
        return len(self._files) if self._tars is None else len(self._tars)

    def content(self, index: int) -> tuple[bytes, str, str]:
        if self._tars is not None:
            found = self._tars.read(index)
            return found.picture, self._caption(found.text, found.json, found.where), found.where
        file = self._files[index]
        texts = (file.with_suffix(suffix) for suffix in (".txt", ".json"))
        try:
            text, plain = (path.read_bytes() if path.is_file() else None for path in texts)
            return file.read_bytes(), self._caption(text, plain, str(file)), str(file)
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error

    def _caption(self, text: bytes | None, plain: bytes | None, where: str) -> str:
        try:
            if text is not None:
                return text.decode("utf-8").strip()
            if plain is not None:
                return caption_of(parse_object(plain), self._field, where)
        except ValueError as error:
            raise DataError(f"{where}: its caption cannot be read: {describe(error)}") from error
        raise DataError(
            f"{where}: has no caption; would work: a .txt or .json file of the same name beside it"
        )

    def identity(self) -> Any:
        return file_stats(self._files) if self._tars is None else self._tars.key


class _HubPictures:
    """One split of a dataset with a column of pictures and a column of captions."""

    def __init__(self, data: DataConfig, split: str) -> None:
        self._images = pictures_of(data)
        self._data = data
        self._split = split
        self.name = f"data.dataset={data.dataset}, split {split}"
        for field in ("image_field", "caption_field"):
            name = getattr(self._images, field)
            columns = self._table.column_names
            if name not in columns:
                raise DataError(
                    f"{self.name}: no column {name!r} among {list_names(columns)}; set data.options.{field}"
                )

    @cached_property
    def _table(self) -> Any:
        import datasets

        table = open_dataset(self._data, self._split)
        name = self._images.image_field
        if name in table.column_names and isinstance(table.features[name], datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        return table

    def __len__(self) -> int:
        return len(self._table)

    def content(self, index: int) -> tuple[bytes, str, str]:
        row = self._table[index]
        where = f"{self.name}, row {index}"
        picture = row[self._images.image_field]
        if isinstance(picture, dict):
            path = picture.get("path")
            picture = picture.get("bytes") or (Path(path).read_bytes() if path else None)
        if not isinstance(picture, bytes):
            kind = type(picture).__name__
            raise DataError(
                f"{where}: column {self._images.image_field!r} holds {kind}, not a picture"
            )
        return picture, caption_of(row, self._images.caption_field, where), where

    def identity(self) -> Any:
        digest = hashlib.sha256(str(self._table._fingerprint).encode()).hexdigest()
        return [self.name, self._images.image_field, self._images.caption_field, digest]
