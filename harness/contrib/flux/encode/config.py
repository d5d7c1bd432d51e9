"""Configuration of ``harness encode``."""

from __future__ import annotations

from dataclasses import dataclass

from harness.config.data import DataConfig
from harness.config.fields import label, part
from harness.config.job import Job
from harness.contrib.flux.pictures.config import pictures_of
from harness.util.errors import ConfigError

SOURCES = ("pictures", "hub_pictures", "drawn_shapes")


@dataclass(frozen=True)
class EncodeConfig:
    """Target and parts of encoded pictures."""

    target: str | None = label(None, written="folder", works="latents/NAME")
    """Folder of the latents, which `data=latents` reads. An unfinished one of the same job is continued."""

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
            raise ConfigError("encode.samples", None, "drawn shapes have no end", "encode.samples=10000")
        if data.kind != "drawn_shapes" and self.samples is not None:
            rule = "is read only with data.kind=drawn_shapes"
            raise ConfigError("encode.samples", self.samples, rule, "null")


@dataclass(frozen=True)
class EncodeJob(Job):
    """A job's pictures and encoders, and the latents to write."""

    feeds_model = False

    encode: EncodeConfig = part(EncodeConfig)
    """Target and parts."""
