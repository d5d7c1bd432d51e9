"""Pictures with captions, by number: files, webdataset's tar files, or a dataset of `datasets`.

Sample number g is a function of (data, seed, g), as for tokens (``harness/data/samples.py``).
"""

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.config.data import DataConfig
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
from harness.util.encoding import json_digest, parse_object
from harness.util.errors import DataError
from harness.util.files import write_atomically
from harness.util.store import Damaged, check_files, describe_files, only_builder
from harness_flux.pictures.config import pictures_of
from harness_flux.pictures.shapes import DrawnShapes

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff")
"""Extensions of pictures."""
MOST_SKIPPED = 100
"""Pictures in a row that cannot be decoded, after which data.options.on_error=skip gives up."""
MOST_ASPECT = 32
"""A picture that is longer would be huge after its shorter side has been resized."""
META = "meta.json"
TABLE = "members.npy"
_THREADS = 8
_FORMAT_VERSION = 2


class Stored(Protocol):
    """Pictures of a source in a fixed order, not decoded."""

    name: str
    """The field and its value, for error messages."""

    def __len__(self) -> int: ...

    def content(self, index: int) -> tuple[bytes, str, str]:
        """Return the file of a picture, its caption, and its place for error messages."""

    @property
    def identity(self) -> Any:
        """JSON-serializable; changes whenever the pictures may have changed."""


class RawSamples:
    """An endless sequence of the pictures of a split with captions; in another order in every epoch."""

    def __init__(
        self, stored: Stored, data: DataConfig, split: str, *, seed: int, shuffle: bool
    ) -> None:
        self.name = stored.name
        self._stored = stored
        self._options = pictures_of(data)
        self._seed = seed
        self._crops = self._options.crop == "random" and split == "train"
        self._kept: Sequence[int] | np.ndarray = range(len(stored))
        if data.validation_fraction:
            wanted = split == "validation"
            held_out = [is_held_out(index, data.validation_fraction) for index in self._kept]
            self._kept = np.flatnonzero(np.array(held_out) == wanted)
        if not len(self._kept):
            raise DataError(f"{self.name}: has no pictures of the split {split}")
        self.num_per_epoch: int | None = len(self._kept)
        self._order = EpochOrder(len(self._kept), seed, shuffle=shuffle)

    def sample(self, number: int) -> tuple[np.ndarray, str]:
        """Return the picture, uint8 of shape (size, size, 3), and the caption of a sample.

        Raises:
            DataError: it cannot be decoded, it has no caption, or the file cannot be read.
        """
        first = self._order.at(number)
        place = random_stream("crop", self._seed, number).uniform() if self._crops else 0.5
        skips = self._options.on_error == "skip"
        for index in range(first, first + (MOST_SKIPPED if skips else 1)):
            kept = self._kept[index % len(self._kept)]
            content, caption, where = self._stored.content(int(kept))
            try:
                return decode(content, self._options.size, place), caption
            except UnreadablePicture as error:
                unreadable = f"{where}: is no picture that can be decoded ({error})"
        works = "" if skips else "; would work: data.options.on_error=skip"
        raise DataError(f"{unreadable}{works}")

    @property
    def identity(self) -> Any:
        """JSON-serializable; changes whenever the pictures may have changed."""
        return self._stored.identity


def open_pictures(
    data: DataConfig,
    split: str,
    *,
    seed: int,
    shuffle: bool = False,
    wait_for_all: Callable[[], None] = lambda: None,
    is_builder: bool = True,
) -> RawSamples | DrawnShapes:
    """Open the pictures of a split; the arguments are those of ``build_loader``."""
    if split == "validation":
        data.require_validation()
    options = pictures_of(data)
    if data.kind == "drawn_shapes":
        return DrawnShapes(split, options.size, seed)
    stored: Stored
    if data.kind == "hub_pictures":
        stored = _HubPictures(data, data.split_of(split))
    else:
        field, patterns = data.files_of(split)
        name = f"data.{field}=[{', '.join(patterns)}]"
        found = find_files(patterns, data.exclude)
        if not found:
            seen = f"seen from {Path.cwd()}{folder_hint(patterns)}"
            raise DataError(f"{name}: no pictures match, {seen}")
        others = [file for file in found if file.suffix != ".tar"]
        is_all = options.format == "auto" and len(others) == len(found)
        if is_all or options.format == "files":
            stored = _Files(name, found, options.caption_field)
        elif others:
            raise DataError(f"{name}: {others[0]} is no .tar file; would work: other data.paths")
        else:
            stored = _Tars(name, found, data, wait_for_all, is_builder=is_builder)
    return RawSamples(stored, data, split, seed=seed, shuffle=shuffle)


class UnreadablePicture(Exception):
    """A picture cannot be decoded."""


def decode(content: bytes, size: int, place: float) -> np.ndarray:
    """Decode a picture, resize its shorter side, and crop its longer side: uint8 of shape (size, size, 3).

    Args:
        content: a file in a format that Pillow reads.
        place: of the crop: 0 is the left or the top, 1 the right or the bottom.

    Raises:
        UnreadablePicture: the content is damaged, of an unknown format, or suspiciously large.
    """
    from PIL import Image, ImageOps

    try:
        with Image.open(io.BytesIO(content)) as opened:
            picture = ImageOps.exif_transpose(opened).convert("RGB")
        short = min(picture.size)
        if max(picture.size) > MOST_ASPECT * short:
            raise ValueError(f"one side is more than {MOST_ASPECT} times the other")
        wide, high = (max(size, round(side * (size / short))) for side in picture.size)
        resized = picture.resize((wide, high), Image.Resampling.BICUBIC)
        left = round((wide - size) * place)
        top = round((high - size) * place)
        return np.asarray(resized.crop((left, top, left + size, top + size)))
    # Readers of damaged files raise many types.
    except (
        OSError,
        ValueError,
        SyntaxError,
        EOFError,
        MemoryError,
        Image.DecompressionBombError,
    ) as error:
        raise UnreadablePicture(describe(error)) from error


def caption_of(fields: dict[str, Any], name: str, where: str) -> str:
    """Return the caption of a row or a .json file; null is the empty caption."""
    if name not in fields:
        raise DataError(
            f"{where}: no field {name!r} among {list_names(fields)}; set data.options.caption_field"
        )
    caption = fields[name]
    if isinstance(caption, list) and caption:
        caption = caption[0]  # several captions of one picture
    if caption is not None and not isinstance(caption, str):
        raise DataError(f"{where}: field {name!r} holds {type(caption).__name__}, not text")
    return caption or ""


def _caption_beside(text: bytes | None, plain: bytes | None, field: str, where: str) -> str:
    """Return the caption in a .txt file, or else in a .json file."""
    try:
        if text is not None:
            return text.decode("utf-8").strip()
        if plain is not None:
            return caption_of(parse_object(plain), field, where)
    except ValueError as error:
        raise DataError(f"{where}: its caption cannot be read: {describe(error)}") from error
    raise DataError(
        f"{where}: has no caption; would work: a .txt or .json file of the same name beside it"
    )


class _Files:
    """Pictures in files, in the order of the sorted paths."""

    def __init__(self, name: str, files: Sequence[Path], caption_field: str) -> None:
        self.name = name
        self._files = [file for file in files if file.suffix.lower() in SUFFIXES]
        self._field = caption_field

    def __len__(self) -> int:
        return len(self._files)

    def content(self, index: int) -> tuple[bytes, str, str]:
        file = self._files[index]
        texts = (file.with_suffix(suffix) for suffix in (".txt", ".json"))
        try:
            text, plain = (path.read_bytes() if path.is_file() else None for path in texts)
            picture = file.read_bytes()
        except OSError as error:
            raise DataError(f"{file} cannot be read: {error.strerror}") from error
        return picture, _caption_beside(text, plain, self._field, str(file)), str(file)

    @property
    def identity(self) -> Any:
        return file_stats(self._files)


class _Tars:
    """Pictures in webdataset's tar files (github.com/webdataset/webdataset), in the order of the files.

    A table, which is made once in ``data.cache_dir``, has an int64 row for each picture: number of
    its file; offset and size of the picture, of its .txt and of its .json, with a size of -1 for
    one that does not exist.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[Path],
        data: DataConfig,
        wait_for_all: Callable[[], None],
        *,
        is_builder: bool,
    ) -> None:
        self.name = name
        self._files = files
        self._field = pictures_of(data).caption_field
        self.identity = json_digest([_FORMAT_VERSION, file_stats(files)])[:24]
        folder = Path(data.cache_dir).expanduser() / "pictures" / self.identity
        if is_builder:
            with only_builder(folder, (folder / META).exists) as building:
                if building is not None:
                    with ThreadPoolExecutor(_THREADS) as threads:
                        rows = list(threads.map(_rows, range(len(files)), files))
                    content = io.BytesIO()
                    np.save(content, np.concatenate(rows))
                    write_atomically(folder / TABLE, content.getvalue())
                    meta = json.dumps(describe_files(folder, [TABLE]))
                    write_atomically(folder / META, meta.encode())
        wait_for_all()
        try:
            check_files(folder, parse_object((folder / META).read_bytes()))
            self._table = np.load(folder / TABLE, mmap_mode="r")
        except (Damaged, OSError, ValueError) as error:
            works = "remove it; data.cache_dir must be a folder that all ranks share"
            raise DataError(
                f"picture table {folder} cannot be read here: {error}; would work: {works}"
            ) from None

    def __len__(self) -> int:
        return len(self._table)

    def content(self, index: int) -> tuple[bytes, str, str]:
        number, *places = self._table[index].tolist()
        path = self._files[number]
        found: list[bytes | None] = []
        try:
            with path.open("rb") as file:
                for offset, size in zip(places[::2], places[1::2], strict=True):
                    file.seek(offset)
                    found.append(None if size < 0 else file.read(size))
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error.strerror}") from error
        picture, text, plain = found
        where = f"{path}, byte {places[0]}"
        return picture or b"", _caption_beside(text, plain, self._field, where), where


def _rows(number: int, file: Path) -> np.ndarray:
    """Rows of the table for one tar file."""
    rows = []
    try:
        with tarfile.open(file, "r:") as opened:
            files = filter(tarfile.TarInfo.isfile, opened)
            for _, members in groupby(files, lambda each: _parts(each)[0]):
                found: dict[str, tuple[int, int]] = {}
                for member in members:
                    suffix = _parts(member)[1]
                    kind = "picture" if suffix in SUFFIXES else suffix
                    found.setdefault(kind, (member.offset_data, member.size))
                if "picture" in found:
                    absent = (0, -1)
                    text = found.get(".txt", absent)
                    rows.append([number, *found["picture"], *text, *found.get(".json", absent)])
        return np.array(rows, np.int64).reshape(-1, 7)
    # tarfile believes the numbers in headers.
    except (tarfile.TarError, OSError, ValueError, OverflowError, MemoryError) as error:
        raise DataError(
            f"{file}: not a readable tar file without compression ({describe(error)})"
        ) from error


def _parts(member: tarfile.TarInfo) -> tuple[str, str]:
    """The name up to the first dot of its last part, which the files of a picture share, and the rest."""
    folder, name = os.path.split(member.name)
    stem, dot, extension = name.partition(".")
    return os.path.join(folder, stem), dot + extension.lower()


class _HubPictures:
    """One split of a dataset with a column of pictures and a column of captions."""

    def __init__(self, data: DataConfig, split: str) -> None:
        import datasets

        options = pictures_of(data)
        self.name = f"data.dataset={data.dataset}, split {split}"
        self._picture = options.image_field
        self._caption = options.caption_field
        table = open_dataset(data, split)
        for field in ("image_field", "caption_field"):
            name = getattr(options, field)
            if name not in table.column_names:
                columns = list_names(table.column_names)
                raise DataError(
                    f"{self.name}: no column {name!r} among {columns}; set data.options.{field}"
                )
        if isinstance(table.features[self._picture], datasets.Image):
            table = table.cast_column(self._picture, datasets.Image(decode=False))
        self._table = table
        self.identity = [self.name, str(table._fingerprint)]

    def __len__(self) -> int:
        return len(self._table)

    def content(self, index: int) -> tuple[bytes, str, str]:
        row = self._table[index]
        where = f"{self.name}, row {index}"
        picture = row[self._picture]
        if isinstance(picture, dict):
            path = picture.get("path")
            picture = picture.get("bytes") or (Path(path).read_bytes() if path else None)
        if not isinstance(picture, bytes):
            kind = type(picture).__name__
            raise DataError(f"{where}: column {self._picture!r} holds {kind}, not a picture")
        return picture, caption_of(row, self._caption, where), where
