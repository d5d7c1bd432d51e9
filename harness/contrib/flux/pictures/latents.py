"""Encoded pictures on disk: the folder that ``harness encode`` writes, read by number.

latents/photos/manifest.json                 encoders, counts, files with checksums; written last
latents/photos/train-00000.safetensors       mean, std, text and pooled of consecutive pictures
latents/photos/train-00000.json              their captions
latents/photos/empty.safetensors             text and pooled of the empty caption
"""

from __future__ import annotations

import dataclasses
import random
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from safetensors import SafetensorError, safe_open

from harness.config.fields import from_dict
from harness.contrib.flux.pictures.loader import Caption, Picture
from harness.data.samples import EpochOrder
from harness.data.shards import MANIFEST, load_manifest
from harness.util.encoding import parse
from harness.util.errors import ConfigError, DataError
from harness.util.files import is_file_name

EMPTY = "empty.safetensors"
SAMPLE_FILES = 32


@dataclass(frozen=True)
class LatentFile:
    """A file of consecutive pictures: its name is without the extension, its checksum of the safetensors."""

    name: str
    split: str
    count: int
    nbytes: int
    xxh3_64: str


@dataclass(frozen=True)
class LatentManifest:
    """Description of a folder.

    Attributes:
        encoders: of ``data.options``, with the ``fingerprint`` of their weights.
        source: name of the pictures.
        size: height and width of the pictures, in pixels.
        files: in the order of their pictures.
        key: hash of everything that determines the content.
    """

    version: int
    encoders: dict[str, Any]
    fingerprint: str
    source: str
    size: int
    files: list[LatentFile]
    key: str

    def count(self, split: str) -> int:
        """Number of pictures of a split."""
        return sum(file.count for file in self.files if file.split == split)


def read_manifest(folder: Path) -> LatentManifest:
    """Read a folder's manifest.

    Raises:
        DataError: there is none, it is damaged, or a later version wrote it.
    """
    plain = load_manifest(folder, "encode", "folder")
    try:
        files = [from_dict(LatentFile, file) for file in plain["files"]]
        if others := [file.name for file in files if not is_file_name(file.name)]:
            raise ValueError(f"{others[0]!r} is no name of a file in it")
        manifest: LatentManifest = from_dict(LatentManifest, {**plain, "files": []})
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(f"{folder / MANIFEST} is damaged: {type(error).__name__}: {error}") from None
    return dataclasses.replace(manifest, files=files)


def checksum(path: Path) -> str:
    """Checksum of a file, read in blocks."""
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            digest.update(block)
    return digest.hexdigest()


def check_files(folder: Path, manifest: LatentManifest) -> None:
    """Compare the checksums of at most SAMPLE_FILES files, chosen at random each time.

    Raises:
        DataError: a file is missing or damaged.
    """
    for file in random.sample(manifest.files, min(SAMPLE_FILES, len(manifest.files))):
        path = folder / f"{file.name}.safetensors"
        try:
            if checksum(path) == file.xxh3_64:
                continue
            problem = f"does not have the checksum in {MANIFEST}"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        raise DataError(f"{path}: {problem}; would work: remove it and {MANIFEST}, then harness encode again")


class LatentSamples:
    """The pictures of a split by sample number; shuffled, in another order in every epoch.

    Raises:
        DataError: the folder is not complete, a file has another size, or the split has no pictures.
    """

    def __init__(self, folder: Path, split: str, *, seed: int, shuffle: bool) -> None:
        self.manifest = read_manifest(folder)
        self._folder = folder
        self._files = [file for file in self.manifest.files if file.split == split]
        for file in self._files:
            self._check_size(file)
        self._ends = list(accumulate(file.count for file in self._files))
        if not self._ends:
            works = "; would work: harness encode with data.validation_fraction=0.01"
            raise DataError(f"{folder}: has no {split} pictures{works if split == 'validation' else ''}")
        self.num_per_epoch: int | None = self._ends[-1]
        self._order = EpochOrder(self._ends[-1], seed, shuffle=shuffle)
        self._opened: dict[str, Any] = {}
        read = self._open("empty")
        self.empty = Caption(*(read.get_tensor(name).float().numpy() for name in ("text", "pooled")))

    def sample(self, number: int) -> tuple[Picture, Caption]:
        file, row = self._place(number)
        read = self._open(file.name)

        def row_of(name: str) -> np.ndarray:
            values: np.ndarray = read.get_slice(name)[row].float().numpy()
            return values

        std = row_of("std") if "std" in read.keys() else None  # noqa: SIM118
        return Picture(row_of("mean"), std), Caption(row_of("text"), row_of("pooled"))

    def caption(self, number: int) -> str:
        file, row = self._place(number)
        path = self._folder / f"{file.name}.json"
        try:
            return str(parse(path.read_bytes(), list)[row])
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _place(self, number: int) -> tuple[LatentFile, int]:
        index = self._order.at(number)
        at = bisect_right(self._ends, index)
        return self._files[at], index - (self._ends[at - 1] if at else 0)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            path = self._folder / f"{name}.safetensors"
            try:
                self._opened[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
        return self._opened[name]

    def _check_size(self, file: LatentFile) -> None:
        path = self._folder / f"{file.name}.safetensors"
        found = path.stat().st_size if path.exists() else None
        if found != file.nbytes:
            has = "is missing" if found is None else f"has {found} bytes instead of {file.nbytes}"
            raise DataError(f"{path} {has}; would work: remove {MANIFEST}, then harness encode again")
