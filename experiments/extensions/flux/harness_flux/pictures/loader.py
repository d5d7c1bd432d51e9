"""Loaders of pictures with captions: random, encoded beforehand, or encoded when they are read.

Row j of global step s is sample s * global_batch_size + j, as for tokens (``harness.data.loader``).
Whether the caption of a sample is dropped is a function of the seed and that number.

``harness encode`` writes a folder of encoded pictures:

latents/photos/manifest.json                 encoders, counts, files with checksums; written last
latents/photos/train-00000.safetensors       mean, std, text and pooled of consecutive pictures
latents/photos/train-00000.json              their captions
latents/photos/empty.safetensors             text and pooled of the empty caption
"""

from __future__ import annotations

import copy
import random
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from harness.config.fields import from_dict
from harness.config.job import Job
from harness.config.training import Sizes
from harness.data.loader import Cursor, Loader
from harness.data.samples import EpochOrder, random_stream
from harness.data.shards import MANIFEST, load_manifest
from harness.train.setup import pick_device
from harness.util.encoding import parse
from harness.util.errors import ConfigError, DataError
from harness.util.files import is_file_name
from harness.util.processes import cpus
from harness.util.store import file_digest
from harness_flux.config import flow_of, flux_of
from harness_flux.objective import ImageBatch
from harness_flux.pictures.config import PictureOptions, pictures_of
from harness_flux.pictures.encoders import (
    as_floats,
    build_autoencoder,
    build_text_encoder,
)
from harness_flux.pictures.shapes import DrawnShapes
from harness_flux.pictures.sources import RawSamples, open_pictures

EMPTY = "empty.safetensors"
MOST_THREADS = 8
SAMPLE_FILES = 32
Row = dict[str, Tensor]
"""An encoded picture and its caption, float32: mean, std if any, text and pooled of ``ImageBatch``."""


class PictureLoader(Loader):
    """A loader of encoded pictures with captions, with random access.

    Args:
        cursor: of the rows of every global batch that it reads.
        drops: whether a sample, by its number, has the empty caption.
    """

    leaves_out = True

    def __init__(self, samples: Any, cursor: Cursor, drops: Callable[[int], bool]) -> None:
        self._samples = samples
        self._cursor = cursor
        self._drops = drops
        self.samples_per_epoch = samples.num_per_epoch

    def caption(self, number: int) -> str:
        """Return the caption of a sample by its number, without dropout."""
        return str(self._samples.caption(number))

    def next(self) -> ImageBatch:
        numbers = [piece.number for piece in self._cursor.advance()]
        rows = []
        for number in numbers:
            row: Row = self._samples.sample(number)
            rows.append(row | self._samples.empty if self._drops(number) else row)
        found = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        return ImageBatch(
            found["mean"], found.get("std"), found["text"], found["pooled"], torch.tensor(numbers)
        )

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def reset(self) -> None:
        self._cursor.reset()


class EncodingLoader(PictureLoader):
    """Reads the pictures of the next step in threads, and encodes those of this step.

    ``next`` encodes, on all ranks together if FSDP shards the encoders.
    """

    def __init__(
        self,
        samples: RawSamples | DrawnShapes,
        cursor: Cursor,
        drops: Callable[[int], bool],
        options: PictureOptions,
        device: torch.device,
    ) -> None:
        super().__init__(samples, cursor, drops)
        self._autoencoder = build_autoencoder(options, device)
        self._text = build_text_encoder(options, device)
        self.runs_in_loop = options.has_weights
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, cpus()), thread_name_prefix="pictures")
        self._ahead: dict[int, Future[tuple[np.ndarray, str]]] = {}

    def caption(self, number: int) -> str:
        return str(self._samples.sample(number)[1])

    def next(self) -> ImageBatch:
        reading = self._read(self._cursor)
        self._ahead = self._read(copy.copy(self._cursor))
        pictures, captions = zip(*(each.result() for each in reading.values()), strict=True)
        texts = [
            "" if self._drops(number) else caption
            for number, caption in zip(reading, captions, strict=True)
        ]
        moments = self._autoencoder.encode(as_floats(pictures))
        return ImageBatch(*moments, *self._text.encode(texts), torch.tensor(list(reading)))

    def _read(self, cursor: Cursor) -> dict[int, Future[tuple[np.ndarray, str]]]:
        """Start to read the next step's pictures, as far as that was not done ahead."""
        numbers = [piece.number for piece in cursor.advance()]
        return {
            number: self._ahead.get(number) or self._threads.submit(self._samples.sample, number)
            for number in numbers
        }

    def close(self) -> None:
        for each in self._ahead.values():
            each.cancel()
        self._ahead = {}


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
        return LatentManifest(**{**plain, "files": files})
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged: {type(error).__name__}: {error}"
        ) from None


def check_files(folder: Path) -> None:
    """Compare all sizes, and the checksums of at most SAMPLE_FILES files, chosen at random each time.

    Raises:
        DataError: a file is missing or damaged.
    """
    files = read_manifest(folder).files
    sample = random.sample(files, min(SAMPLE_FILES, len(files)))
    for file in files:
        path = folder / f"{file.name}.safetensors"
        try:
            if path.stat().st_size != file.nbytes:
                problem = f"does not have {file.nbytes} bytes"
            elif file in sample and file_digest(path, xxhash.xxh3_64) != file.xxh3_64:
                problem = f"does not have the checksum in {MANIFEST}"
            else:
                continue
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        raise DataError(f"{path}: {problem}; would work: remove {MANIFEST}, harness encode again")


class LatentSamples:
    """The pictures of a split by sample number; shuffled, in another order in every epoch.

    Raises:
        DataError: the folder is not complete, or the split has no pictures.
    """

    def __init__(self, folder: Path, split: str, *, seed: int, shuffle: bool) -> None:
        self._folder = folder
        self._files = [file for file in read_manifest(folder).files if file.split == split]
        self._ends = list(accumulate(file.count for file in self._files))
        if not self._ends:
            works = "; would work: harness encode with data.validation_fraction=0.01"
            raise DataError(
                f"{folder}: has no {split} pictures{works if split == 'validation' else ''}"
            )
        self.num_per_epoch: int | None = self._ends[-1]
        self._order = EpochOrder(self._ends[-1], seed, shuffle=shuffle)
        self._opened: dict[str, Any] = {}
        empty = self._open("empty")
        self.empty = {name: empty.get_tensor(name).float() for name in ("text", "pooled")}

    def sample(self, number: int) -> Row:
        """Return a sample by its number."""
        file, row = self._place(number)
        read = self._open(file.name)
        return {name: read.get_slice(name)[row].float() for name in read.keys()}  # noqa: SIM118

    def caption(self, number: int) -> str:
        file, row = self._place(number)
        path = self._folder / f"{file.name}.json"
        try:
            return str(parse(path.read_bytes(), list)[row])
        except (OSError, ValueError, IndexError) as error:
            raise DataError(f"{path} cannot be read: {error}") from error

    def _place(self, number: int) -> tuple[LatentFile, int]:
        index = self._order.at(number)
        place = bisect_right(self._ends, index)
        return self._files[place], index - (self._ends[place - 1] if place else 0)

    def _open(self, name: str) -> Any:
        if name not in self._opened:
            path = self._folder / f"{name}.safetensors"
            try:
                self._opened[name] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise DataError(f"{path} cannot be read: {error}") from error
        return self._opened[name]


class SyntheticPictures:
    """Normal random latents and embeddings of the model's shapes; needs no file."""

    num_per_epoch: int | None = None

    def __init__(self, job: Job, split: str) -> None:
        self._flux = flux_of(job.model)
        self._seed = job.training.seed
        self._split = split
        self._shape = self._flux.latents_shape(job.training.seq_len)

    @property
    def empty(self) -> Row:
        return self._caption(random_stream("synthetic empty caption", self._seed, 0))

    def sample(self, number: int) -> Row:
        stream = random_stream(f"synthetic pictures {self._split}", self._seed, number)
        mean = torch.from_numpy(stream.standard_normal(self._shape)).float()
        return {"mean": mean, "std": torch.full_like(mean, 0.1), **self._caption(stream)}

    def caption(self, number: int) -> str:
        return f"random {number}"

    def _caption(self, stream: np.random.RandomState) -> Row:
        text = stream.standard_normal((self._flux.text_length, self._flux.context_dim))
        pooled = stream.standard_normal(self._flux.pooled_dim)
        return {"text": torch.from_numpy(text).float(), "pooled": torch.from_numpy(pooled).float()}


def build_loader(
    job: Job, rows: range, split: str, *, wait_for_all: Callable[[], None], is_builder: bool
) -> Loader:
    """Return the loader of ``rows`` of every global batch; see ``Objective.build_loader``."""
    trains = split == "train"
    seed = job.training.seed
    sizes = job.sizes if trains else Sizes(job.global_batch_size, job.training.seq_len)
    cursor = Cursor(rows, sizes, job.data.leave_out if trains else [])
    dropout = flow_of(job).caption_dropout if trains else 0.0

    def drops(number: int) -> bool:
        return random_stream("caption", seed, number).uniform() < dropout

    shuffle = job.data.shuffle and trains
    if job.data.kind == "latents_synthetic":
        return PictureLoader(SyntheticPictures(job, split), cursor, drops)
    if job.data.kind == "latents":
        folder = Path(job.data.paths[0]).expanduser()
        if is_builder:
            check_files(folder)
        samples = LatentSamples(folder, split, seed=seed, shuffle=shuffle)
        return PictureLoader(samples, cursor, drops)
    pictures = open_pictures(
        job.data,
        split,
        seed=seed,
        shuffle=shuffle,
        wait_for_all=wait_for_all,
        is_builder=is_builder,
    )
    options = pictures_of(job.data)
    return EncodingLoader(pictures, cursor, drops, options, pick_device(job))
