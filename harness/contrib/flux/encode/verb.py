"""The verb ``encode``."""

from __future__ import annotations

import os
from dataclasses import dataclass

from harness.compose.verb import Result, Verb
from harness.config.data import DataConfig
from harness.config.fields import label, part
from harness.config.job import Job
from harness.contrib.flux.pictures.config import pictures_of
from harness.data.shards import write_here
from harness.train.process import importing_torch, openmp_environment
from harness.util.errors import ConfigError
from harness.util.words import plural

HELP = """`harness encode`: encode pictures with captions, which training reads with `data=latents`.

    harness encode data=cc12m data.options.crop=center ... encode.target=latents/cc12m
    harness encode data=drawn_shapes encode.samples=10000 encode.target=latents/shapes
    harness encode ... cluster=slurm_h100 encode.shards=32      one task of an array for each shard

The same command continues after a kill. The latents do not depend on the number of processes and tasks.
"""

SOURCES = ("pictures", "hub_pictures", "drawn_shapes")


@dataclass(frozen=True)
class EncodeConfig:
    """Target and parts of encoded pictures."""

    target: str | None = label(None, written="folder", works="latents/NAME")
    """Folder of the latents, which `data=latents` reads. An unfinished one of the same job is
    continued."""
    samples: int | None = label(None, least=1)
    """drawn_shapes: number of pictures for training, which otherwise have no end."""
    validation_samples: int = label(64, least=1)
    """drawn_shapes: number of pictures for validation."""
    workers: int | None = label(None, least=1)
    """Number of processes, on SLURM of each task; each has a GPU of its own, if there are GPUs. Null: one for
    each GPU, or 1."""
    shards: int | None = label(None, least=1)
    """Number of parts; on SLURM one task each. The latents do not depend on it. Null: 1."""
    unit: int = label(512, least=1)
    """Pictures in a file; unfinished files are repeated after a kill."""
    batch_size: int = label(16, least=1)
    """Pictures that are encoded together."""

    def validate(self, data: DataConfig) -> None:
        """Raise ConfigError for a missing target, or data without pictures to encode."""
        if self.target is None:
            raise ConfigError("encode.target", self.target, "must be given", "latents/NAME")
        if data.kind not in SOURCES:
            rule = "is encoded" if data.kind == "latents" else "has no pictures to encode"
            raise ConfigError("data.kind", data.kind, rule, [*SOURCES])
        if pictures_of(data).crop == "random":
            rule = "a picture is encoded once, with one crop"
            raise ConfigError("data.options.crop", "random", rule, "data.options.crop=center")
        if data.kind == "drawn_shapes" and self.samples is None:
            raise ConfigError(
                "encode.samples", None, "drawn shapes have no end", "encode.samples=10000"
            )
        if data.kind != "drawn_shapes" and self.samples is not None:
            rule = "is read only with data.kind=drawn_shapes"
            raise ConfigError("encode.samples", self.samples, rule, "null")


@dataclass(frozen=True)
class EncodeJob(Job):
    """A job's pictures and encoders, and the latents to write."""

    feeds_model = False

    encode: EncodeConfig = part(EncodeConfig)
    """Target and parts."""


def encode(job: EncodeJob, overrides: list[str]) -> int | Result:
    """Write a folder of latents, continue an unfinished one, or submit SLURM jobs that do."""
    job.encode.validate(job.data)
    os.environ.update(openmp_environment(job))
    with importing_torch():
        from harness.contrib.flux.encode.writer import LatentWriter
        from harness.contrib.flux.pictures.loader import LatentManifest, read_manifest
    writer = LatentWriter(job)

    def result(manifest: LatentManifest, title: str, seconds: float = 0.0) -> Result:
        counts = {split: manifest.count(split) for split in ("train", "validation")}
        data = {
            "target": str(writer.target),
            **counts,
            "files": len(manifest.files),
            "seconds": seconds,
        }
        shown = "; ".join(
            f"{split} {plural(count, 'picture')}" for split, count in counts.items() if count
        )
        command = f"next: harness train ... data=latents 'data.paths=[{writer.target}]'"
        return Result(data, f"{title}\n{shown}; files: {len(manifest.files)}\n{command}\n")

    if writer.is_complete:
        manifest = read_manifest(writer.target)
        if manifest.key != writer.key:
            rule = f"has latents of {manifest.source}, with another source, encoder, size or seed"
            raise ConfigError(
                "encode.target", job.encode.target, rule, "another folder, or remove this one"
            )
        return result(manifest, f"{writer.target} is complete")
    writer.check_target()
    if job.cluster.kind == "slurm":
        from harness.launch.shards import submit

        return submit(job, writer, "harness.contrib.flux.encode.task", job.encode.workers or 1)
    pictures = 0
    for shard in range(len(writer.shards)):
        pictures += sum(unit.nbytes for unit in writer.missing(shard))
    seconds = write_here(writer, job.encode.workers)
    rate = f"{pictures:,} pictures in {seconds:.1f} s, {pictures / seconds:.1f} a second"
    return result(read_manifest(writer.target), f"{writer.target}: {rate}", seconds)


VERB = Verb("encode", encode, help=HELP, job=EncodeJob, has_json=True, is_alone=True)
