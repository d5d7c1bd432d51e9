"""Sample latents of pictures: Euler steps from noise to data along the predicted velocity."""

import io
import itertools
import math
import textwrap
import time
from collections import ChainMap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.config.fields import with_value
from harness.config.job import Job
from harness.parallelism.fsdp import reshard
from harness.parallelism.mesh import Mesh
from harness.util.errors import ConfigError
from harness.util.files import write_atomically
from harness.weights.detect import WeightFolder
from harness_flux.config import PATCH, FlowConfig, SamplingConfig, flow_of, flux_of
from harness_flux.model import Flux, pack, unpack
from harness_flux.objective import normals, shift_of
from harness_flux.pictures.config import pictures_of
from harness_flux.pictures.encoders import (
    Autoencoder,
    Embeddings,
    as_bytes,
    build_autoencoder,
    build_text_encoder,
)

NOISE = "sampled picture"
"""The purpose of the noise from which pictures are sampled (``objective.normals``)."""
LEAST_WIDTH = 128
"""Smaller pictures are enlarged on a sheet, in pixels."""
_COLUMNS = 8
_MARGIN = 8
_TEXT = 60
"""Height of four lines of a caption."""
_CHARACTER = 6
"""Width of a character."""


def write_picture(path: Path, picture: np.ndarray) -> None:
    """Write a picture, uint8 of shape (H, W, 3), as PNG."""
    from PIL import Image

    content = io.BytesIO()
    Image.fromarray(picture).save(content, "PNG")
    write_atomically(path, content.getvalue())


def write_sheet(path: Path, pictures: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write pictures of one size, uint8 of shape (H, W, 3), in rows with a caption below each, as PNG."""
    from PIL import Image, ImageDraw

    height, width = pictures[0].shape[:2]
    factor = -(-LEAST_WIDTH // width)
    wide = width * factor
    high = height * factor
    columns = min(_COLUMNS, len(pictures))
    rows = -(-len(pictures) // columns)
    cell = wide + _MARGIN, high + _TEXT + _MARGIN
    sheet = Image.new("RGB", (columns * cell[0] + _MARGIN, rows * cell[1] + _MARGIN), "white")
    drawing = ImageDraw.Draw(sheet)
    for number, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        left = _MARGIN + number % columns * cell[0]
        top = _MARGIN + number // columns * cell[1]
        large = Image.fromarray(picture).resize((wide, high), Image.Resampling.NEAREST)
        sheet.paste(large, (left, top))
        lines = textwrap.wrap(caption, wide // _CHARACTER)[:4]
        drawing.multiline_text((left, top + high), "\n".join(lines), fill="black")
    write_picture(path, np.asarray(sheet))


def sampling_times(steps: int, shift: float) -> list[float]:
    """Times from 1 (noise) to 0, with more of them near noise for a positive shift.

    ``e^s t / (1 + (e^s - 1) t)`` of equally spaced t (src/flux/sampling.py, get_schedule); as in
    diffusers, in float32.
    """
    times = np.linspace(1, 0, steps + 1).astype(np.float32)
    factor = np.float32(math.exp(shift))
    return [float(time) for time in factor * times / (1 + (factor - 1) * times)]


@torch.no_grad()
def sample_latents(
    part: Flux,
    mesh: Mesh,
    flow: FlowConfig,
    settings: SamplingConfig,
    noise_BCHW: Tensor,
    captions: Embeddings,
    empty: Embeddings | None = None,
) -> Tensor:
    """Sample latents [B, C, H, W], float32, on any layout without a pipeline.

    All ranks call it together; tensor- and context-parallel ranks with the same pictures.

    Args:
        flow: its shift of times is that of sampling, too.
        noise_BCHW: float32, on the device of the part.
        empty: those of the empty caption, one row; needed if ``settings.cfg`` is not 1.
    """
    tokens_BIP = pack(noise_BCHW)
    device = noise_BCHW.device
    rows, length, _ = tokens_BIP.shape
    guidance_B = torch.full((rows,), settings.guidance, device=device)

    def velocity(given: Embeddings, time: float) -> Tensor:
        """Predict noise - data for all tokens of the pictures, float32."""
        text_BLD = given.text_BLD.to(device).expand(rows, -1, -1)
        text_BLD, own_BIP = part.own_tokens(text_BLD, tokens_BIP)
        pooled_BP = given.pooled_BP.to(device).expand(rows, -1)
        times_B = torch.full((rows,), time, device=device)
        predicted: Tensor = part(own_BIP, text_BLD, pooled_BP, times_B, guidance_B).float()
        if mesh.size("cp") == 1:
            return predicted
        # Context-parallel ranks have different tokens: each adds its own to zeros.
        complete = torch.zeros_like(tokens_BIP).index_copy(1, part.own_image, predicted)
        dist.all_reduce(complete, group=mesh.group("cp"))
        return complete

    shift = shift_of(flow, length) if settings.shift else 0.0
    for current, following in itertools.pairwise(sampling_times(settings.steps, shift)):
        direction = velocity(captions, current)
        if settings.cfg != 1:
            assert empty is not None, "classifier-free guidance needs the empty caption"
            without = velocity(empty, current)
            direction = without + settings.cfg * (direction - without)
        tokens_BIP = tokens_BIP + (following - current) * direction
    # Without a backward pass FSDP leaves some modules gathered.
    reshard(part)
    return unpack(tokens_BIP)


def generate(
    job: Any,
    device: torch.device,
    load: Callable[[Job], Any],
    found: WeightFolder,
    prompts: Sequence[str],
) -> dict[str, Any]:
    """Generate on this rank of a process group; rank 0 writes the files, and its result is shown.

    Args:
        load: returns a job's model with its weights (``harness.compose.generator.Request``).
        prompts: those of all ranks.
    """
    started = time.perf_counter()
    text_BLD, pooled_BP = _embeddings(job, device, ["", *prompts])
    autoencoder = build_autoencoder(pictures_of(job.data), device)
    config = SamplingConfig(**job.generate.options)
    size = config.size or trained_size(job, found, autoencoder)
    _check(job, autoencoder, Embeddings(text_BLD, pooled_BP), size)
    side = size // autoencoder.pixels
    tokens = (side // PATCH) ** 2
    job = with_value(job, "training.seq_len", flux_of(job.model).text_length + tokens)
    model = load(job)
    loaded = time.perf_counter()
    shape = autoencoder.channels, side, side
    replicas = job.parallelism.data_parallel
    own = dict[int, np.ndarray]()
    step = job.generate.batch_size * replicas
    for start in range(0, len(prompts), step):
        numbers = range(len(prompts))[start : start + step]
        mine = numbers[model.mesh.data_rank :: replicas]
        # Every rank takes part in every pass: one without a prompt of its own repeats the first.
        chosen = mine or numbers[:1]
        rows = [number + 1 for number in chosen]  # the first caption is the empty one
        latents = sample_latents(
            model.part,
            model.mesh,
            flow_of(job),
            config,
            normals(NOISE, job.generate.seed, chosen, shape, device),
            Embeddings(text_BLD[rows], pooled_BP[rows]),
            Embeddings(text_BLD[:1], pooled_BP[:1]),
        )
        if mine and model.mesh.rank("tp") == 0 and model.mesh.rank("cp") == 0:
            own |= zip(mine, as_bytes(autoencoder.decode(latents)), strict=True)
    pictures = ChainMap(*model.ranks.gather(own))
    listed = []
    for number, prompt in enumerate(prompts):
        file = Path(config.output) / f"{number:03}.png"
        listed.append({"prompt": prompt, "file": str(file)})
        if model.ranks.rank == 0:
            write_picture(file, pictures[number])
    return {
        "pictures": listed,
        "size": size,
        "load_seconds": loaded - started,
        "seconds": time.perf_counter() - loaded,
    }


def _embeddings(job: Any, device: torch.device, texts: Sequence[str]) -> Embeddings:
    """Encode captions, in host memory. The encoder is freed on return: T5 is as large as the model."""
    encoder = build_text_encoder(pictures_of(job.data), device)
    build_text_encoder.cache_clear()
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
    _, side, _ = flux_of(job.model).latents_shape(recorded["seq_len"])
    return side * autoencoder.pixels


def _check(job: Any, autoencoder: Autoencoder, captions: Embeddings, size: int) -> None:
    """Check that the encoders are those of the model, and that the size can be cut into tokens."""
    flux = flux_of(job.model)
    unit = autoencoder.pixels * PATCH
    if size % unit:
        rule = f"must be a multiple of {unit}, the pixels of a token"
        raise ConfigError("generate.options.size", size, rule, [max(1, size // unit) * unit])
    encoders = pictures_of(job.data)
    for name, value, has, wants in (
        ("autoencoder", encoders.autoencoder, autoencoder.channels, flux.latent_channels),
        ("text_length", encoders.text_length, captions.text_BLD.shape[1], flux.text_length),
        ("text", encoders.text, captions.text_BLD.shape[2], flux.context_dim),
        ("text", encoders.text, captions.pooled_BP.shape[1], flux.pooled_dim),
    ):
        if has != wants:
            rule = f"makes {has} values where model={job.model.name} takes {wants}"
            raise ConfigError(f"data.options.{name}", value, rule, "the encoders of training")
