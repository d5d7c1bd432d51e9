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

import dataclasses
import math
import random
from bisect import bisect_right
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import xxhash
from safetensors import SafetensorError, safe_open

from harness.config.fields import from_dict
from harness.config.job import Job
from harness.config.training import Sizes
from harness.contrib.flux.config import PATCH, flow_of, flux_of
from harness.contrib.flux.objective import ImageBatch
from harness.contrib.flux.pictures.config import encoders_of, pictures_of
from harness.contrib.flux.pictures.encoders import Encoders, as_floats, build_encoders
from harness.contrib.flux.pictures.sources import RawSamples, open_pictures
from harness.data.loader import Cursor, Loader
from harness.data.samples import EpochOrder, random_stream
from harness.data.shards import MANIFEST, load_manifest
from harness.train.setup import pick_device
from harness.util.encoding import parse
from harness.util.errors import ConfigError, DataError
from harness.util.files import is_file_name
from harness.util.processes import cpus
from harness.util.store import file_digest

EMPTY = "empty.safetensors"
MOST_THREADS = 8
SAMPLE_FILES = 32


class CaptionDropout(NamedTuple):
    """Chooses the samples that are trained with the empty caption."""

    fraction: float
    seed: int

    def drops(self, number: int) -> bool:
        """Whether a sample's caption is dropped: a function of the seed and its number."""
        return (
            bool(self.fraction)
            and random_stream("caption", self.seed, number).uniform() < self.fraction
        )


class CaptionEmbeddings(NamedTuple):
    """The embeddings of a caption, float32."""

    text_LD: np.ndarray
    pooled_P: np.ndarray


class Picture(NamedTuple):
    """An encoded picture: mean and standard deviation of its latents, float32, as in ``ImageBatch``."""

    mean_CHW: np.ndarray
    std_CHW: np.ndarray | None


class PictureLoader(Loader):
    """A loader of pictures with captions, with random access."""

    def __init__(
        self,
        samples: LatentSamples | SyntheticPictures | RawSamples,
        rows: range,
        sizes: Sizes,
        dropout: CaptionDropout,
    ) -> None:
        self._cursor = Cursor(rows, sizes)
        self._dropout = dropout
        self.caption: Callable[[int], str] = samples.caption
        """Returns the caption of a sample by its number, without dropout."""
        self.samples_per_epoch = samples.num_per_epoch

    def state_dict(self) -> dict[str, Any]:
        return self._cursor.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._cursor.load_state_dict(state)

    def reset(self) -> None:
        self._cursor.reset()


class EncodedLoader(PictureLoader):
    """Loader of pictures that are encoded."""

    def __init__(
        self,
        samples: LatentSamples | SyntheticPictures,
        rows: range,
        sizes: Sizes,
        dropout: CaptionDropout,
    ) -> None:
        super().__init__(samples, rows, sizes, dropout)
        self._samples = samples

    def next(self) -> ImageBatch:
        numbers = [piece.number for piece in self._cursor.advance()]
        pictures, captions = zip(*map(self._sample, numbers), strict=True)
        means, stds = zip(*pictures, strict=True)
        texts, pooled = zip(*captions, strict=True)
        std_BCHW = None if stds[0] is None else _stack(stds)
        return ImageBatch(
            _stack(means), std_BCHW, _stack(texts), _stack(pooled), torch.tensor(numbers)
        )

    def _sample(self, number: int) -> tuple[Picture, CaptionEmbeddings]:
        picture, caption = self._samples.sample(number)
        return picture, self._samples.empty if self._dropout.drops(number) else caption


def _stack(arrays: Any) -> torch.Tensor:
    return torch.from_numpy(np.stack(arrays))


class EncodingLoader(PictureLoader):
    """Reads the pictures of the next step in threads, and encodes those of this step.

    Args:
        encoders: they encode in ``next``, on all ranks together if FSDP shards them.
    """

    def __init__(
        self,
        samples: RawSamples,
        encoders: Encoders,
        rows: range,
        sizes: Sizes,
        dropout: CaptionDropout,
        *,
        runs_in_loop: bool,
    ) -> None:
        super().__init__(samples, rows, sizes, dropout)
        self._samples = samples
        self._encoders = encoders
        self._threads = ThreadPoolExecutor(min(MOST_THREADS, cpus()), thread_name_prefix="pictures")
        self._ahead: dict[int, Future[tuple[np.ndarray, str]]] = {}
        self._state = self._cursor.state_dict()  # after the step that was returned
        self.runs_in_loop = runs_in_loop

    def next(self) -> ImageBatch:
        reading = self._ahead or self._start()
        state = self._cursor.state_dict()
        self._ahead = self._start()
        pictures, captions = zip(*(each.result() for each in reading.values()), strict=True)
        self._state = state
        moments = self._encoders.autoencoder.encode(as_floats(pictures))
        texts = [
            "" if self._dropout.drops(number) else caption
            for number, caption in zip(reading, captions, strict=True)
        ]
        return ImageBatch(*moments, *self._encoders.text.encode(texts), torch.tensor(list(reading)))

    def _start(self) -> dict[int, Future[tuple[np.ndarray, str]]]:
        numbers = [piece.number for piece in self._cursor.advance()]
        return {number: self._threads.submit(self._samples.sample, number) for number in numbers}

    def state_dict(self) -> dict[str, Any]:
        return self._state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.close()
        super().load_state_dict(state)
        self._state = self._cursor.state_dict()

    def reset(self) -> None:
        self.close()
        super().reset()
        self._state = self._cursor.state_dict()

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
        manifest: LatentManifest = from_dict(LatentManifest, {**plain, "files": []})
    except (ConfigError, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{folder / MANIFEST} is damaged: {type(error).__name__}: {error}"
        ) from None
    return dataclasses.replace(manifest, files=files)


def check_files(folder: Path, manifest: LatentManifest) -> None:
    """Compare the checksums of at most SAMPLE_FILES files, chosen at random each time.

    Raises:
        DataError: a file is missing or damaged.
    """
    for file in random.sample(manifest.files, min(SAMPLE_FILES, len(manifest.files))):
        path = folder / f"{file.name}.safetensors"
        try:
            if file_digest(path, xxhash.xxh3_64) == file.xxh3_64:
                continue
            problem = f"does not have the checksum in {MANIFEST}"
        except OSError as error:
            problem = f"cannot be read: {error.strerror}"
        raise DataError(
            f"{path}: {problem}; would work: remove it and {MANIFEST}, then harness encode again"
        )


class LatentSamples:
    """The pictures of a split by sample number; shuffled, in another order in every epoch.

    Raises:
        DataError: the folder is not complete, a file has another size, or the split has no
            pictures.
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
            raise DataError(
                f"{folder}: has no {split} pictures{works if split == 'validation' else ''}"
            )
        self.num_per_epoch: int | None = self._ends[-1]
        self._order = EpochOrder(self._ends[-1], seed, shuffle=shuffle)
        self._opened: dict[str, Any] = {}
        read = self._open("empty")
        self.empty = CaptionEmbeddings(
            *(read.get_tensor(name).float().numpy() for name in ("text", "pooled"))
        )

    def sample(self, number: int) -> tuple[Picture, CaptionEmbeddings]:
        """Return a sample by its number."""
        file, row = self._place(number)
        read = self._open(file.name)

        def row_of(name: str) -> np.ndarray:
            values: np.ndarray = read.get_slice(name)[row].float().numpy()
            return values

        std = row_of("std") if "std" in read.keys() else None  # noqa: SIM118
        return Picture(row_of("mean"), std), CaptionEmbeddings(row_of("text"), row_of("pooled"))

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

    def _check_size(self, file: LatentFile) -> None:
        path = self._folder / f"{file.name}.safetensors"
        found = path.stat().st_size if path.exists() else None
        if found != file.nbytes:
            has = "is missing" if found is None else f"has {found} bytes instead of {file.nbytes}"
            raise DataError(
                f"{path} {has}; would work: remove {MANIFEST}, then harness encode again"
            )


class SyntheticPictures:
    """Normal random latents and embeddings of the model's shapes; needs no file."""

    num_per_epoch: int | None = None

    def __init__(self, job: Job, split: str) -> None:
        self._flux = flux_of(job.model)
        self._seed = job.training.seed
        self._split = split
        side = PATCH * math.isqrt(job.training.seq_len - self._flux.text_length)
        self._shape = self._flux.latent_channels, side, side

    @property
    def empty(self) -> CaptionEmbeddings:
        return self._caption(random_stream("synthetic empty caption", self._seed, 0))

    def sample(self, number: int) -> tuple[Picture, CaptionEmbeddings]:
        stream = random_stream(f"synthetic pictures {self._split}", self._seed, number)
        mean = stream.standard_normal(self._shape).astype(np.float32)
        return Picture(mean, np.full_like(mean, 0.1)), self._caption(stream)

    def caption(self, number: int) -> str:
        return f"random {number}"

    def _caption(self, stream: np.random.RandomState) -> CaptionEmbeddings:
        text = stream.standard_normal((self._flux.text_length, self._flux.context_dim))
        pooled = stream.standard_normal(self._flux.pooled_dim)
        return CaptionEmbeddings(text.astype(np.float32), pooled.astype(np.float32))


def build_loader(
    job: Job, rows: range, split: str, *, wait_for_all: Callable[[], None], is_builder: bool
) -> Loader:
    """Return the loader of ``rows`` of every global batch; see ``Objective.build_loader``."""
    dropped = flow_of(job).caption_dropout if split == "train" else 0.0
    dropout = CaptionDropout(dropped, job.training.seed)
    sizes = job.sizes if split == "train" else Sizes(job.global_batch_size, job.training.seq_len)
    shuffle = job.data.shuffle and split == "train"
    if job.data.kind == "latents_synthetic":
        return EncodedLoader(SyntheticPictures(job, split), rows, sizes, dropout)
    if job.data.kind == "latents":
        folder = Path(job.data.paths[0]).expanduser()
        latents = LatentSamples(folder, split, seed=job.training.seed, shuffle=shuffle)
        if is_builder:
            check_files(folder, latents.manifest)
        return EncodedLoader(latents, rows, sizes, dropout)
    pictures = RawSamples(
        open_pictures(
            job.data,
            split,
            seed=job.training.seed,
            wait_for_all=wait_for_all,
            is_builder=is_builder,
        ),
        seed=job.training.seed,
        shuffle=shuffle,
        skips=pictures_of(job.data).on_error == "skip",
    )
    encoders = build_encoders(encoders_of(job.data), pick_device(job), shard=True)
    return EncodingLoader(
        pictures, encoders, rows, sizes, dropout, runs_in_loop=encoders_of(job.data).has_weights
    )
