"""Write encoded pictures: for each unit of consecutive pictures a file of tensors, and one of captions.

The files do not depend on the number of processes and shards. They are described in
``pictures/loader.py``.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from safetensors.torch import save

from harness.data.shards import FORMAT_VERSION, ShardWriter, cut_units, write_manifest
from harness.data.workers import Workers
from harness.metrics.console import progress
from harness.train.setup import pick_device
from harness.util.encoding import json_digest
from harness.util.files import write_atomically
from harness.util.processes import cpus
from harness.util.store import file_digest
from harness_flux.pictures.config import pictures_of
from harness_flux.pictures.encoders import (
    as_floats,
    build_autoencoder,
    build_text_encoder,
    fingerprint_of,
)
from harness_flux.pictures.loader import EMPTY, MOST_THREADS, LatentFile, LatentManifest
from harness_flux.pictures.shapes import DrawnShapes
from harness_flux.pictures.sources import RawSamples, open_pictures

if TYPE_CHECKING:
    from harness_flux.encode.verb import EncodeJob

_SECONDS_BETWEEN_LINES = 10.0


@dataclass(frozen=True)
class EncodeUnit:
    """Consecutive pictures of a split; ``name`` is that of its files, without extension."""

    number: int
    split: str
    name: str
    pictures: range

    @property
    def nbytes(self) -> int:
        """Number of pictures. It stands for the size of the work."""
        return len(self.pictures)

    def __str__(self) -> str:
        return self.name


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
        config = job.encode
        assert config.target is not None, "checked by validate"
        self.target = Path(config.target).expanduser()
        self._job = job
        self._options = pictures_of(job.data)
        self._device = device or pick_device(job)
        self._fingerprint = fingerprint_of(job.data)
        drawn = {"train": config.samples}
        if job.data.holds_out:
            drawn["validation"] = config.validation_samples
        self._samples: dict[str, RawSamples | DrawnShapes] = {}
        self.units: list[EncodeUnit] = []
        for split, wanted in drawn.items():
            samples = open_pictures(job.data, split, seed=job.training.seed)
            self._samples[split] = samples
            # Pictures without an end have no number; as many are drawn as the job says.
            count = samples.num_per_epoch or wanted
            assert count is not None, "checked by validate"
            for index, begin in enumerate(range(0, count, config.unit)):
                pictures = range(count)[begin : begin + config.unit]
                name = f"{split}-{index:05}"
                self.units.append(EncodeUnit(len(self.units), split, name, pictures))
        self.source_name = self._samples["train"].name
        self.shards = cut_units(self.units, min(config.shards or 1, len(self.units)))

    @property
    def key(self) -> str:
        pictures = [samples.identity for samples in self._samples.values()]
        seed = self._job.training.seed
        return json_digest([FORMAT_VERSION, pictures, self._fingerprint, seed, self.plan])

    @property
    def plan(self) -> dict[str, Any]:
        config = self._job.encode
        return {
            "data": self.source_name,
            "data.options": self._job.data.options,
            "data.validation_fraction": self._job.data.validation_fraction,
            "encode.samples": config.samples,
            "encode.unit": config.unit,
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
        num_processes = min(workers or gpus or 1, len(units))
        batches = sum(-(-unit.nbytes // self._job.encode.batch_size) for unit in units)
        with progress(batches, seconds=_SECONDS_BETWEEN_LINES) as show:

            def advance(unit: EncodeUnit, count: int) -> None:
                show(unit.name)

            if num_processes > 1:
                prepare = partial(_prepare, self._job, self._device.type)
                processes = Workers(prepare, "encoded", "fewer encode.workers")
                processes.run(units, num_processes, advance)
                return
            for unit in units:
                self.write_unit(unit, partial(advance, unit))

    def write_unit(self, unit: EncodeUnit, advance: Callable[[int], None]) -> None:
        """Encode a unit into its files.

        Raises:
            DataError: a picture cannot be read.
            OSError: the folder is full or not writable.
        """
        autoencoder = build_autoencoder(self._options, self._device)
        encoder = build_text_encoder(self._options, self._device)
        step = self._job.encode.batch_size
        parts: list[dict[str, torch.Tensor]] = []
        captions: list[str] = []
        with ThreadPoolExecutor(min(MOST_THREADS, cpus())) as threads:
            for begin in range(0, unit.nbytes, step):
                numbers = unit.pictures[begin : begin + step]
                found = threads.map(self._samples[unit.split].sample, numbers)
                pictures, texts = zip(*found, strict=True)
                mean, std = autoencoder.encode(as_floats(pictures))
                text, pooled = encoder.encode(texts)
                parts.append(self._stored(mean=mean, std=std, text=text, pooled=pooled))
                captions += texts
                advance(len(numbers))
        rows = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
        path = self.target / f"{unit.name}.safetensors"
        write_atomically(path, save(rows))
        write_atomically(self.target / f"{unit.name}.json", json.dumps(captions).encode())
        # The embedding of an empty caption is written once, with the first unit.
        if unit.number == 0:
            text, pooled = encoder.encode([""])
            write_atomically(
                self.target / EMPTY, save(self._stored(text=text[0], pooled=pooled[0]))
            )
        digest = file_digest(path, xxhash.xxh3_64)
        entry = LatentFile(unit.name, unit.split, unit.nbytes, path.stat().st_size, digest)
        write_atomically(self._entry_path(unit), json.dumps(dataclasses.asdict(entry)).encode())

    def _stored(self, **tensors: torch.Tensor | None) -> dict[str, torch.Tensor]:
        """Return the tensors on the CPU, in the dtype of the encoders.

        Encoders without weights are exact, and their tensors stay float32.
        """
        options = self._options
        dtype = getattr(torch, options.dtype) if options.has_weights else torch.float32
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
            encoders=self._job.data.options,
            fingerprint=self._fingerprint,
            source=self.source_name,
            size=self._options.size,
            files=[
                LatentFile(**json.loads(self._entry_path(unit).read_bytes())) for unit in self.units
            ],
            key=self.key,
        )
        write_manifest(self.target, manifest)
        return manifest


def _prepare(
    job: EncodeJob, device_type: str, index: int
) -> Callable[[EncodeUnit, Callable[[int], None]], None]:
    """Build the encoders in one of several processes; return the function that encodes a unit."""
    torch.set_num_threads(1)
    device = torch.device(device_type)
    if device_type == "cuda":
        device = torch.device(device_type, index % torch.cuda.device_count())
    return LatentWriter(job, device).write_unit
