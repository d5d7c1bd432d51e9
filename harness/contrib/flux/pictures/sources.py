"""Pictures with captions, by number: files, webdataset's tar files, or a dataset of `datasets`.

Sample number g is a function of (data, seed, g), as for tokens (``harness/data/samples.py``).
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from harness.config.data import DataConfig
from harness.contrib.flux.pictures.config import ImagesConfig, pictures_of
from harness.contrib.flux.pictures.shapes import DrawnShapes
from harness.contrib.flux.pictures.tar_index import SUFFIXES, TarIndex, open_tar_index
from harness.data.documents import describe, named
from harness.data.samples import EpochOrder, random_stream
from harness.data.sources import file_stats, find_files, folder_hint, open_dataset
from harness.data.tokenizing import is_held_out
from harness.util.encoding import parse_object
from harness.util.errors import DataError

MOST_SKIPPED = 100
"""Pictures in a row that cannot be decoded, after which data.options.on_error=skip gives up."""

MOST_ASPECT = 32
"""Times the shorter side: what exceeds it of the longer side is cropped before the picture is resized."""


class UnreadablePicture(DataError):
    """A picture cannot be decoded."""


class PictureSource(Protocol):
    """Pictures of one split, in a fixed order."""

    name: str
    """Name for error messages: the field and its value."""
    num: int | None
    """Number of pictures; None: endless."""

    def read(self, index: int, number: int) -> tuple[np.ndarray, str]:
        """Return a picture, uint8 of shape (size, size, 3), and its caption.

        Args:
            index: of the picture in the source.
            number: of the sample, on which a random crop depends.

        Raises:
            UnreadablePicture: it cannot be decoded.
            DataError: it has no caption, or the file cannot be read.
        """
        ...

    def identity(self) -> Any:
        """JSON-serializable; changes whenever the pictures may have changed."""
        ...


class RawSamples:
    """An endless sequence of pictures with captions; in another order in every epoch."""

    def __init__(self, source: PictureSource, *, seed: int, shuffle: bool, skips: bool) -> None:
        self._source, self._skips = source, skips
        self._order = None if source.num is None else EpochOrder(source.num, seed, shuffle=shuffle)
        self.num_per_epoch = source.num

    def index(self, number: int) -> int:
        """Index of a sample's picture in the source."""
        return number if self._order is None else self._order.at(number)

    def sample(self, number: int) -> tuple[np.ndarray, str]:
        """Return the picture, uint8 of shape (size, size, 3), and the caption of a sample."""
        first = self.index(number)
        for offset in range(MOST_SKIPPED if self._skips else 1):
            index = first + offset if self._source.num is None else (first + offset) % self._source.num
            try:
                return self._source.read(index, number)
            except UnreadablePicture as error:
                unreadable = error
        works = "" if self._skips else "; would work: data.options.on_error=skip"
        raise DataError(f"{unreadable}{works}")


def open_pictures(
    data: DataConfig,
    split: str,
    *,
    seed: int,
    wait_for_all: Callable[[], None] | None = None,
    is_builder: bool = True,
) -> PictureSource:
    """Open the pictures of a split; the arguments are those of ``build_loader``.

    Raises:
        ConfigError: the split is ``validation``, and no pictures are held out for it.
        DataError: the source cannot be read, or has no pictures.
    """
    if split == "validation":
        data.require_validation()
    if data.kind == "drawn_shapes":
        return DrawnShapes(split, pictures_of(data).size, seed)
    separate = data.validation_split or data.validation_paths
    held_out = 0.0 if separate else data.validation_fraction
    stored: _Stored
    if data.kind == "hub_pictures":
        own = data.validation_split if split == "validation" else None
        stored = _HubPictures(data, own or data.split)
    else:
        field = "validation_paths" if split == "validation" and separate else "paths"
        stored = _FilePictures(data, field, wait_for_all, is_builder=is_builder)
    return Part(stored, pictures_of(data), split, held_out, seed)


class _Stored(Protocol):
    """Encoded pictures and their captions."""

    name: str

    def __len__(self) -> int: ...

    def content(self, index: int) -> tuple[bytes, str, str]:
        """Return the file of a picture, its caption, and its place for error messages."""
        ...

    def identity(self) -> Any: ...


class Part:
    """The pictures of a split, decoded and cropped."""

    def __init__(self, stored: _Stored, images: ImagesConfig, split: str, held_out: float, seed: int) -> None:
        self._stored, self._images, self._seed = stored, images, seed
        self._crops = images.crop == "random" and split == "train"
        self.name, count = stored.name, len(stored)
        self._kept: np.ndarray | None = None
        if held_out:
            wanted = split == "validation"
            self._kept = np.array([i for i in range(count) if is_held_out(i, held_out) == wanted], np.int64)
            count = len(self._kept)
        self.num: int | None = count
        if not count:
            raise DataError(f"{self.name}: has no pictures of the split {split}")

    def read(self, index: int, number: int) -> tuple[np.ndarray, str]:
        stored = index if self._kept is None else int(self._kept[index])
        content, caption, where = self._stored.content(stored)
        place = random_stream("crop", self._seed, number).uniform() if self._crops else 0.5
        return decode(content, self._images.size, place, where), caption

    def identity(self) -> Any:
        return [self._stored.identity(), self._images.size, self._images.crop]


def decode(content: bytes, size: int, place: float, where: str) -> np.ndarray:
    """Decode a picture, resize its shorter side, and crop its longer side.

    Args:
        content: a file in a format that Pillow reads.
        size: height and width of the result, in pixels.
        place: of the crop: 0 is the left or the top, 1 the right or the bottom.
        where: place of the picture, for error messages.

    Returns:
        uint8 array of shape (size, size, 3).

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
        *(OSError, ValueError, SyntaxError, EOFError, MemoryError),
        Image.DecompressionBombError,
    ) as error:
        raise UnreadablePicture(f"{where}: is no picture that can be decoded ({describe(error)})") from error


def _cropped(picture: Any, width: int, height: int, place: float) -> Any:
    left, top = round((picture.width - width) * place), round((picture.height - height) * place)
    return picture.crop((left, top, left + width, top + height))


def caption_of(fields: dict[str, Any], name: str, where: str) -> str:
    """Return the caption of a row or a .json file; null is the empty caption."""
    if name not in fields:
        raise DataError(f"{where}: no field {name!r} among {named(fields)}; set data.options.caption_field")
    caption = fields[name]
    if isinstance(caption, list) and caption and isinstance(caption[0], str):
        caption = caption[0]  # several captions of one picture
    if caption is not None and not isinstance(caption, str):
        raise DataError(f"{where}: field {name!r} holds {type(caption).__name__}, not text")
    return caption or ""


class _FilePictures:
    """Pictures in folders and in tar files, in the order of the sorted paths."""

    def __init__(
        self, data: DataConfig, field: str, wait_for_all: Callable[[], None] | None, *, is_builder: bool
    ) -> None:
        patterns: list[str] = getattr(data, field)
        self.name, self._field = f"data.{field}=[{', '.join(patterns)}]", pictures_of(data).caption_field
        found = find_files(patterns, data.exclude)
        tars = [file for file in found if file.suffix == ".tar"]
        options = pictures_of(data)
        if options.format == "webdataset" or (options.format == "auto" and tars):
            if len(tars) < len(found):
                other = next(file for file in found if file.suffix != ".tar")
                raise DataError(f"{self.name}: {other} is no .tar file; would work: other data.paths")
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
        self._images, self._data, self._split = pictures_of(data), data, split
        self.name = f"data.dataset={data.dataset}, split {split}"
        for field in ("image_field", "caption_field"):
            name, columns = getattr(pictures_of(data), field), self._table.column_names
            if name not in columns:
                raise DataError(
                    f"{self.name}: no column {name!r} among {named(columns)}; set data.options.{field}"
                )

    @cached_property
    def _table(self) -> Any:
        import datasets

        table, name = open_dataset(self._data, self._split), self._images.image_field
        if name in table.column_names and isinstance(table.features[name], datasets.Image):
            table = table.cast_column(name, datasets.Image(decode=False))
        return table

    def __len__(self) -> int:
        return len(self._table)

    def content(self, index: int) -> tuple[bytes, str, str]:
        row, where = self._table[index], f"{self.name}, row {index}"
        picture = row[self._images.image_field]
        if isinstance(picture, dict):
            path = picture.get("path")
            picture = picture.get("bytes") or (Path(path).read_bytes() if path else None)
        if not isinstance(picture, bytes):
            kind = type(picture).__name__
            raise DataError(f"{where}: column {self._images.image_field!r} holds {kind}, not a picture")
        return picture, caption_of(row, self._images.caption_field, where), where

    def identity(self) -> Any:
        digest = hashlib.sha256(str(self._table._fingerprint).encode()).hexdigest()
        return [self.name, self._images.image_field, self._images.caption_field, digest]
