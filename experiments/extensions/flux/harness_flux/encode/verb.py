"""The verb ``encode``."""

import os
from dataclasses import dataclass

from harness.compose.verb import Result, Verb
from harness.config.data import DataConfig
from harness.config.fields import label, part
from harness.config.job import Job
from harness.data.shards import write_here
from harness.train.process import importing_torch, openmp_environment
from harness.util.errors import ConfigError
from harness_flux.pictures.config import pictures_of

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
    """Number of processes, on SLURM of each task; each has a GPU of its own, if there are GPUs.
    Null: one for each GPU, or 1."""
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
        if (data.kind == "drawn_shapes") != (self.samples is not None):
            rule = "is given for data.kind=drawn_shapes, which has no end, and for nothing else"
            raise ConfigError("encode.samples", self.samples, rule, "10000, or null")


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
        from harness_flux.encode.writer import LatentWriter
        from harness_flux.pictures.loader import read_manifest
    writer = LatentWriter(job)
    seconds = 0.0
    if not writer.is_complete:
        writer.check_target()
        if job.cluster.kind == "slurm":
            from harness.launch.shards import submit

            return submit(job, writer, "harness_flux.encode.task", job.encode.workers or 1)
        seconds = write_here(writer, job.encode.workers)
    manifest = read_manifest(writer.target)
    if manifest.key != writer.key:
        rule = f"has latents of {manifest.source}, with another source, encoder, size or seed"
        works = "another folder, or remove this one"
        raise ConfigError("encode.target", job.encode.target, rule, works)
    data = {
        "target": str(writer.target),
        "train": manifest.count("train"),
        "validation": manifest.count("validation"),
        "files": len(manifest.files),
        "seconds": seconds,
    }
    text = (
        f"{writer.target} is complete, after {seconds:.1f} s: {data['train']:,} pictures for training, "
        f"{data['validation']:,} for validation; files: {len(manifest.files)}\n"
        f"next: harness train ... data=latents 'data.paths=[{writer.target}]'\n"
    )
    return Result(data, text)


VERB = Verb("encode", encode, help=HELP, job=EncodeJob, has_json=True, is_alone=True)
