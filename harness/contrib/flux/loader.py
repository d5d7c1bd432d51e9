"""The loader of a job that trains Flux, and random latents."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np

from harness.config.job import Job
from harness.config.training import Sizes
from harness.contrib.flux.config import PATCH, flow_of, flux_of
from harness.contrib.flux.pictures.config import encoders_of, pictures_of
from harness.contrib.flux.pictures.encoders import build_encoders
from harness.contrib.flux.pictures.latents import LatentSamples, check_files
from harness.contrib.flux.pictures.loader import (
    Caption,
    CaptionDropout,
    EncodedLoader,
    EncodingLoader,
    Picture,
)
from harness.contrib.flux.pictures.sources import RawSamples, open_pictures
from harness.data.loader import Loader
from harness.data.samples import random_stream
from harness.train.setup import pick_device


class SyntheticPictures:
    """Normal random latents and embeddings of the model's shapes; needs no file."""

    num_per_epoch: int | None = None

    def __init__(self, job: Job, split: str) -> None:
        self._flux, self._seed, self._split = flux_of(job.model), job.training.seed, split
        side = PATCH * math.isqrt(job.training.seq_len - self._flux.text_length)
        self._shape = self._flux.latent_channels, side, side

    @property
    def empty(self) -> Caption:
        return self._caption(random_stream("synthetic empty caption", self._seed, 0))

    def sample(self, number: int) -> tuple[Picture, Caption]:
        random = random_stream(f"synthetic pictures {self._split}", self._seed, number)
        mean = random.standard_normal(self._shape).astype(np.float32)
        return Picture(mean, np.full_like(mean, 0.1)), self._caption(random)

    def caption(self, number: int) -> str:
        return f"random {number}"

    def _caption(self, random: np.random.RandomState) -> Caption:
        text = random.standard_normal((self._flux.text_length, self._flux.context_dim))
        pooled = random.standard_normal(self._flux.pooled_dim)
        return Caption(text.astype(np.float32), pooled.astype(np.float32))


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
            job.data, split, seed=job.training.seed, wait_for_all=wait_for_all, is_builder=is_builder
        ),
        seed=job.training.seed,
        shuffle=shuffle,
        skips=pictures_of(job.data).on_error == "skip",
    )
    encoders = build_encoders(encoders_of(job.data), pick_device(job), shard=True)
    return EncodingLoader(
        pictures, encoders, rows, sizes, dropout, runs_in_loop=encoders_of(job.data).has_weights
    )
