"""Sample latents of pictures: Euler steps from noise to data along the predicted velocity."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.fields import with_value
from harness.config.job import Job
from harness.contrib.flux.config import PATCH, FlowConfig, SamplingConfig, flow_of, flux_of
from harness.contrib.flux.model import Flux, pack, unpack
from harness.contrib.flux.objective import generator_of, shift_of
from harness.contrib.flux.pictures.config import encoders_of
from harness.contrib.flux.pictures.encoders import (
    Autoencoder,
    Embeddings,
    as_bytes,
    build_autoencoder,
    build_text_encoder,
)
from harness.parallelism.fsdp import reshard
from harness.parallelism.mesh import Mesh
from harness.util.errors import ConfigError
from harness.util.files import write_atomically
from harness.weights.detect import WeightFolder

LEAST_WIDTH = 128
"""Smaller pictures are enlarged on a sheet, in pixels."""
_COLUMNS = 8
_MARGIN = 8
_LINE = 12
_CHARACTERS_PER_PIXEL = 1 / 6


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Write a picture, uint8 of shape (H, W, 3), as PNG."""
    from PIL import Image

    write_atomically(path, _png(Image.fromarray(picture)))


def write_sheet(path: Path, pictures: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write pictures of one size, uint8 of shape (H, W, 3), in rows with a caption below each, as PNG."""
    from PIL import Image, ImageDraw

    height, width = pictures[0].shape[:2]
    factor = -(-LEAST_WIDTH // width)
    wide = width * factor
    high = height * factor
    texts = [
        textwrap.wrap(caption, max(1, int(wide * _CHARACTERS_PER_PIXEL)))[:4]
        for caption in captions
    ]
    below = max(map(len, texts)) * _LINE
    columns = min(_COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    cell = wide + _MARGIN, high + below + _MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + _MARGIN, rows * cell[1] + _MARGIN), "white")
    drawing = ImageDraw.Draw(sheet)
    for i, (picture, lines) in enumerate(zip(pictures, texts, strict=True)):
        left = _MARGIN + i % columns * cell[0]
        top = _MARGIN + i // columns * cell[1]
        sheet.paste(
            Image.fromarray(picture).resize((wide, high), Image.Resampling.NEAREST), (left, top)
        )
        for line, text in enumerate(lines):
            drawing.text((left, top + high + line * _LINE), text, fill="black")
    write_atomically(path, _png(sheet))


def _png(picture: object) -> bytes:
    from PIL import Image

    assert isinstance(picture, Image.Image)
    content = io.BytesIO()
    picture.save(content, "PNG")
    return content.getvalue()


class Sampling(NamedTuple):
    """How latents are sampled.

    Attributes:
        steps: passes of the model.
        guidance: strength of guidance, given to a model with ``flux.guidance``.
        cfg: weight of classifier-free guidance: the velocity is ``empty + cfg * (caption -
            empty)``, with a second pass for the empty caption. 1: only one pass.
    """

    steps: int
    guidance: float = 3.5
    cfg: float = 1.0


def sampling_times(steps: int, shift: float) -> list[float]:
    """Times from 1 (noise) to 0, with more of them near noise for a positive shift.

    ``e^s t / (1 + (e^s - 1) t)`` of equally spaced t (src/flux/sampling.py, get_schedule); as in
    diffusers, in float32.
    """
    times = np.linspace(1, 0, steps + 1).astype(np.float32)
    factor = np.float32(math.exp(shift))
    return [float(time) for time in factor * times / (1 + (factor - 1) * times)]


def noise_of(
    seed: int, numbers: Sequence[int], shape: Sequence[int], device: torch.device
) -> Tensor:
    """Normal noise [B, *shape], float32; each row is a function of the seed and its number."""
    rows = [
        torch.randn(
            *shape, generator=generator_of(seed, "sampled picture", number, device), device=device
        )
        for number in numbers
    ]
    return torch.stack(rows)


class LatentSampler:
    """Samples latents with a model part, on any layout without a pipeline.

    Args:
        part: the model.
        mesh: all ranks call ``sample`` together; tensor- and context-parallel ranks with the same
            pictures.
        flow: its shift of times is that of sampling, too.
    """

    def __init__(self, part: Flux, mesh: Mesh, flow: FlowConfig) -> None:
        self._part = part
        self._mesh = mesh
        self._flow = flow

    @torch.no_grad()
    def sample(
        self, noise_BCHW: Tensor, captions: Embeddings, empty: Embeddings | None, settings: Sampling
    ) -> Tensor:
        """Return latents [B, C, H, W], float32.

        Args:
            noise_BCHW: float32, on the device of the part.
            empty: those of the empty caption, one row; needed if ``how.cfg`` is not 1.
        """
        grid = noise_BCHW.shape[2] // PATCH, noise_BCHW.shape[3] // PATCH
        self._part.set_grid(*grid)
        tokens_BIP = pack(noise_BCHW)
        device = noise_BCHW.device
        captions = Embeddings(*(each.to(device) for each in captions))
        if settings.cfg != 1:
            assert empty is not None, "classifier-free guidance needs the empty caption"
            rows = len(noise_BCHW)
            empty = Embeddings(*(each.to(device).expand(rows, *each.shape[1:]) for each in empty))
        times = sampling_times(settings.steps, shift_of(self._flow, math.prod(grid)))
        for current, following in itertools.pairwise(times):
            velocity = self._velocity(tokens_BIP, captions, current, settings)
            if empty is not None and settings.cfg != 1:
                without = self._velocity(tokens_BIP, empty, current, settings)
                velocity = without + settings.cfg * (velocity - without)
            tokens_BIP = tokens_BIP + (following - current) * velocity
        # Without a backward pass FSDP leaves some modules gathered.
        reshard(self._part)
        return unpack(tokens_BIP, grid)

    def _velocity(
        self, tokens_BIP: Tensor, captions: Embeddings, time: float, settings: Sampling
    ) -> Tensor:
        """Predict noise - data for all tokens of the pictures, float32."""
        part = self._part
        device = tokens_BIP.device
        text_BLD, own_BIP = part.own_tokens(captions.text_BLD, tokens_BIP)
        times_B = torch.full((len(tokens_BIP),), time, device=device)
        guidance_B = torch.full_like(times_B, settings.guidance) if part.flux.guidance else None
        predicted = part(own_BIP, text_BLD, captions.pooled_BP, times_B, guidance_B).float()
        if self._mesh.size("cp") == 1:
            return predicted  # type: ignore[no-any-return]
        # Context-parallel ranks have different tokens: each adds its own to zeros.
        index = torch.arange(tokens_BIP.shape[1], device=device)[None, :, None]
        own = part.own_tokens(captions.text_BLD[:1], index)[1][0, :, 0]
        complete = torch.zeros_like(tokens_BIP).index_copy(1, own, predicted)
        dist.all_reduce(complete, group=self._mesh.group("cp"))
        return complete


def without_shift(flow: FlowConfig) -> FlowConfig:
    """The config of times that are not shifted."""
    return replace(flow, base_shift=0.0, max_shift=0.0)


@dataclass
class PictureFiles:
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
) -> PictureFiles:
    """Generate on this rank of a process group; rank 0 writes the files. Durations: of the slowest rank.

    Args:
        load: returns a job's model with its weights (``harness.compose.generator.Request``).
        prompts: those of all ranks.
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
    sampler = LatentSampler(model.part, model.mesh, flow)
    shape = autoencoder.channels, side, side
    settings = Sampling(config.steps, config.guidance, config.cfg)
    replicas = job.parallelism.data_parallel
    own = dict[int, np.ndarray]()
    for start in range(0, len(prompts), job.generate.batch_size * replicas):
        numbers = list(range(start, min(start + job.generate.batch_size * replicas, len(prompts))))
        mine = numbers[model.mesh.data_rank :: replicas]
        # Every rank takes part in every pass: one without a prompt of its own repeats the first.
        chosen = mine or numbers[:1]
        rows = [number + 1 for number in chosen]  # the first caption is the empty one
        latents = sampler.sample(
            noise_of(job.generate.seed, chosen, shape, device),
            Embeddings(*(each[rows] for each in captions)),
            Embeddings(*(each[:1] for each in captions)),
            settings,
        )
        if mine and model.mesh.rank("tp") == 0 and model.mesh.rank("cp") == 0:
            own |= zip(mine, as_bytes(autoencoder.decode(latents)), strict=True)
    pictures = dict[int, np.ndarray]()
    for part in model.ranks.gather(own):
        pictures |= part
    outcome = PictureFiles(size=size)
    outcome.files = [
        str(Path(config.output) / f"{number:03}.png") for number in range(len(prompts))
    ]
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
    encoder = build_text_encoder(encoders_of(job.data), device, shard=True)
    count = job.generate.batch_size
    parts = [encoder.encode(texts[start : start + count]) for start in range(0, len(texts), count)]
    joined = (torch.cat(same).cpu() for same in zip(*parts, strict=True))
    return Embeddings(*joined)


def trained_size(job: Any, found: WeightFolder, autoencoder: Autoencoder) -> int:
    """Height and width in pixels of the pictures that the model was trained on."""
    recorded = (found.manifest.get("job") or {}).get("training")
    if recorded is None:
        rule = f"must be given, because {found.path} records no job that trained it"
        raise ConfigError("generate.options.size", None, rule, [1024])
    tokens = recorded["seq_len"] - flux_of(job.model).text_length
    return math.isqrt(tokens) * PATCH * autoencoder.pixels


def _check(job: Any, autoencoder: Autoencoder, captions: Embeddings, size: int) -> None:
    """Check that the encoders are those of the model, and that the size can be cut into tokens."""
    flux = flux_of(job.model)
    unit = autoencoder.pixels * PATCH
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
