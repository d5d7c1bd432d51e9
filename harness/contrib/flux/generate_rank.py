"""One rank of a generation of pictures: encode the prompts, sample latents, decode and write them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.config.fields import with_value
from harness.config.job import Job
from harness.contrib.flux.config import PATCH, SamplingConfig, flow_of, flux_of
from harness.contrib.flux.pictures.config import encoders_of
from harness.contrib.flux.pictures.encoder_base import Autoencoder, Embeddings
from harness.contrib.flux.pictures.encoders import as_bytes, build_autoencoder, build_text_encoder
from harness.contrib.flux.pictures.sheet import write_picture
from harness.contrib.flux.sampling import Sampler, Sampling, noise_of, without_shift
from harness.util.errors import ConfigError
from harness.weights.detect import WeightFolder


@dataclass
class Outcome:
    """Files of the pictures, in the order of the prompts; size in pixels; durations in seconds."""

    files: list[str] = field(default_factory=list)
    size: int = 0
    load_seconds: float = 0.0
    seconds: float = 0.0


def generate(
    job: Any,
    device: torch.device,
    load: Callable[[Job], Any],
    found: WeightFolder,
    prompts: Sequence[str],
) -> Outcome:
    """Generate on this rank of a process group.

    Args:
        job: the resolved job.
        device: where this rank computes.
        load: returns a job's model with its weights (``harness.compose.generator.Request``).
        found: the weights.
        prompts: all prompts.

    Returns:
        The files, written by rank 0, and the durations of the slowest rank.
    """
    started = time.perf_counter()
    captions = _embeddings(job, device, ["", *prompts])
    autoencoder = build_autoencoder(encoders_of(job.data), device)
    config = SamplingConfig(**job.generate.options)
    size = config.size or trained_size(job, found, autoencoder)
    _check(job, autoencoder, captions, size)
    side = size // autoencoder.pixels
    tokens = (side // PATCH) ** 2
    job = with_value(job, "training.seq_len", flux_of(job.model).text_length + tokens)
    model = load(job)
    loaded = time.perf_counter()
    flow = flow_of(job) if config.shift else without_shift(flow_of(job))
    sampler = Sampler(model.part, model.mesh, flow)
    shape = autoencoder.channels, side, side
    how = Sampling(config.steps, config.guidance, config.cfg)
    replicas, own = job.parallelism.data_parallel, dict[int, np.ndarray]()
    for start in range(0, len(prompts), job.generate.batch_size * replicas):
        numbers = list(range(start, min(start + job.generate.batch_size * replicas, len(prompts))))
        mine = numbers[model.mesh.data_rank :: replicas]
        # Every rank takes part in every pass: one without a prompt of its own repeats the first.
        chosen = mine or numbers[:1]
        latents = sampler.sample(
            noise_of(job.generate.seed, chosen, shape, device),
            Embeddings(*(each[[number + 1 for number in chosen]] for each in captions)),
            Embeddings(*(each[:1] for each in captions)),
            how,
        )
        if mine and model.mesh.rank("tp") == 0 and model.mesh.rank("cp") == 0:
            own |= zip(mine, as_bytes(autoencoder.decode(latents)), strict=True)
    pictures = {number: picture for each in model.ranks.gather(own) for number, picture in each.items()}
    outcome = Outcome(size=size)
    outcome.files = [str(Path(config.output) / f"{number:03}.png") for number in range(len(prompts))]
    if model.ranks.rank == 0:
        for number, file in enumerate(outcome.files):
            write_picture(Path(file), pictures[number])
    seconds = loaded - started, time.perf_counter() - loaded
    outcome.load_seconds, outcome.seconds = (
        max(each) for each in zip(*model.ranks.gather(seconds), strict=True)
    )
    return outcome


def _embeddings(job: Any, device: torch.device, texts: Sequence[str]) -> Embeddings:
    """Encode captions, in host memory. The encoder is freed on return: T5 is as large as the model."""
    encoder, count = build_text_encoder(encoders_of(job.data), device, shard=True), job.generate.batch_size
    parts = [encoder.encode(texts[start : start + count]) for start in range(0, len(texts), count)]
    return Embeddings(*(torch.cat([each.cpu() for each in same]) for same in zip(*parts, strict=True)))


def trained_size(job: Any, found: WeightFolder, autoencoder: Autoencoder) -> int:
    """Height and width in pixels of the pictures that the model was trained on.

    Raises:
        ConfigError: the weights do not record it.
    """
    recorded = (found.manifest.get("job") or {}).get("training")
    if recorded is None:
        rule = f"must be given, because {found.path} records no job that trained it"
        raise ConfigError("generate.options.size", None, rule, [1024])
    tokens = recorded["seq_len"] - flux_of(job.model).text_length
    return math.isqrt(tokens) * PATCH * autoencoder.pixels


def _check(job: Any, autoencoder: Autoencoder, captions: Embeddings, size: int) -> None:
    """Check that the encoders are those of the model, and that the size can be cut into tokens.

    Raises:
        ConfigError: another shape.
    """
    flux, unit = flux_of(job.model), autoencoder.pixels * PATCH
    if size % unit:
        rule = f"must be a multiple of {unit}, the pixels of a token"
        raise ConfigError("generate.options.size", size, rule, [max(1, size // unit) * unit])
    encoders = encoders_of(job.data)
    for name, value, has, wants in (
        ("autoencoder", encoders.autoencoder, autoencoder.channels, flux.latent_channels),
        ("text_length", encoders.text_length, captions.text_BLD.shape[1], flux.text_length),
        ("text", encoders.text, captions.text_BLD.shape[2], flux.context_dim),
        ("text", encoders.text, captions.pooled_BP.shape[1], flux.pooled_dim),
    ):
        if has != wants:
            rule = f"makes {has} values where model={job.model.name} takes {wants}"
            raise ConfigError(f"data.options.{name}", value, rule, "the encoders of training")
