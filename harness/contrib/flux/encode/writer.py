"""Write encoded pictures: for each unit of consecutive pictures a file of tensors, and one of captions.

The files do not depend on the number of processes and shards. They are described in
``harness/contrib/flux/pictures/loader.py``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors.torch import save

from harness.contrib.flux.pictures.config import encoders_of, images_of, pictures_of
from harness.contrib.flux.pictures.encoders import as_floats, build_encoders, fingerprint_of
from harness.contrib.flux.pictures.loader import EMPTY, MOST_THREADS, LatentFile, LatentManifest
from harness.contrib.flux.pictures.sources import PictureSource, RawSamples, open_pictures
from harness.data.shards import FORMAT_VERSION, ShardWriter, cut_units, write_manifest
from harness.data.workers import Workers
from harness.train.setup import pick_device
from harness.util.files import write_atomically
from harness.util.processes import cpus
from harness.util.store import file_digest

if TYPE_CHECKING:
    from harness.contrib.flux.encode.verb import EncodeConfig, EncodeJob

SPLITS = ("train", "validation")
_TENSORS = ("mean", "std", "text", "pooled")
_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class EncodeUnit:
    """Consecutive pictures of a split."""

    number: int
    split: str
    index: int
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Number of pictures. It stands for the size of the work."""
        return self.end - self.begin

    @property
    def name(self) -> str:
        """Name of its files, without extension."""
        return f"{self.split}-{self.index:05}"

    def __str__(self) -> str:
        return f"{self.split} pictures {self.begin:,} to {self.end:,}"


class LatentWriter(ShardWriter):
    """Writes the latents and embeddings of a job's pictures.

    Args:
        device: where the encoders compute, in this process; None: the job's.

    Raises:
        DataError: the pictures cannot be opened.
        ConfigError: an encoder cannot be loaded.
    """

    verb = "encode"
    noun = "folder of latents"

    def __init__(self, job: EncodeJob, device: torch.device | None = None) -> None:
        assert job.encode.target is not None, "checked by validate"
        self.target = Path(job.encode.target).expanduser()
        self._job = job
        self._config = job.encode
        self._device = device or pick_device(job)
        self._sources = open_splits(job)
        self.source_name = self._sources["train"].name
        counts = {
            split: count_of(source, job.encode, split) for split, source in self._sources.items()
        }
        self.units = list(_units(counts, job.encode.unit))
        self.shards = cut_units(self.units, min(job.encode.shards or 1, len(self.units)))
        self._fingerprint = fingerprint_of(encoders_of(job.data))

    @property
    def key(self) -> str:
        sources = {split: source.identity() for split, source in self._sources.items()}
        content = [
            FORMAT_VERSION,
            sources,
            self._fingerprint,
            self._job.training.seed,
            *self.plan.values(),
        ]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    @property
    def plan(self) -> dict[str, Any]:
        data = self._job.data
        return {
            "data": self.source_name,
            "data.options": dataclasses.asdict(images_of(data)),
            "data.options (encoders)": dataclasses.asdict(encoders_of(data)),
            "data.validation_fraction": data.validation_fraction,
            "encode.samples": self._config.samples,
            "encode.unit": self._config.unit,
            "encode.shards": len(self.shards),
        }

    def missing(self, shard: int) -> list[EncodeUnit]:
        return [unit for unit in self.shards[shard] if not self._entry_path(unit).exists()]

    def forget(self, shard: int) -> None:
        for unit in self.shards[shard]:
            self._entry_path(unit).unlink(missing_ok=True)

    def _entry_path(self, unit: EncodeUnit) -> Path:
        """Path of the manifest's entry for a unit. It is written last: with it the unit is complete."""
        return self.work / f"{unit.name}.entry"

    def write(self, shards: Sequence[int], workers: int | None) -> None:
        units: list[EncodeUnit] = []
        for shard in shards:
            units += self.missing(shard)
        gpus = torch.cuda.device_count() if self._device.type == "cuda" else 0
        count = min(workers or gpus or 1, len(units))
        progress = _Progress(sum(unit.nbytes for unit in units))
        if count > 1:
            prepare = partial(_prepare, self._job, self._device.type)
            Workers(prepare, "encoded", "fewer encode.workers").run(units, count, progress.advance)
            return
        for unit in units:
            self.write_unit(unit, partial(progress.advance, unit))

    def write_unit(self, unit: EncodeUnit, advance: Callable[[int], None]) -> None:
        """Encode a unit into its files.

        Raises:
            DataError: a picture cannot be read.
            OSError: the folder is full or not writable.
        """
        data = self._job.data
        encoders = build_encoders(encoders_of(data), self._device)
        samples = RawSamples(
            self._sources[unit.split],
            seed=0,
            shuffle=False,
            skips=pictures_of(data).on_error == "skip",
        )
        parts: list[dict[str, torch.Tensor]] = []
        captions: list[str] = []
        with ThreadPoolExecutor(min(MOST_THREADS, cpus())) as threads:
            for begin in range(unit.begin, unit.end, self._config.batch_size):
                numbers = range(begin, min(begin + self._config.batch_size, unit.end))
                pictures, texts = zip(*threads.map(samples.sample, numbers), strict=True)
                moments = encoders.autoencoder.encode(as_floats(pictures))
                values = (*moments, *encoders.text.encode(texts))
                parts.append(self._stored(**dict(zip(_TENSORS, values, strict=True))))
                captions += texts
                advance(len(numbers))
        rows = {}
        for name in parts[0]:
            rows[name] = torch.cat([part[name] for part in parts])
        path = self.target / f"{unit.name}.safetensors"
        write_atomically(path, save(rows))
        write_atomically(self.target / f"{unit.name}.json", json.dumps(captions).encode())
        if unit.number == 0:
            empty = encoders.text.encode([""])
            stored = self._stored(text=empty.text_BLD[0], pooled=empty.pooled_BP[0])
            write_atomically(self.target / EMPTY, save(stored))
        digest = file_digest(path, xxhash.xxh3_64)
        entry = LatentFile(unit.name, unit.split, unit.nbytes, path.stat().st_size, digest)
        write_atomically(self._entry_path(unit), json.dumps(dataclasses.asdict(entry)).encode())

    def _stored(self, **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the tensors on the CPU, in the dtype of the encoders.

        Encoders without weights are exact, and their tensors stay float32.
        """
        encoders = encoders_of(self._job.data)
        dtype = getattr(torch, encoders.dtype) if encoders.has_weights else torch.float32
        return {
            name: tensor.contiguous().to("cpu", dtype)
            for name, tensor in tensors.items()
            if tensor is not None
        }

    def finish(self) -> LatentManifest | None:
        if any(self.missing(shard) for shard in range(len(self.shards))):
            return None
        manifest = LatentManifest(
            version=FORMAT_VERSION,
            encoders=dataclasses.asdict(encoders_of(self._job.data)),
            fingerprint=self._fingerprint,
            source=self.source_name,
            size=pictures_of(self._job.data).size,
            files=[
                LatentFile(**json.loads(self._entry_path(unit).read_bytes())) for unit in self.units
            ],
            key=self.key,
        )
        write_manifest(self.target, manifest)
        return manifest


def open_splits(job: EncodeJob) -> dict[str, PictureSource]:
    """Open the pictures of the split train, and of validation if some are held out."""
    splits = SPLITS if job.data.holds_out else SPLITS[:1]
    return {split: open_pictures(job.data, split, seed=job.training.seed) for split in splits}


def count_of(source: PictureSource, config: EncodeConfig, split: str) -> int:
    """Number of pictures to encode."""
    if source.num is not None:
        return source.num
    assert config.samples is not None, "checked by validate"
    return config.samples if split == "train" else config.validation_samples


def _units(counts: dict[str, int], size: int) -> Iterator[EncodeUnit]:
    number = 0
    for split, count in counts.items():
        for index, begin in enumerate(range(0, count, size)):
            yield EncodeUnit(number, split, index, begin, min(begin + size, count))
            number += 1


def _prepare(
    job: EncodeJob, device_type: str, index: int
) -> Callable[[EncodeUnit, Callable[[int], None]], None]:
    """Build the encoders in one of several processes; return the function that encodes a unit."""
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, index % torch.cuda.device_count())
    return LatentWriter(job, device).write_unit


class _Progress:
    """Prints every few seconds how many pictures have been encoded."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._started = time.monotonic()
        self._next = self._started + _SECONDS_BETWEEN_LINES

    def advance(self, unit: EncodeUnit, count: int) -> None:
        self._done += count
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + _SECONDS_BETWEEN_LINES
        speed = self._done / (now - self._started)
        sys.stderr.write(
            f"encoded {self._done:,} of {self._total:,} pictures, {speed:.1f} a second\n"
        )
        sys.stderr.flush()
